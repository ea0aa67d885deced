import numpy as np
import pytest
from factory import PREFILL_MS, TARGET_MS, drafted_run, peer_run, plain_run

from specctl.benchmark.summaries import Spread, Summary, summarise
from specctl.calibration.calibration_report import speedup_cells
from specctl.observing.results import BASELINE, Run, evened, speedup
from specctl.reporting.placing import times
from specctl.statistics import Interval, bootstrap

ROUNDS = [(5, 5, "max_draft"), (5, 0, "max_draft"), (2, 1, "policy")]
"""12 drafted, 6 accepted, 9 tokens in 3 passes: 2 * 12 + 10 * 3 = 54 ms after the prompt."""


def only(runs: list[Run], label: str = "svip") -> Summary:
    return next(summary for summary in summarise(runs, [BASELINE, label]) if summary.candidate == label)


def test_rates_of_a_run_by_hand() -> None:
    summary = only([drafted_run("svip", "a", ROUNDS, other_ms=1.0)])
    assert summary.tokens_per_second == pytest.approx(1e3 * 9 / 60)
    assert summary.ms_per_token == pytest.approx(60 / 9)
    assert (summary.acceptance_rate, summary.redundancy, summary.mean_acceptance_length) == (0.5, 0.5, 3.0)
    assert summary.verification_rate == pytest.approx(3 / 9)
    assert summary.discard_rate == pytest.approx(6 / 9)
    assert summary.draft_length == Spread(4.0, pytest.approx(np.sqrt(2)))
    assert summary.accepted_length == Spread(2.0, pytest.approx(np.sqrt(14 / 3)))
    assert summary.stops == {"max_draft": pytest.approx(2 / 3), "policy": pytest.approx(1 / 3)}
    assert summary.latency.ttft_ms is not None
    assert summary.latency.ttft_ms.mean == PREFILL_MS + 20
    parts = {"draft": 24 / 60, "verify": 30 / 60, "prefill": 5 / 60, "other": 1 / 60}
    assert summary.wall == {part: pytest.approx(share) for part, share in parts.items()}


def test_target_only_decoding_drafts_nothing_and_so_has_no_rate_of_acceptance() -> None:
    summary = only([plain_run("a", 4)], BASELINE)
    assert (summary.verification_rate, summary.discard_rate, summary.mean_acceptance_length) == (1.0, 0.0, 1.0)
    unknown = summary.acceptance_rate, summary.redundancy, summary.draft_length, summary.accepted_length
    assert unknown == (None, None, None, None)
    assert summary.stops == {}
    assert summary.speedup is not None
    assert summary.speedup.of_totals == Interval(1.0, prompts=1)


def test_a_peers_rounds_are_unknown_but_its_speed_is_not() -> None:
    runs = [plain_run(prompt, 10) for prompt in "ab"] + [peer_run("hf", prompt, 10, 47.5) for prompt in "ab"]
    summary = only(runs, "hf")
    assert summary.speedup is not None
    assert summary.speedup.of_totals == Interval(*[pytest.approx(105 / 52.5)] * 3, 2)
    for name in ("acceptance_rate", "mean_acceptance_length", "verification_rate", "discard_rate", "draft_length"):
        assert getattr(summary, name) is None
    assert (summary.stops, summary.wall) == ({}, {})


def test_the_two_speedups_differ_where_prompts_do() -> None:
    """Prompt a: 10 tokens twice as fast; b: 90 tokens at the same speed."""
    baseline = [peer_run(BASELINE, "a", 10, 95.0), peer_run(BASELINE, "b", 90, 895.0)]
    mine = [peer_run("x", "a", 10, 45.0), peer_run("x", "b", 90, 895.0)]
    found = speedup(mine, baseline)
    assert found is not None
    assert found.of_totals.value == pytest.approx((100 / 950) / (100 / 1000))
    assert found.of_prompts.value == pytest.approx(1.5)
    assert found.of_prompts[1:3] == (pytest.approx(1.0), pytest.approx(2.0))
    assert found.prompts == 2


