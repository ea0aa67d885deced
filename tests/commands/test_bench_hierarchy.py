"""`specctl bench` of hierarchies and their parts, on the embedded models."""

import json
import re

import pytest

from specctl.errors import UsageError
from specctl.observing.results import read_results
from tests.support.invoked import invoke

pytestmark = pytest.mark.slow

PROMPTS = [
    {"id": "kite", "category": "stories", "prompt": "Tom had a red kite. One windy day"},
    {"id": "apples", "category": "maths", "prompt": "Question: Ann has 3 apples and buys 2. How many?\nAnswer:"},
]
ONCE = """
extends = "embedded-hsddw"
[draft]
pre_verify = "once"
[draft.policy]
name = "constant"
draft_length = 6
"""
MID = """
extends = "embedded-constant"
[draft]
model = "embedded:mid"
"""
LABELS = [
    "none",
    "self-verify < self-verify",
    "constant:draft_length=6(once) < self-verify",
    "constant@mid",
    "constant@draft",
]


def bench(*arguments):
    return invoke("bench", *arguments).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hierarchies")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS), encoding="utf-8")
    (folder / "once.toml").write_text(ONCE, encoding="utf-8")
    (folder / "mid.toml").write_text(MID, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def options(folder):
    profiles = ["embedded-hsddw", folder / "once.toml", folder / "mid.toml", "embedded-constant"]
    return [*(word for name in profiles for word in ("-p", name)), "-i", folder / "prompts.jsonl", "-n", "24", "-q"]


@pytest.fixture(scope="module")
def whole(folder, options):
    """A finished results file and its printed tables."""
    path = folder / "results.jsonl"
    return path, bench(*options, "--oracle", "--peer", "hf-constant", "--no-counterpart", "--details", "-o", path)


def test_every_profile_brings_its_drafts_and_each_model_is_loaded_once(whole):
    header = read_results(whole[0]).header
    assert [candidate.label for candidate in header.candidates] == [*LABELS, "hf-constant"]
    assert header.drafts == ["embedded:mid", "embedded:draft"]
    assert [candidate.drafts for candidate in header.candidates] == [(0,), (0, 1), (0, 1), (0,), (1,), (0,)]
    assert header.candidates[2].setting.once


def test_greedy_text_is_the_targets_own_in_every_setting(whole):
    results = read_results(whole[0])
    said = {run.prompt: [turn.tokens for turn in run.turns] for run in results.of("none")}
    assert all([turn.tokens for turn in run.turns] == said[run.prompt] for run in results.runs)
    assert "10 runs gave exactly the tokens of none." in whole[1]


def test_rounds_are_written_with_their_inner_rounds(whole):
    results = read_results(whole[0])
    for label in LABELS[1:3]:
        for run in results.of(label):
            for round_ in run.rounds:
                assert round_.drafted == sum(i.accepted + 1 for i in round_.inner) or round_.stop == "eos"
                assert round_.draft_forwards == len(round_.inner)
    assert all(not round_.inner for run in results.of("constant@mid") for round_ in run.rounds)
    assert all(turn.draft_forwards for label in LABELS[1:] for run in results.of(label) for turn in run.turns)


def test_costs_of_every_model_are_measured_at_every_width(whole):
    costs = read_results(whole[0]).costs
    assert len(costs.drafts) == 2
    assert all(times.keys() == costs.target.keys() for times in costs.drafts)
    assert min(min(times.values()) for times in costs.drafts) > 0


def test_the_levels_are_shown(whole):
    document = json.loads(bench("--from", whole[0], "--json"))
    assert [one["candidate"] for one in document["levels"]] == [*LABELS, "hf-constant"]
    assert bench("--from", whole[0], "--details") == whole[1]
    headings = r"\bmid +draft +target\b.*\n.*\bpasses/token +passes/token +passes/token\b"
    assert re.search(headings, whole[1]), "a wide table has headings of two lines"


@pytest.mark.exhaustive
def test_a_killed_benchmark_continues_where_it_stopped(whole, folder, options):
    path = folder / "half.jsonl"
    lines = whole[0].read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:6]) + lines[6][:50], encoding="utf-8")
    bench(*options, "--oracle", "--peer", "hf-constant", "--no-counterpart", "-o", path, "--resume")
    assert [run.tokens for run in read_results(path).runs] == [run.tokens for run in read_results(whole[0]).runs]


def test_a_policy_flag_applies_to_the_targets_own_draft(folder, tmp_path):
    path = tmp_path / "top.jsonl"
    prompts = folder / "prompts.jsonl"
    policies = ["--policy", "svip:threshold=0.4", "--policy", "constant"]
    bench("-p", "embedded-hsddw", *policies, "-i", prompts, "--limit", 1, "-n", 8, "-q", "-o", path)
    candidates = read_results(path).header.candidates
    assert [candidate.label for candidate in candidates] == [
        "none",
        "svip:threshold=0.4 < self-verify",
        "constant < self-verify",
    ]
    assert [level.policy for level in candidates[1].setting.levels] == ["svip", "self-verify"]


def test_a_single_hierarchy_is_compared_with_each_of_its_drafts_alone(folder, tmp_path):
    path = tmp_path / "alone.jsonl"
    bench("-p", "embedded-hsddw", "-i", folder / "prompts.jsonl", "--limit", 1, "-n", 8, "-q", "-o", path)
    labels = [candidate.label for candidate in read_results(path).header.candidates]
    alone = [f"{policy}@{draft}" for draft in ("mid", "draft") for policy in ("constant", "cost-optimal")]
    assert labels == ["none", "self-verify < self-verify", *alone]


def test_sampling_runs_too(folder, tmp_path):
    path = tmp_path / "sampled.jsonl"
    bench("-p", "embedded-hsddw", "-i", folder / "prompts.jsonl", "-n", 12, "-t", 1, "-q", "-o", path)
    results = read_results(path)
    assert len(results.runs) == 2 * len(results.header.candidates)
    assert all(0 < run.tokens <= 12 for run in results.runs)
    assert any(round_.inner for run in results.of(LABELS[1]) for round_ in run.rounds)


def test_a_policy_needs_a_draft(tmp_path):
    profile = tmp_path / "alone.toml"
    profile.write_text('[target]\nmodel = "embedded:target"\n', encoding="utf-8")
    with pytest.raises(UsageError, match="--policy has no draft to stop"):
        bench("-p", profile, "--policy", "svip")
