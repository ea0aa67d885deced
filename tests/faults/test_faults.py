"""A short run of each search for faults; `tests/README.md` has the long ones."""

import os
import subprocess
import sys

import pytest

from tests.faults import mutations, profiles, records, resumes


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