def test_only_prompts_that_both_finished_are_paired() -> None:
    baseline = [plain_run("a", 10), plain_run("c", 10)]
    found = speedup([plain_run("a", 10, "x", 0.5), plain_run("b", 10, "x", 9.0)], baseline)
    assert found is not None
    assert found.of_totals == Interval(pytest.approx(105 / 55), prompts=1)
    assert found.prompts == 1
    assert speedup([plain_run("b", 10, "x")], baseline) is None


def test_lengths_are_paired_one_by_one() -> None:
    baseline = [plain_run("a", 10, length=10)]
    mine = [plain_run("a", 10, "x", 0.5, length=10), plain_run("a", 20, "x", 9.0, length=20)]
    found = speedup(mine, baseline)
    assert found is not None
    assert found.of_totals.value == pytest.approx(105 / 55)


def test_a_prompt_that_generated_nothing_has_no_speed() -> None:
    baseline = [plain_run("a", 10), plain_run("b", 10, tokens=())]
    found = speedup([plain_run("a", 10, "x"), plain_run("b", 10, "x", tokens=())], baseline)
    assert found is not None
    assert found.prompts == 1


def test_repeats_of_a_prompt_count_as_one() -> None:
    """Twice a slow run of a and once a fast one of b: each prompt weighs the same."""
    slow = [plain_run("a", 10, "svip", 2.0, repeat=repeat) for repeat in range(2)]
    fast = plain_run("b", 10, "svip", 1.0)
    summary = only([*slow, fast])
    assert (summary.prompts, summary.runs) == (2, 3)
    assert summary.tokens_per_second == pytest.approx(1e3 * 20 / (2 * PREFILL_MS + 30 * TARGET_MS))
    assert sorted(run.prompt for run in evened([*slow, fast])) == ["a", "a", "b", "b"]
    baseline = [plain_run(prompt, 10) for prompt in "ab"]
    assert summarise([*slow, fast, *baseline], ["svip"])[0].speedup == speedup([slow[0], fast], baseline)


@pytest.mark.slow
def test_the_interval_covers_as_often_as_it_promises() -> None:
    generator = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        values = generator.normal(3.0, 1.0, size=40)
        interval = bootstrap(lambda weights, values=values: weights @ values / 40, 40, resamples=1000)  # type: ignore[misc]
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 3.0 <= interval.high
    assert 180 <= hits <= 198


def test_the_bootstrap_is_the_same_every_time_and_whatever_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(50.0)
    first = bootstrap(lambda weights: weights @ values / 50, 50)
    monkeypatch.setattr("specctl.statistics._CHUNK", 7000)
    assert bootstrap(lambda weights: weights @ values / 50, 50) == pytest.approx(first)


def test_one_prompt_gives_no_interval() -> None:
    assert bootstrap(lambda weights: weights[:, 0] * 7, 1) == Interval(7.0, prompts=1)


def test_summaries_keep_the_candidates_order_and_leave_out_candidates_without_runs() -> None:
    runs = [plain_run("a", 3, "x"), plain_run("a", 3)]
    assert [summary.candidate for summary in summarise(runs, ["none", "y", "x"])] == ["none", "x"]


def test_what_too_few_prompts_say_is_doubted_beside_the_number() -> None:
    assert times(bootstrap(lambda weights: weights[:, 0] * 0 + 1.1, 2)) == "1.10x (1.10 to 1.10, only 2 prompts)"
    assert times(bootstrap(lambda weights: weights[:, 0] + 0.5, 1)) == "1.50x (only 1 prompt)"
    assert times(Interval(1.1, 1.1, 1.1, 12)) == "1.10x (1.10 to 1.10, an interval of no width says nothing)"
    assert times(Interval(1.0, 1.0, 1.0, 12)) == "1.00x (1.00 to 1.00)", "of the target over itself"
    assert times(Interval(1.1, 1.0, 1.2, 10)) == "1.10x (1.00 to 1.20)"
    assert times(Interval(1.1, 1.0, 1.2, 9)) == "1.10x (1.00 to 1.20, only 9 prompts)"
    assert speedup_cells(Interval(1.1, 1.0, 1.2, 9)) == ("1.10", "1.00 to 1.20 (only 9 prompts)")
