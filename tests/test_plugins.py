"""Policies and drafters of other distributions, found by their entry points: used like those that ship, or named."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from specctl import speculative
from specctl.__main__ import _run
from specctl.calibration.compared_settings import grid
from specctl.decoding.composition import build_drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.sampling import Sampling
from specctl.errors import ProfileError, UsageError
from specctl.models.running.eager import EagerPasses
from specctl.models.running.registered import RegisteredPasses
from specctl.models.running.slot import Slot
from specctl.plugins import DRAFTERS, PluginError
from specctl.policies import NONE, POLICIES, Setting
from specctl.profile import parse_policy, resolve
from specctl.records import StopReason
from specctl.replay.play import rounds
from specctl.replay.recording import metering
from tests.support.enumeration import largest_difference, law_of, walk
from tests.support.invoked import invoke
from tests.support.plugged import installed, write_distribution
from tests.support.toys import EOS, TableRunner, law, noisy_copy, random_model, table
from tests.support.traced import pair_of, shape, trace_of

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
HEADER = """
from dataclasses import dataclass
from specctl.policies import Rule, read
"""
BROKEN = {
    "absent": ("import nothing_of_this_name", "absent:Policy", "ModuleNotFoundError"),
    "syntax": ("def (", "syntax:Policy", "SyntaxError"),
    "leaves": ("raise SystemExit(3)", "leaves:Policy", "SystemExit"),
    "nameless": ("", "nameless:Policy", "AttributeError"),
    "other": ("class Policy: pass", "other:Policy", "not a subclass of specctl.policies.Rule"),
    "plain": (HEADER + "class Policy(Rule):\n def draft_limit(self): return 1", "plain:Policy", "not a dataclass"),
    "lacking": (
        HEADER + "@dataclass\nclass Policy(Rule):\n a: int\n def draft_limit(self): return 1",
        "lacking:Policy",
        "its setting a has no default value",
    ),
    "listed": (
        HEADER + "@dataclass\nclass Policy(Rule):\n a: dict = None\n def draft_limit(self): return 1",
        "listed:Policy",
        "its setting a is not an int, float, bool, str or tuple",
    ),
    "half": (HEADER + "@dataclass\nclass Policy(Rule):\n a: int = 1", "half:Policy", "abstract"),
    "unlimited": (
        HEADER + "@dataclass\nclass Policy(Rule):\n a: int = 1\n def draft_limit(self): return None",
        "unlimited:Policy",
        "draft_limit\\(\\) is None",
    ),
    "svip": ("", "builtins:dict", "specctl has one of this name"),
}
"""By name a module's source, what its entry point names, and what is wrong with it."""
FAILING = (
    HEADER
    + """
@dataclass
class Policy(Rule):
    at: str = "should_stop"
    keep: bool = True
    token: int = 2

    @property
    def keep_trigger(self): return self.keep
    @property
    def signals(self): return frozenset({"token_prob"}) if self.at == "signals" else frozenset()
    def draft_limit(self): return 1 / 0 if self.at == "draft_limit" and self.begun else 4
    begun = False
    def reset(self): self.begun = True
    def should_stop(self, step): return 1 / 0 if self.at == "should_stop" else step.token == self.token
    def observe(self, round_): self.at == "observe" and 1 / 0
"""
)


def example(name: str) -> str:
    """A file that the page shows."""
    found = re.search(rf"^<!-- file: {re.escape(name)} -->\n```\w*\n(.*?)^```$", PAGE, re.M | re.S)
    assert found is not None
    return found.group(1)


@pytest.fixture(scope="module", autouse=True)
def plugged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's policy and drafter, and others that are broken."""
    folder = tmp_path_factory.mktemp("site")
    modules = {name: source for name, (source, *_) in BROKEN.items()}
    entries = {"patience": "patience:Patience", "failing": "failing:Policy"}
    write_distribution(
        folder, "patience", {"specctl.policies": entries}, patience=example("patience.py"), failing=FAILING
    )
    write_distribution(
        folder, "mixed", {"specctl.policies": {name: entry for name, (_, entry, _) in BROKEN.items()}}, **modules
    )
    scorers = {"bigrams": "bigrams:Bigrams", "narrow": "wrong:Narrow", "unmade": "wrong:Unmade", "gone": "nowhere:X"}
    wrong = "import torch\nclass Narrow:\n def __init__(self, v, a): pass\n def logits(self, text, rows):\n"
    wrong += "  return torch.zeros(rows, 2)\ndef Unmade(v, a): raise OSError('no file')"
    write_distribution(folder, "scores", {"specctl.drafters": scorers}, bigrams=example("bigrams.py"), wrong=wrong)
    with installed(folder):
        yield folder


