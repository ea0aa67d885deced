"""The signal bound, and the comparison of all policies by replay."""

import sys
from dataclasses import replace

import pytest

from specctl.calibration.compared_settings import grid
from specctl.calibration.search import score, score_oracle, score_signal_bound
from specctl.policies import POLICIES
from specctl.policies.bandit import Bandit
from specctl.replay.bounds import best_stopping
from specctl.replay.play import replay, rounds
from specctl.replay.trace_files import TRACES, TracedPrompt, TraceSet
from tests.support.made_traces import SIGNALS, flat_costs, traces
from tools import compare_policies
from tools.comparison import standings
from tools.comparison.regimes import made_up, regimes, useless
from tools.comparison.standings import MIXED, NEW, early_share
from tools.comparison.tables import comparison_tables

EOS = frozenset({0})


@pytest.mark.parametrize("ratio", [3, 30])
@pytest.mark.representatives("3")
def test_the_signal_bound_lies_between_the_policies_and_the_oracle(ratio: float) -> None:
    some, ids = traces(4), [f"p{n}" for n in range(12)]
    costs = flat_costs(1, ratio)
    bound = score_signal_bound(some, ids, costs).tokens_per_second
    assert bound <= score_oracle(some, ids, costs).tokens_per_second
    # A fixed setting may fit these few prompts by luck, no better.
    assert all(bound >= 0.99 * score(one, some, ids, costs).tokens_per_second for one in grid("all", "paper", SIGNALS))


def test_with_perfect_signals_the_bound_stops_at_the_first_doubt() -> None:
    some = traces(4)
    policy = best_stopping(some.traces, made_up(8))
    for trace in some.traces:
        for played in rounds(policy, trace, EOS):
            assert all(step.top_prob == 0.95 for step in played.steps[:-1])


def test_the_bound_never_drafts_with_a_hopeless_draft() -> None:
    nothing = [useless(trace) for trace in traces(4).traces]
    assert best_stopping(nothing, made_up(3)).draft_limit() == 0


def test_the_bound_drafts_no_longer_than_the_traces_reach() -> None:
    """Traces of a calibration of short drafts contain short drafts only."""
    some = traces(40, 4)
    some.header = replace(some.header, depth=3)
    costs = flat_costs(1, 30)
    assert best_stopping(some.traces, costs, longest=3).draft_limit() == 3
    assert score_signal_bound(some, some.prompts, costs).mean_acceptance_length <= 4


def test_looking_further_ahead_is_no_worse() -> None:
    some = traces(4)
    costs = made_up(8)
    far, near = (
        costs.milliseconds(replay(best_stopping(some.traces, costs, one_step=one), some.traces, EOS), ())
        for one in (False, True)
    )
    assert far <= near * 1.001


def test_a_clock_gives_the_times_that_rounds_are_priced_with() -> None:
    some = traces(4).traces[:3]
    costs = flat_costs(1.5, 10, per_token=0.25)
    timed = [r for trace in some for r in rounds(POLICIES["constant"](), trace, EOS, costs.clock({"entropy"}))]
    priced = costs.milliseconds(replay(POLICIES["constant"](), some, EOS), {"entropy"})
    assert 1e3 * sum(r.total_seconds for r in timed) == pytest.approx(priced)
    assert all(r.draft_seconds == pytest.approx(1.5e-3 * r.drafted) for r in timed)


def test_the_bandit_plays_every_arm_and_then_mostly_the_best() -> None:
    bandit = Bandit(arms=("constant:draft_length=1", "constant:draft_length=20"))
    found = replay(bandit, traces(2, 30).traces, EOS)
    lengths = [length for one in found for length in one.top.drafted]
    assert {1, 20} <= set(lengths)
    assert lengths[-200:].count(1) > 150


def test_a_draft_that_is_never_right_costs_little() -> None:
    costs = made_up(8)
    nothing = [useless(trace) for trace in traces(4, 30).traces]
    none = replay(POLICIES["none"](), nothing, EOS)
    policy = NEW.build()
    share = costs.milliseconds(none, ()) / costs.milliseconds(replay(policy, nothing, EOS, costs.clock(())), ())
    assert 0.97 < share < 1


def test_cost_optimal_learns_early() -> None:
    assert early_share(traces(4, 10).traces, made_up(8), EOS) > 0.85


@pytest.mark.parametrize("ratios", [(8,), (3, 30)], ids=["8", "3 and 30"])
@pytest.mark.representatives(slow=("8",))
def test_every_policy_is_compared_on_every_part_of_a_trace_file(tmp_path, monkeypatch, capsys, ratios) -> None:
    monkeypatch.setattr("tools.comparison.regimes.RATIOS", ratios)
    path, compared = tmp_path / "t.jsonl", []
    some: TraceSet = traces(5, 6)
    with path.open("w", encoding="utf-8") as stream:
        TRACES.append(stream, some.header)
        for trace in some.traces:
            TRACES.append(stream, TracedPrompt(trace.prompt, {}, [trace]))

    def noted(*given):
        compared.append(standings.compare(*given))
        return compared[-1]

    monkeypatch.setattr(compare_policies, "compare", noted)
    monkeypatch.setattr(sys, "argv", ["compare_policies", str(path), "--grid", "paper"])
    compare_policies.main()
    said, (found,) = capsys.readouterr().out, compared
    for ratio in ratios:
        assert said.count(f"| 1:{ratio} flat ") == 4  # two categories, mixed, and the guards
    assert "| 1:3 then 1:30 |" in said
    assert [(line.regime, line.part) for line in found.lines] == [
        (regime, part) for regime in regimes() for part in ("c0", "c1", MIXED)
    ]
    for line in found.lines:
        assert max(line.paper, line.none) <= line.fixed <= line.oracle
        assert max(line.own, line.bandit, line.bound) <= line.oracle
    assert set(found.early) == set(found.useless) == set(regimes())
    speeds, changing, guards = comparison_tables(found)
    assert len(speeds.rows) == len(found.lines)
    assert len(changing.rows) == len(found.changing) == 4
    assert len(guards.rows) == len(regimes())
    assert all(len(row) == len(table.columns) for table in (speeds, changing, guards) for row in table.rows)
