"""Replicas on Ray, as far as it goes without Ray; see `test_ray_actors.py`."""

import os
import sys
from types import SimpleNamespace

import psutil
import pytest

from specctl.errors import UsageError
from specctl.profile import resolve
from specctl.text_engine.job import Job, ReplicaError
from specctl.text_engine.on_ray import Actor, RayEngine, connected, described, fingerprint, running

ECHO = "tests.text_engine.toy_jobs:echo"


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """What Ray reads of the environment is this test's own."""
    monkeypatch.setattr(os, "environ", {name: of for name, of in os.environ.items() if not name.startswith("RAY_")})


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Lets processes seem to run, given as their command lines, and the last `ray start` have had an address."""

    def machine(*commands, last=None):
        found = [SimpleNamespace(info={"cmdline": command and command.split()}) for command in commands]
        monkeypatch.setattr(psutil, "process_iter", lambda _: iter(found))
        os.environ["RAY_TMPDIR"] = str(tmp_path)
        if last is not None:
            (tmp_path / "ray").mkdir()
            (tmp_path / "ray" / "ray_current_cluster").write_text(f"{last}\n")

    return machine


class FakeRay:
    """Stands for the package: remembers how it was initialised, and says where its node is."""

    __version__ = "9.9"

    def __init__(self, ip):
        self.util = SimpleNamespace(get_node_ip_address=lambda: ip)
        self.calls = []

    def init(self, *address, **_):
        self.calls.append((*address, {name: of for name, of in os.environ.items() if name.startswith("RAY_")}))

    def shutdown(self):
        self.calls.append("shutdown")


def test_without_ray_the_message_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="which is not installed") as caught:
        connected("host:1")
    assert caught.value.hint.startswith('pip install "ray')


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import a_module_that_ray_needs.part", "its module a_module_that_ray_needs is missing"),
        ("raise ImportError('libfoo.so: cannot open')", "libfoo.so: cannot open"),
    ],
)
def test_what_ray_itself_lacks_is_named(monkeypatch, tmp_path, program, said):
    (tmp_path / "ray.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(UsageError, match="installed but cannot be imported") as caught:
        connected("host:1")
    assert said in caught.value.message


def test_a_cluster_of_this_command_is_on_loopback_behind_a_token(machine, monkeypatch):
    machine()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    monkeypatch.setitem(sys.modules, "ray", ray := FakeRay("127.0.0.1"))
    connected("auto")
    [(address, told)] = ray.calls
    assert address == "local"
    assert told["RAY_AUTH_MODE"] == "token"
    assert len(told["RAY_AUTH_TOKEN"]) == 64
    assert told["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"


def test_a_cluster_that_others_could_reach_is_ended_at_once(machine, monkeypatch):
    machine()
    monkeypatch.setitem(sys.modules, "ray", ray := FakeRay("192.0.2.7"))
    with pytest.raises(ReplicaError, match="would listen to other machines"):
        connected("auto")
    assert ray.calls[-1] == "shutdown"


def test_one_that_runs_is_found_and_used_as_it_is(machine, monkeypatch):
    machine("raylet --gcs-address=192.0.2.7:6379 --x", None, "python")
    monkeypatch.setitem(sys.modules, "ray", ray := FakeRay("192.0.2.7"))
    connected("auto")
    assert ray.calls[0][0] == "192.0.2.7:6379"
    assert "RAY_AUTH_TOKEN" not in ray.calls[0][1]


@pytest.mark.parametrize("other", ["127.0.0.1:4000", "localhost:4000", "[::1]:4000"])
def test_a_cluster_on_loopback_is_another_commands_unless_ray_start_made_it(machine, other):
    machine(f"raylet --gcs-address={other}")
    assert running() is None
    machine(f"raylet --gcs-address={other}", "raylet --gcs-address=192.0.2.7:6379", last=other)
    assert running() == other


def test_a_file_of_a_cluster_that_has_ended_says_nothing(machine):
    machine("raylet --gcs-address=192.0.2.7:6379", last="192.0.2.7:1")
    assert running() == "192.0.2.7:6379"
    machine()
    assert running() is None
    os.environ["RAY_ADDRESS"] = "192.0.2.9:6379"
    assert running() == "192.0.2.9:6379"


def test_keeping_replicas_needs_a_cluster_that_stays(machine):
    machine()
    with pytest.raises(UsageError, match="outlives this command"):
        connected("auto", started=False)


def test_replicas_that_stay_are_known_by_what_they_do():
    def of(maker=ECHO, tokens=100, **overrides):
        profile = resolve("embedded", overrides=[f"{key}={value}" for key, value in overrides.items()]).profile
        return fingerprint(Job(maker, {"profile": profile, "expected_tokens": tokens}, frozenset({"expected_tokens"})))

    assert of() == of(tokens=7)
    assert len({of(), of("other:job"), of(engine="eager"), of(threads=3)}) == 4


def test_replicas_of_replaced_files_make_room(monkeypatch):
    """They would hold their devices until they have rested, and the new ones wait for these."""
    job = Job(ECHO, {"profile": resolve("embedded").profile})
    known = fingerprint(job)
    what = known.partition("-")[0]
    names = [f"specctl-{what}-older-0", f"specctl-{known}-0", "specctl-another-older-0", "else"]
    retired, made = [], []

    def actor(name, _namespace):
        return SimpleNamespace(retire=SimpleNamespace(remote=lambda: retired.append(name)))

    ray = FakeRay("192.0.2.7")
    ray.util.list_named_actors, ray.get_actor, ray.cluster_resources = lambda: names, actor, lambda: {"CPU": 4.0}
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(RayEngine, "_make", lambda self, number: made.append(self._names[number]))
    for seconds in (60.0, 0.0):
        RayEngine.on("host:1", 1, job.setup["profile"], lambda _: job, print, seconds)
    assert retired == names[:1]
    assert made == [names[1], None]


@pytest.mark.parametrize("name", ["answer", "watch", "release", "retire"])
def test_what_ray_is_told_of_a_method_leaves_it_as_it_is(monkeypatch, name):
    made = described(SimpleNamespace(method=lambda **_: lambda method: method))(Job(ECHO, {}), 0, 0.0)
    called = []
    monkeypatch.setattr(Actor, name, lambda *given: called.append(given))
    arguments = {"answer": ("life", 3), "watch": ("life",)}.get(name, ())
    getattr(made, name)(*arguments)
    assert called == [(made, *arguments)]


def test_an_actor_answers_in_the_life_that_is_meant():
    actor = Actor(Job(ECHO, {}), 3, 0.0)
    how, life = actor.life()
    assert (how, actor.begin(life)) == ("done", ("done", True))
    how, (parts, answer) = actor.answer(life, {"said": 7})
    assert (how, parts, answer["said"], answer["by"]) == ("done", [], 7, 3)
    assert actor.answer("another", {"said": 7})[0] == "gone"
    assert actor.answer(life, {"raises": "too long"})[0] == "failed"