def test_the_page_registers_its_policy_as_pip_would() -> None:
    import tomllib

    project = tomllib.loads(example("pyproject.toml"))["project"]
    assert project["entry-points"]["specctl.policies"] == {"patience": "patience:Patience"}


def test_tests_are_not_made_for_what_the_environment_registers(plugged: Path) -> None:
    """Who installs the page's policy beside this project can run its tests."""
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/policies/test_setting.py"]
    environ = {**os.environ, "PYTHONPATH": str(plugged)}
    root = Path(__file__).parents[1]
    shown = subprocess.run(asked, capture_output=True, text=True, env=environ, cwd=root, check=True)
    assert "[svip]" in shown.stdout
    assert "[patience]" not in shown.stdout


def test_a_registered_policy_is_one_of_all() -> None:
    assert list(POLICIES)[:2] == ["none", "constant"]
    assert set(POLICIES) - set(dict(POLICIES._own)) == {"patience", "failing"}
    assert POLICIES.origin("patience") == "patience 1.0"
    assert POLICIES.origin("svip") is None
    assert parse_policy("patience:threshold=0.4") == {"name": "patience", "threshold": 0.4}
    with pytest.raises(ProfileError, match="must be less than or equal to 1"):
        parse_policy("patience:threshold=2")
    profile = resolve("embedded", flags={"draft.policy": {"name": "patience"}}, environ={}).profile
    assert profile.draft is not None
    assert profile.draft.setting == Setting.of({"name": "patience", "threshold": 0.5, "max_draft": 16})
    assert profile.draft.setting.signals == {"top_prob"}
    labels = [setting.label for setting in grid("patience", "dense", frozenset({"top_prob"}))]
    assert labels == ["patience:threshold=0.3", "patience", "patience:threshold=0.7"]
    assert "patience" in {one.policy for one in grid("all", "paper", frozenset({"top_prob"}))}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_with_its_distribution(name: str) -> None:
    _, _, what = BROKEN[name]
    told = POLICIES.broken[name]
    assert told.startswith(f"the policy {name} of mixed 1.0 cannot be used: ")
    assert re.search(what, told)
    assert "\n" not in told
    if name == "svip":
        assert parse_policy("svip") == {"name": "svip"}
        return
    with pytest.raises(ProfileError, match=r"of mixed 1.0 cannot be used"):
        parse_policy(name)
    with pytest.raises(UsageError, match=r"of mixed 1.0 cannot be used"):
        grid(name, "paper", frozenset())


def settle(setting: Setting) -> tuple[list[object], list[object]]:
    """Rounds of a live run, and of the same text replayed from a trace."""
    pair = pair_of(Slot(EagerPasses(random_model("llama"), 64)), Slot(EagerPasses(noisy_copy("llama"), 64)))
    prompt, length = [1, 5, 9], 24
    with torch.inference_mode():
        live = list(decode(pair.target, build_drafter(pair, setting), prompt, length, Sampling()))
    said = [token for round_ in live for token in round_.emitted]
    trace = trace_of(pair, prompt, said, length, 16, Sampling())
    replayed = rounds(setting.build(), trace, frozenset(), lambda *_: (0.0, 0.0))
    return [shape(one) for one in live], [shape(one) for one in replayed]


def test_live_rounds_are_those_of_a_replay() -> None:
    live, replayed = settle(Setting.of({"name": "patience", "threshold": 0.6}))
    assert live == replayed
    assert StopReason.POLICY in {one[2] for one in live}  # type: ignore[index]


@pytest.mark.parametrize("at", ["should_stop", "draft_limit", "observe"])
def test_a_policy_that_fails_at_work_is_named(at: str) -> None:
    with pytest.raises(PluginError, match=f"the policy failing of patience 1.0 failed in {at}: ZeroDivisionError"):
        settle(Setting.of({"name": "failing", "at": at}))


