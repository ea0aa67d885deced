"""Drafts in parallel in the figures of a benchmark, and what a second device would bring, simulated."""

from dataclasses import replace
from pathlib import Path

import pytest
from factory import TARGET_MS, as_json, candidate, drafted_run, plain_run, run_set, tables, write_report

from specctl.benchmark.cost_model import bare_ms, candidate_costs, fit
from specctl.benchmark.digest import digest
from specctl.benchmark.figures import verification_against_discard
from specctl.benchmark.summaries import summarise
from specctl.observing.results import PassTimes, Run, RunSet, Stretches
from specctl.policies import Setting
from specctl.records import RoundSummary, StopReason
from specctl.reporting.style import MissingDataError

PARALLEL = replace(candidate("fast"), setting=Setting("constant", parallel=True))
COSTS = PassTimes(2.0, {1: 10.0, 4: 10.0, 6: 12.0})


def parallel_run(prompt: str) -> Run:
    """Four passes, 7 tokens: 1, 3 and 2 of 5 accepted with a correction, then another correction."""
    shapes = [(1, 1), (3, 3), (5, 1), (3, 0)]
    run = drafted_run("fast", prompt, [])
    rounds = tuple(
        RoundSummary(drafted, accepted, StopReason.MAX_DRAFT, None, 0.5, TARGET_MS, overlap_ms=5.5)
        for drafted, accepted in shapes
    )
    (turn,) = run.turns
    total_ms = turn.prefill_ms + 4 * (TARGET_MS + 0.5)
    return replace(
        run,
        turns=(
            replace(
                turn, tokens=tuple(range(7)), rounds=rounds, target_forwards=4, draft_forwards=12, total_ms=total_ms
            ),
        ),
    )


def results(*stretches: list[list[int]], **more: object) -> RunSet:
    runs = [plain_run("a", 9), plain_run("b", 7), drafted_run("svip", "a", [(5, 5, "policy"), (5, 0, "policy")])]
    runs += [drafted_run("svip", "b", [(3, 1, "policy")]), parallel_run("a"), parallel_run("b")]
    found = run_set([candidate("none"), candidate("svip"), PARALLEL], runs, costs=COSTS, oracle={}, **more)  # type: ignore[arg-type]
    for number, turns in enumerate(stretches):
        found.add(Stretches(f"p{number}", turns))
    return found


def test_tokens_of_a_round_are_counted_without_a_bonus() -> None:
    (summary,) = summarise(results().runs, ["fast"])
    assert summary.mean_acceptance_length == pytest.approx(7 / 4)
    assert summary.verification_rate == pytest.approx(4 / 7)


def test_passes_at_the_same_time_are_not_added_up() -> None:
    found = results()
    alone = replace(found, runs=[run for run in found.runs if run.candidate != "fast"])
    assert fit(found) == fit(alone)
    (cost,) = candidate_costs(found, summarise(found.runs, ["fast"]), fit(found))
    assert cost.measured > 0
    others = cost.predicted, cost.latency_ms, cost.overhead, cost.passes_share, cost.time_share, cost.signal_share
    assert set(others) == {None}
    assert bare_ms(parallel_run("a"), COSTS, PARALLEL) is None


def test_a_second_device_is_simulated_from_the_stretches() -> None:
    found = digest(results([[6, 3]], [[2], [1]]), sync_ms=1.0)
    turns, ratio, best = found.simulated
    assert ratio.block == 5
    assert (ratio.steps, ratio.tokens) == (2 + 2 + 2 + 1, 12)
    # Widths 1 and 5; the draft's 5 tokens take as long as the pass at width 1.
    assert ratio.milliseconds == pytest.approx(4 * (10 + 1) + 3 * (11 + 1))
    assert best.milliseconds <= ratio.milliseconds
    assert (turns.parallel, best.parallel) == (False, True)
    assert found.simulated_baseline_ms == 12 * 10.0
    assert found.sync_ms == 1.0


def test_the_table_and_the_document_say_that_it_is_simulated() -> None:
    (table,) = [one for one in tables(results([[6, 3]])) if one.title.startswith("In parallel")]
    assert table.title == "In parallel (simulated: two devices)"
    assert [row[0] for row in table.rows] == ["in turns", "in parallel, t_target / t_draft", "in parallel"]
    assert "0 ms more to synchronise" in table.note
    document = as_json(results([[6, 3]]))["parallel"]
    assert document["sync_ms"] == 0
    assert [one["parallel"] for one in document["simulated"]] == [False, True, True]
    for one, row in zip(document["simulated"], table.rows, strict=True):
        assert one["speedup"] == pytest.approx(9 * 10 / one["milliseconds"], abs=1e-5)
        assert row[-1] == f"{one['speedup']:.2f}"


def test_without_stretches_there_is_no_table() -> None:
    assert not any(one.title.startswith("In parallel") for one in tables(results()))
    assert "parallel" not in as_json(results())


@pytest.mark.slow
def test_the_figure_of_both_rates_leaves_parallel_drafts_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results()
    write_report(found, tmp_path)
    assert "fast" in (tmp_path / "report.md").read_text("utf-8")
    alone = digest(replace(found, runs=[run for run in found.runs if run.candidate in ("none", "fast")]))
    with pytest.raises(MissingDataError):
        verification_against_discard(alone, {})
