"""A short run of each search for faults; `tests/README.md` has the long ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import families, mutations, profiles, records, resumes
from tests.faults.tiny_families import tiny_model


def assert_all_caught(tally: mutations.Tally) -> None:
    assert not tally.counts["uncaught"], "\n".join(tally.reports)
    assert tally.counts["valid"]
    assert tally.counts["refused"]


def test_mutated_profiles_are_valid_or_refused() -> None:
    assert_all_caught(profiles.fuzz(300, seed=1))


def test_mutated_records_are_answered_or_refused_and_found_again() -> None:
    assert_all_caught(records.fuzz(200, seed=1))


@pytest.mark.slow
def test_interrupted_runs_are_resumed_and_changed_ones_refused() -> None:
    assert_all_caught(resumes.fuzz(6, seed=1))


def test_an_exception_of_another_kind_is_counted() -> None:
    tally = mutations.Tally()
    tally.case("odd", lambda: {}["missing"])
    assert tally.counts == {"uncaught": 1}
    assert "KeyError" in tally.reports[0]


def test_the_killer_sees_what_is_lost_doubled_and_corrupt() -> None:
    from tests.faults.kills import Outcome

    outcome = Outcome()
    outcome.compare("x", [("a", 1), ("b", 1), ("c", 1), ("d", 1)], [("a", 2), ("b", 1), ("b", 1), ("d", 1)])
    assert outcome.counts == {"lost": 1, "doubled": 1, "corrupt": 1, "compared": 1}
    assert not outcome.fine


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_commands_lose_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.kills", "--kills", "3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills" in done.stdout


@pytest.mark.slow
def test_families_are_right_or_refused_and_a_run_goes_on(tmp_path: Path) -> None:
    names, file = ["gemma4_text,k_eq_v", "qwen2_vl", "paligemma"], tmp_path / "families.jsonl"
    for begun in (names[:1], names):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.faults.families", *begun, "--output", file],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "same 2, refused 1" in done.stdout
    assert names[0] not in done.stdout
    lines = {line["family"]: line for line in map(json.loads, file.read_text().splitlines())}
    assert [lines[names[1]][column] for column in families.COLUMNS] == ["same"] * 4
    assert "it reads a prompt in both directions" in lines["paligemma"]["refused"]
    assert f"| {names[0]} | same | same | same | same |" in file.with_suffix(".md").read_text()


@pytest.mark.slow
def test_a_wrong_text_of_a_family_is_told() -> None:
    model = tiny_model("llama")
    text = families.generated(model, families.PROMPTS[0], cached=True)

    def outcome(tokens: list[int]) -> str:
        return families.compared(model, families.PROMPTS[0], tokens, text)[0]

    assert outcome(text) == families.SAME
    assert outcome([*text[:3], (text[3] + 1) % 200, *text[4:]]) == families.WRONG
    assert outcome(text[:-1]) == families.WRONG
    lines = [{"family": "x", "alone": families.SAME, "batch": families.WRONG, "notes": ["batch: token 1"]}]
    assert families.outcome_of(lines[0]) == families.WRONG
    assert "| x | same |  | WRONG |  |  | batch: token 1 |" in families.table(lines)