def test_a_policy_that_drops_a_token_does_not_see_it() -> None:
    """With one that may look, the law of what is written would be another (`DropsWhatItSaw`)."""
    written, _ = settle(NONE)
    tokens = [one[3] for one in written[:4]]  # type: ignore[index]
    stops = dict.fromkeys((True, False), 0)
    for keep in stops:
        for token in tokens:
            live, _ = settle(Setting.of({"name": "failing", "at": "nowhere", "keep": keep, "token": token}))
            stops[keep] += sum(one[2] is StopReason.POLICY for one in live)  # type: ignore[index]
    assert stops[True] > stops[False] == 0
    with pytest.raises(PluginError, match="token_prob may not be read"):
        Setting.of({"name": "failing", "at": "signals", "keep": False}).build()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ["Tom had a red kite. One windy day", "Sam saw a big dog."]
    path.write_text("".join(json.dumps({"id": text[:3], "prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_commands_take_it_like_one_that_ships(prompts: Path, tmp_path: Path) -> None:
    common = ("-i", prompts, "-n", 10)
    out = tmp_path / "bench.jsonl"
    shown = invoke("bench", *common, "--policy", "patience:threshold=0.4", "--repeats", 1, "-o", out).stdout
    assert "patience:threshold=0.4" in shown
    with patch.multiple(metering, LENGTHS=(0, 1, 4, 40), IN_A_ROW=2, PASSES=metering.WARM_UPS + 1):
        fast = tmp_path / "fast.toml"
        shown = invoke("calibrate", *common, "--policy", "patience", "--no-verify", "--json", "-o", fast).stdout
    document = json.loads(shown)
    assert "patience" in {entry["policy"]["name"] for entry in document["ranking"]}
    assert resolve(str(fast), environ={}).profile.draft is not None


# Drafters


def test_a_registered_drafter_drafts_in_transformers() -> None:
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    fast = speculative("drafter:bigrams:9", "constant:draft_length=3")
    model = random_model("llama")
    assert model.generate(ids, **settings, custom_generate=fast).equal(model.generate(ids, **settings))
    assert fast.metrics.accepted > 0


def test_what_it_writes_has_the_targets_law() -> None:
    target, sampling, prompt, length = table(3, vocabulary=3), Sampling(1.0), [1, 2, 1], 3

    def play() -> tuple[int, ...]:
        policy = Setting.of({"name": "patience", "threshold": 0.4}).build()
        drafter = ModelDrafter(Slot(RegisteredPasses("drafter:bigrams:1", 3)), policy)
        written = decode(TableRunner(target), drafter, prompt, length, sampling, {EOS})
        return tuple(token for round_ in written for token in round_.emitted)

    assert largest_difference(law_of(walk(play)), law(target, prompt, length, sampling, {EOS})) < 3e-7


def test_a_command_loads_it_by_its_name(prompts: Path) -> None:
    drafting = ("--target", "embedded:target", "--draft", "drafter:bigrams")
    with patch.multiple(metering, LENGTHS=(0, 1, 4, 40), IN_A_ROW=2, PASSES=metering.WARM_UPS + 1):
        options = ("-i", prompts, "-n", 8, "--policy", "svip", "--grid", "paper", "--no-verify", "--json")
        document = json.loads(invoke("calibrate", *drafting, *options).stdout)
    assert "svip" in {entry["policy"]["name"] for entry in document["ranking"]}
    shown = invoke("doctor", *drafting).stdout
    assert "of scores 1.0" in shown
    assert "the policy absent of mixed 1.0 cannot be used: ModuleNotFoundError" in shown
    assert "the drafter gone of scores 1.0 cannot be used" in shown
    assert "Verdict: ready" in invoke("doctor", *drafting, "--devices").stdout


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("narrow", "failed in logits: TypeError: expected a tensor of shape \\(1, 64\\), not \\(1, 2\\)"),
        ("unmade", "failed in making it: OSError: no file"),
    ],
)
def test_a_drafter_that_fails_is_named(name: str, what: str) -> None:
    with pytest.raises(PluginError, match=f"the drafter {name} of scores 1.0 {what}"):
        Slot(RegisteredPasses(f"drafter:{name}", 64)).extend([1], keep=1)


@pytest.mark.parametrize(("name", "what"), [("gone", "cannot be used: ModuleNotFoundError"), ("unknown", "bigrams")])
def test_one_that_cannot_be_loaded_is_told_with_the_profile(name: str, what: str) -> None:
    with pytest.raises(ProfileError, match=what):
        resolve(flags={"target.model": "embedded:target", "draft.model": f"drafter:{name}"}, environ={})
    with pytest.raises(ProfileError, match="give it in"):
        resolve(flags={"target.model": "drafter:bigrams"}, environ={})
    assert "narrow" in DRAFTERS


def test_the_program_ends_with_a_message_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["specctl", "profiles", "show", "embedded", "--set", "draft.policy.name=syntax"])
    assert _run() == 2
    told = capsys.readouterr().err
    assert "the policy syntax of mixed 1.0 cannot be used: SyntaxError" in told
    assert "Traceback" not in told
