"""Replicas on a real Ray, where it is installed: ``pytest -m slow tests/text_engine/test_ray_actors.py``."""

import importlib.util
import ipaddress
import os
import signal

import psutil
import pytest

from specctl.text_engine.dispatch import GivenUp, in_order
from specctl.text_engine.engine import wait_until_ready
from specctl.text_engine.job import Job, Sources
from specctl.text_engine.on_ray import RayEngine, connected
from tests.faults import clusters
from tests.text_engine.ray_cluster import cluster

if importlib.util.find_spec("ray") is None:  # importing it would settle how it authenticates
    pytest.skip("Ray is not installed", allow_module_level=True)

ECHO = "tests.text_engine.toy_jobs:echo"


def listening(process):
    """The addresses on which a process and those that it started listen, as the system tells."""
    found = []
    for each in [process, *process.children(recursive=True)]:
        try:
            sockets = each.net_connections(kind="inet")
        except psutil.NoSuchProcess:
            continue
        found += [ipaddress.ip_address(one.laddr.ip) for one in sockets if one.status == psutil.CONN_LISTEN]
    return {getattr(one, "ipv4_mapped", None) or one for one in found}


@pytest.mark.slow
def test_actors_answer_in_order_and_are_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    connected("auto")
    warnings = []
    with RayEngine([None, None], Job(ECHO, {}), {"num_cpus": 1}, warnings.append) as replicas:
        wait_until_ready(replicas)
        while len(replicas.free()) < 2:
            replicas.step()
        assert listening(psutil.Process()) == {ipaddress.ip_address("127.0.0.1")}
        os.kill(replicas.pids[0], signal.SIGKILL)
        while len(replicas.free()) == 2:
            replicas.step()
        questions = [{"said": number, "seconds": 0.2 * (number % 2)} for number in range(8)]
        questions[2]["dies_once"] = str(tmp_path / "died")
        questions[5] = {"dies": True}
        answers = [answer for _, answer in in_order(replicas, [(None, question) for question in questions])]
    assert isinstance(answers.pop(5), GivenUp)
    assert [answer["said"] for answer in answers] == [0, 1, 2, 3, 4, 6, 7]
    assert {answer["threads"] for answer in answers} == {"1"}
    assert len(warnings) == 4  # one was idle, one died once, two died of the same question


@pytest.mark.slow
def test_an_actor_answers_several_questions_at_once_and_one_that_ends_it_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    connected("auto")
    warnings = []
    job = Job("tests.text_engine.toy_jobs:rows", {"count": 3})
    with RayEngine([None], job, {"num_cpus": 1}, warnings.append, places=3) as replicas:
        wait_until_ready(replicas)
        assert (replicas.count, replicas.free()) == (3, [0, 1, 2])
        questions = [{"said": number, "seconds": 0.1} for number in range(12)]
        questions[4]["dies_once"] = str(tmp_path / "died")
        questions[8] = {"dies": True}
        answers = [answer for _, answer in in_order(replicas, [(None, question) for question in questions])]
    assert isinstance(answers.pop(8), GivenUp)
    assert [answer["said"] for answer in answers] == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11]
    assert max(answer["together"] for answer in answers) > 1
    assert all("died" in warning for warning in warnings)


@pytest.mark.slow
def test_an_actor_that_stayed_loads_again_what_was_written_since(tmp_path, monkeypatch):
    files = clusters.Files(tmp_path)
    monkeypatch.chdir(files.folder("A"))
    profile = clusters.profile_of("./big", "./small")
    with cluster(files.folder("B")) as address:

        def answers(warnings):
            connected(address)
            job = Job("tests.text_engine.toy_jobs:reader", {"profile": profile}, sources=Sources.of(profile))
            with RayEngine(["kept"], job, {"num_cpus": 1}, warnings.append, 600.0) as replicas:
                wait_until_ready(replicas)
                pid = replicas.pids[0]
                return next(answer for _, answer in in_order(replicas, [(None, "read")])), pid

        warnings = []
        first, pid = answers(warnings)
        assert answers(warnings) == (first, pid)
        assert first["target"] == files.hash_of("A", "big")
        assert not warnings
        os.utime(files.folder("A") / "big" / "model.safetensors")
        again, other = answers(warnings)
        assert again == first
        assert other != pid
        assert len(warnings) == 1
        assert "were written again" in warnings[0]


@pytest.mark.slow
def test_no_command_gets_the_text_of_other_weights():
    found = clusters.search(5, seed=3)
    assert not found.counts["WRONG"], found.reports
    assert found.counts["right"]
    assert sum(found.counts.values()) == 5
