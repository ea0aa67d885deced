from dataclasses import replace

import pytest
from factory import DRAFT_MS, TARGET_MS, Shape, candidate, drafted_run, peer, peer_run, plain_run, run_set, tables

from specctl.benchmark.cost_model import (
    CandidateCost,
    CostModel,
    bare_model,
    bare_ms,
    candidate_costs,
    fit,
    oracle_bound,
    signal_speed,
)
from specctl.benchmark.digest import digest
from specctl.benchmark.figures import looks, verification_against_discard
from specctl.benchmark.summaries import summarise
from specctl.observing.results import Candidate, PassTimes, Run, RunSet, SignalBound
from specctl.policies import Setting
from specctl.policies.setting import TreeSize
from specctl.reporting.style import style

CANDIDATES = [candidate("none"), candidate("svip"), peer("hf")]
ROUNDS: list[Shape] = [(5, 5, "max_draft"), (5, 0, "max_draft"), (2, 1, "policy")]
"""12 drafted, 6 accepted, 9 tokens in 3 passes."""
MODEL = CostModel(DRAFT_MS, TARGET_MS, 1.0, 2)


def of(results: RunSet, label: str, model: CostModel | None = None) -> CandidateCost:
    summaries = summarise(results.runs, [label])
    (cost,) = candidate_costs(results, summaries, model)
    return cost


def test_exactly_linear_times_are_recovered() -> None:
    runs = [
        plain_run("a", 9),
        plain_run("b", 7),
        drafted_run("svip", "a", ROUNDS),
        drafted_run("svip", "b", ROUNDS[1:]),
    ]
    model = fit(run_set(CANDIDATES, [*runs, peer_run("hf", "a", 9, 1e6)]))
    assert model is not None
    assert (model.draft_ms, model.target_ms) == (pytest.approx(DRAFT_MS), pytest.approx(TARGET_MS))
    assert (model.r_squared, model.runs) == (pytest.approx(1.0), 4)


def test_noise_lowers_the_share_that_is_explained() -> None:
    runs = [plain_run("a", 9), drafted_run("svip", "a", ROUNDS), drafted_run("svip", "b", ROUNDS, other_ms=30.0)]
    model = fit(run_set(CANDIDATES, runs))
    assert model is not None
    assert model.r_squared is not None
    assert 0 < model.r_squared < 0.9


def cost_note(results: RunSet) -> str:
    return next(table.note for table in tables(results) if table.title == "Cost model")


def test_a_fit_that_explains_little_is_doubted_and_no_line_is_drawn_from_it() -> None:
    pytest.importorskip("matplotlib")
    quiet = [plain_run("a", 9), plain_run("b", 9), drafted_run("svip", "a", ROUNDS), drafted_run("svip", "b", ROUNDS)]
    busy = [quiet[0], replace_time(quiet[1], 300.0), replace_time(quiet[2], 10.0), replace_time(quiet[3], 400.0)]
    costs = PassTimes(DRAFT_MS, {1: TARGET_MS})
    with style():
        for runs, drawn in ((quiet, True), (busy, False)):
            results = run_set(CANDIDATES, runs, costs=costs)
            found = digest(results)
            assert found.model is not None
            assert found.model.explains is drawn
            picture = verification_against_discard(found, looks(results.header.candidates))
            assert ("join points of equal predicted speed" in picture.caption) is drawn
            assert ("Lines of equal speed are left out: the fit explains too little" in picture.caption) is not drawn
            dotted = [line for line in picture.figure.axes[0].lines if line.get_linestyle() == ":"]
            assert bool(dotted) is drawn
            assert ("so do not trust its predictions" in cost_note(results)) is not drawn


def replace_time(run: Run, more_ms: float) -> Run:
    (turn,) = run.turns
    return replace(run, turns=(replace(turn, total_ms=turn.total_ms + more_ms),))


def test_a_policy_above_a_bound_is_named_beside_it() -> None:
    fast = drafted_run("svip", "a", [(5, 5, "max_draft")], slowdown=0.1)
    results = run_set(CANDIDATES, [plain_run("a", 6), plain_run("b", 5), fast], oracle={"a": 2})
    found = digest(results)
    assert found.oracle is not None
    assert found.oracle.tokens_per_second is not None
    measured = {one.candidate: one.measured for one in found.costs}
    assert measured["svip"] > found.oracle.tokens_per_second > measured["none"], "the case"
    assert "svip measured faster than the oracle, so what the fit gives for it is not a bound here." in cost_note(
        results
    )


def test_without_drafts_there_is_nothing_to_fit() -> None:
    assert fit(run_set(CANDIDATES, [plain_run("a", 9), plain_run("b", 7)])) is None
    assert fit(run_set(CANDIDATES, [drafted_run("svip", "a", ROUNDS)])) is None
    assert fit(run_set(CANDIDATES, [])) is None


