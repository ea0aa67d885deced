"""The note on transformers' confidence threshold, from what the runs recorded."""

from dataclasses import replace

from factory import peer, peer_run, plain_run, run_set, tables

from specctl.benchmark.report import threshold_note
from specctl.observing.results import SCIKIT_LEARN, RunSet

LABEL = "hf-confidence"


def results(installed: str | None, *ends: float, label: str = LABEL) -> RunSet:
    """One run for each threshold at its end."""
    runs = [plain_run("p", 3)]
    for number, end in enumerate(ends):
        run = peer_run(label, f"p{number}", 3, 10.0)
        runs.append(replace(run, thresholds=((0.4, end), None)))
    found = run_set([peer(label)], runs)
    if installed is not None:
        found.header.versions[SCIKIT_LEARN] = installed
    return found


def test_a_threshold_that_moved() -> None:
    assert threshold_note(results("1.7.2", 0.2, 0.4, 0.55)) == (
        " With scikit-learn 1.7.2, transformers moved the threshold of hf-confidence in 2 of 3 answers, from 0.4 "
        "to between 0.20 and 0.55 at their ends (median 0.40)."
    )


def test_a_threshold_that_stayed() -> None:
    assert threshold_note(results("none", 0.4, 0.4)) == (
        " The threshold of hf-confidence stayed at 0.4 (scikit-learn is not installed, with which transformers moves "
        "it)."
    )
    assert threshold_note(results("1.7.2", 0.4)).endswith("stayed at 0.4.")


def test_what_was_not_recorded_is_not_said() -> None:
    assert threshold_note(results(None, 0.2)) == ""
    assert threshold_note(results("none")) == ""
    assert threshold_note(results("none", 0.2, label="hf-constant")) == ""


def test_it_stands_below_the_table_of_speeds() -> None:
    speed = tables(replace(results("none", 0.4), runs=[plain_run("p", 3), *results("none", 0.4).runs[1:]]))[0]
    assert "The threshold of hf-confidence stayed at 0.4" in speed.note