def test_predicted_speed_and_latency_are_those_of_the_run_itself() -> None:
    cost = of(run_set(CANDIDATES, [drafted_run("svip", "a", ROUNDS)]), "svip", MODEL)
    assert cost.measured == pytest.approx(1e3 * 9 / 54)
    assert cost.predicted == pytest.approx(1e3 * 9 / 54)
    assert cost.latency_ms == pytest.approx(54 / 9)


def test_lines_of_equal_speed_go_through_the_points_of_that_speed() -> None:
    assert MODEL.latency(discard_rate=0.0, verification_rate=1.0) == TARGET_MS
    verification = MODEL.verification_rate_at(1.6, discard_rate=0.7)
    assert TARGET_MS / MODEL.latency(0.7, verification) == pytest.approx(1.6)


def test_overhead_is_wall_time_over_the_bare_passes_at_their_widths() -> None:
    """Widths 6, 6, 3; width 3 lies halfway between 2 and 4, 6 beyond the widest."""
    costs = PassTimes(1.0, {1: 8.0, 2: 9.0, 4: 10.0})
    run = drafted_run("svip", "a", ROUNDS)
    assert bare_ms(run, costs) == pytest.approx(12 * 1.0 + 10.0 + 10.0 + 9.5)
    assert of(run_set(CANDIDATES, [run], costs=costs), "svip").overhead == pytest.approx(54 / 41.5)
    assert of(run_set(CANDIDATES, [run]), "svip").overhead is None
    assert bare_model(costs) == CostModel(1.0, 8.0, None, 0)


def test_a_peer_is_measured_only() -> None:
    results = run_set(CANDIDATES, [peer_run("hf", "a", 9, 90.0)], costs=PassTimes(1.0, {1: 8.0}), oracle={"a": 2})
    assert of(results, "hf", MODEL) == CandidateCost("hf", pytest.approx(100.0), None, None, None, None, None, None)


def test_the_counted_passes_of_a_peer_predict_its_speed() -> None:
    run = peer_run("hf", "a", 9, 90.0)
    counted = replace(run, turns=(replace(run.turns[0], prefill_ms=0.0, target_forwards=3, draft_forwards=12),))
    cost = of(run_set(CANDIDATES, [counted], oracle={"a": 2}), "hf", MODEL)
    assert (cost.measured, cost.predicted) == (pytest.approx(1e3 * 9 / 95), pytest.approx(1e3 * 9 / 54))
    assert cost.passes_share == pytest.approx(2 / 3)
    assert (cost.latency_ms, cost.overhead) == (None, None)
    (summary,) = summarise([counted], ["hf"])
    assert summary.verification_rate == pytest.approx(3 / 9)


def test_shares_of_the_oracle() -> None:
    """The bound for 9 tokens with 2 passes: 7 drafts, 2 * 7 + 10 * 2 = 34 ms."""
    runs = [drafted_run("svip", "a", ROUNDS), plain_run("a", 9), drafted_run("svip", "b", ROUNDS)]
    results = run_set(CANDIDATES, runs, oracle={"a": 2})
    cost = of(results, "svip", MODEL)
    assert (cost.passes_share, cost.time_share) == (pytest.approx(2 / 3), pytest.approx(34 / 54))
    bound = oracle_bound(results, "none", MODEL)
    assert bound is not None
    assert (bound.prompts, bound.passes, bound.tokens) == (1, 2, 9)
    assert bound.tokens_per_second == pytest.approx(1e3 * 9 / 34)
    assert oracle_bound(replace(results, oracle={}), "none", MODEL) is None


def test_shares_of_the_signal_bound() -> None:
    """9 tokens in 8 drafts and 2 passes: 2 * 8 + 10 * 2 = 36 ms."""
    results = run_set(CANDIDATES, [drafted_run("svip", "a", ROUNDS), plain_run("a", 9)], oracle={"a": 2})
    assert of(results, "svip", MODEL).signal_share is None
    results.signal_bound = SignalBound(prompts=1, tokens=9, drafted=8, passes=2)
    assert of(results, "svip", MODEL).signal_share == pytest.approx(36 / 54)
    assert signal_speed(results, MODEL) == pytest.approx(1e3 * 9 / 36)
    assert signal_speed(results, None) is None


def test_the_oracle_covers_the_first_length_limit() -> None:
    runs = [plain_run("a", 4, length=4), plain_run("a", 4, length=4, repeat=1), plain_run("a", 9, length=9)]
    bound = oracle_bound(run_set(CANDIDATES, runs, oracle={"a": 2}, lengths=[4, 9]), "none", None)
    assert bound is not None
    assert (bound.passes, bound.tokens, bound.tokens_per_second) == (2, 4, None)


def test_passes_over_several_beams_are_not_priced_as_passes_over_a_token() -> None:
    costs = PassTimes(1.0, {1: 8.0, 11: 18.0})
    run = drafted_run("svip", "a", [(4, 2, "policy"), (4, 4, "policy")])
    trees = Candidate("svip", Setting("svip", tree=TreeSize(60)))
    assert bare_ms(run, costs, Candidate("svip", Setting("svip"))) is not None
    assert bare_ms(run, costs, trees) is None
