import json
from dataclasses import replace
from math import exp, inf, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specctl.analysis.readings import Judged, Reading, Readings, judge, read_traces, run_lengths
from specctl.analysis.report import analysis_tables, draw_analysis
from specctl.analysis.signal_quality import analyse, bretagnolle_huber, estimate, fit_c, pinsker
from specctl.analysis.teacher_forcing import compare, read
from specctl.decoding import draft_tokens
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.jsonl import Record
from specctl.records import DraftStep, ExtraToken, Round, StopReason
from specctl.reporting.table import as_text, plain
from specctl.round_trace import trace_line
from specctl.statistics import auroc, binned, quantiles, spearman, wilson
from tests.support.toys import TableRunner, related_table, table

GREEDY = Sampling()
FIELDS = ("entropy", "cross_entropy", "top_prob", "acceptance", "divergence", "agrees", "kept")


def compared(target: list[float], draft: list[float], token: int, sampling: Sampling = GREEDY) -> dict[str, float]:
    logits = [torch.tensor([probs]).log() for probs in (target, draft)]
    rows = compare(*logits, torch.tensor([token]), sampling)
    return dict(zip(FIELDS, rows[:, 0].tolist(), strict=True))


def reading(acceptance: list[float], entropy: list[float], divergence: list[float] | None = None) -> Reading:
    one = np.ones(len(entropy))
    accepted, nats = np.array(acceptance), np.array(entropy)
    kl = np.array(divergence) if divergence else 0.1 * one
    runs = run_lengths(accepted)
    return Reading(nats, 1.3 * nats, np.exp(-nats), accepted, kl, one, accepted, runs, accepted)


def test_two_distributions_compared_by_hand() -> None:
    found = compared([0.5, 0.5], [0.75, 0.25], token=1)
    assert found["entropy"] == pytest.approx(-0.75 * log(0.75) - 0.25 * log(0.25), abs=1e-6)
    assert found["cross_entropy"] == pytest.approx(log(2), abs=1e-6)
    assert found["top_prob"] == pytest.approx(0.75)
    assert found["acceptance"] == pytest.approx(0.75)
    assert found["divergence"] == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5), abs=1e-6)
    assert found["kept"] == 0  # greedy: the draft's best is token 0, the target wrote 1


def test_bounds_by_hand() -> None:
    divergence = np.array([0.0, 0.02, 2.0, inf])
    assert pinsker(divergence) == pytest.approx([1, 0.9, 0, -inf])
    assert bretagnolle_huber(divergence) == pytest.approx([1, 1 - sqrt(1 - exp(-0.02)), 1 - sqrt(1 - exp(-2)), 0])
    assert estimate(np.array([0.0, 0.6]), 0.15) == pytest.approx([1, 0.7])


def test_in_sampling_the_distributions_are_those_drawn_from() -> None:
    # At temperature 1/2 probabilities are squared: (0.8, 0.2) becomes (16, 1) / 17.
    found = compared([0.5, 0.5], [0.8, 0.2], token=1, sampling=Sampling(temperature=0.5))
    assert found["acceptance"] == pytest.approx(0.5 + 1 / 17)
    assert found["kept"] == pytest.approx(2 / 17)
    assert found["divergence"] == pytest.approx(16 / 17 * log(32 / 17) + 1 / 17 * log(2 / 17), abs=1e-6)
    assert found["top_prob"] == pytest.approx(0.8)  # signals are of the raw distribution
    assert found["entropy"] == pytest.approx(-0.8 * log(0.8) - 0.2 * log(0.2), abs=1e-6)


def test_a_filter_that_the_target_does_not_share_makes_divergence_infinite() -> None:
    found = compared([0.1, 0.9], [0.9, 0.1], token=1, sampling=Sampling(temperature=1, top_k=1))
    assert found["divergence"] == inf
    assert found["acceptance"] == 0
    assert found["kept"] == 0
    one_sided = compared([0.5, 0.5], [0.9, 0.1], token=0, sampling=Sampling(temperature=1, top_p=0.8))
    assert one_sided["divergence"] == pytest.approx(log(2), abs=1e-6)
    assert one_sided["acceptance"] == pytest.approx(0.5)


weights = st.lists(st.floats(-12, 12, width=32), min_size=6, max_size=6)


@given(weights, weights, st.sampled_from([GREEDY, Sampling(1.0), Sampling(0.5), Sampling(1.0, top_k=3)]))
def test_both_bounds_stay_below_the_acceptance_probability(
    target: list[float], draft: list[float], sampling: Sampling
) -> None:
    rows = compare(torch.tensor([target]), torch.tensor([draft]), torch.tensor([0]), sampling).double().numpy()
    acceptance, divergence = rows[3], rows[4]
    assert pinsker(divergence) <= acceptance + 1e-5
    assert bretagnolle_huber(divergence) <= acceptance + 1e-5
    assert 0 <= acceptance <= 1


@given(weights, weights)
def test_the_targets_tokens_were_accepted_drafts_as_often_as_drafts_are_accepted(
    target: list[float], draft: list[float]
) -> None:
    logits = torch.tensor([target]).repeat(6, 1), torch.tensor([draft]).repeat(6, 1)
    rows = compare(*logits, torch.arange(6), Sampling(1.0))
    probs = torch.tensor(target).softmax(-1)
    assert float((probs * rows[6]).sum()) == pytest.approx(float(rows[3, 0]), abs=1e-5)


def test_equal_distributions_are_told_as_such() -> None:
    logits = 5 * torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    rows = compare(logits, logits, logits.argmax(-1), GREEDY)
    assert rows[3].numpy() == pytest.approx(np.ones(50), abs=1e-6)
    assert rows[4:].tolist() == [[0.0] * 50, [1.0] * 50, [1.0] * 50]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, top_k=3)])
def test_reading_in_chunks_is_reading_at_once(monkeypatch: pytest.MonkeyPatch, sampling: Sampling) -> None:
    target = table(1)
    draft = related_table(target, 2)
    prompt, output = [3, 1, 4], [1, 2, 2, 3, 4, 1, 1]
    monkeypatch.setattr(draft_tokens, "CHUNK", 3)
    runners = [TableRunner(logits, prompt + output) for logits in (target, draft)]
    found = read(*runners, prompt, output, sampling)
    text = prompt + output
    pairs = [(text[place - 2], text[place - 1]) for place in range(3, 10)]
    rows = [torch.stack([logits[pair] for pair in pairs]) for logits in (target, draft)]
    expected = compare(*rows, torch.tensor(output), sampling).double().numpy()
    for name, row in zip(FIELDS, expected, strict=True):
        assert getattr(found, name) == pytest.approx(row, abs=1e-6)
    assert found.run == pytest.approx(run_lengths(found.kept))
    assert found.judged is (found.kept if sampling.greedy else found.acceptance)


def test_a_prompt_of_one_token_can_be_read() -> None:
    logits = table(1)
    found = read(TableRunner(logits), TableRunner(logits), [2], [1, 0], Sampling(1.0))
    assert found.kept == pytest.approx([1, 1])
    assert found.run == pytest.approx([2, 1])


def test_run_lengths() -> None:
    assert run_lengths(np.array([1.0, 1, 0, 1])).tolist() == [2, 1, 0, 1]
    assert run_lengths(np.array([0.5, 0.5])).tolist() == [0.75, 0.5]


def test_auroc_of_a_perfect_a_blind_and_a_wrong_signal() -> None:
    accepted = np.array([1.0, 1, 0, 0])
    assert auroc(np.array([4.0, 3, 2, 1]), accepted) == 1
    assert auroc(np.array([1.0, 1, 1, 1]), accepted) == 0.5
    assert auroc(np.array([1.0, 2, 3, 4]), accepted) == 0
    assert auroc(np.array([3.0, 1, 2, 1]), accepted) == (1 + 1 + 0 + 0.5) / 4
    assert auroc(np.array([1.0, 2, 3, 4]), np.ones(4)) is None


def test_auroc_with_chances_is_that_of_as_many_tokens() -> None:
    chances = auroc(np.array([2.0, 1.0]), np.array([0.75, 0.25]))
    whole = auroc(np.array([2.0] * 4 + [1.0] * 4), np.array([1, 1, 1, 0, 1, 0, 0, 0.0]))
    assert chances == pytest.approx(whole)


def test_spearman_is_the_correlation_of_ranks_with_shared_ties() -> None:
    ranks = (np.array([1, 2.5, 2.5, 4]), np.array([1, 3, 2, 4]))
    expected = np.corrcoef(*ranks)[0, 1]
    assert spearman(np.array([-1.0, 20, 20, 21]), np.array([1.0, 3, 2, 4])) == pytest.approx(expected, abs=1e-12)
    assert spearman(np.array([1.0, 2, 3]), np.array([0.3, 0.2, -9])) == pytest.approx(-1, abs=1e-12)


def test_what_does_not_vary_has_no_rank_correlation() -> None:
    assert spearman(np.ones(3), np.arange(3.0)) is None
    assert spearman(np.zeros(0), np.zeros(0)) is None


@given(st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_ends_are_one_normal_deviation_from_the_frequency(counts: tuple[int, int]) -> None:
    successes, count = counts
    low, high = wilson(successes, count)
    assert 0 <= low < high <= 1
    for end in (low, high):
        deviation = 1.959963984540054 * sqrt(end * (1 - end) / count)
        assert abs(successes / count - end) == pytest.approx(deviation, abs=1e-8)


def test_bins_hold_equally_many_tokens() -> None:
    signal = np.arange(100.0)
    bins = binned(signal, (signal < 50).astype(float), frequency=True)
    assert [one.count for one in bins] == [10] * 10
    assert [one.value for one in bins] == [1.0] * 5 + [0.0] * 5
    assert (bins[0].lower, bins[0].upper) == wilson(10, 10)
    assert (bins[3].low, bins[3].middle, bins[3].high) == (30, 34.5, 39)
    (quarter,) = binned(np.zeros(4), np.array([0.0, 1, 2, 3]))
    assert (quarter.lower, quarter.value, quarter.upper) == (0.75, 1.5, 2.25)


def test_weighted_quantiles() -> None:
    assert quantiles(np.array([3.0, 1, 2]), np.array([1.0, 1, 2]), (0.25, 0.5, 1)) == [1, 2, 3]
    assert quantiles(np.array([1.0, 5.0]), np.array([1.0, 0.0]), (0.99,)) == [1]


def test_the_constant_that_made_the_data_is_fitted() -> None:
    entropy = np.linspace(0, 4, 30)
    assert fit_c(entropy, estimate(entropy, 0.12)) == pytest.approx(0.12)
    assert fit_c(np.zeros(3), np.ones(3)) == 0


def test_tightness_of_the_bounds() -> None:
    divergence = [0.02, 0.5, 8.0]
    found = analyse_reading(reading([0.95, 0.5, 0.05], [0.1, 1.0, 2.0], divergence))
    by_name = {bound.name: bound for bound in found.bounds}
    pinskers = by_name["Pinsker"]
    assert pinskers.vacuous == pytest.approx(1 / 3)
    assert pinskers.violated == 0
    assert pinskers.mean == pytest.approx((0.9 + 0.5 + 0) / 3)
    assert pinskers.gap == pytest.approx((0.05 + 0 + 0.05) / 3)
    assert by_name["Bretagnolle-Huber"].vacuous == 0
    published = by_name["estimate, c = 0.15"]
    assert published.violated == pytest.approx(2 / 3)
    assert published.absolute_gap > abs(published.gap)
    assert found.means[0].divergence == pytest.approx(sum(divergence) / 3)


def analyse_reading(one: Reading) -> Any:
    readings = Readings(one, np.zeros(len(one.entropy), dtype=np.int64), ["all"])
    return analyse(judge(readings), readings).theory


def test_a_broken_bound_is_an_alarm_and_infinite_divergence_is_told() -> None:
    broken = reading([0.5, 0.5], [0.5, 1.0], [0.0, inf])
    readings = Readings(broken, np.zeros(2, dtype=np.int64), ["all"])
    analysis = analyse(judge(readings), readings)
    (alarm,) = (table for table in analysis_tables(analysis, greedy=False) if table.alarm)
    assert "A BOUND WAS BROKEN" in alarm.note
    assert "KL is infinite for 50.0%" in alarm.note
    document = plain(analysis)
    assert document["theory"]["means"][0]["divergence"] is None
    json.dumps(document, allow_nan=False)


def test_ratios_leave_out_tokens_without_entropy() -> None:
    found = analyse_reading(replace(reading([1.0, 0.9, 0.8], [0.0, 1.0, 2.0]), cross_entropy=np.array([0.3, 1.5, 3.0])))
    assert found.ratio.left_out == 1
    assert found.ratio.deciles == pytest.approx([1.5] * 9)
    assert found.ratio.implied_c == pytest.approx(0.25)
    assert sum(found.ratio.shares) == pytest.approx(1)


def test_categories_are_told_apart() -> None:
    one = reading([1.0, 0.5, 0.0], [0.1, 1.0, 2.0])
    readings = Readings(one, np.array([0, 1, 1]), ["easy", "hard"])
    means = {mean.category: mean for mean in analyse(judge(readings), readings).theory.means}  # type: ignore[union-attr]
    assert {name: mean.tokens for name, mean in means.items()} == {"all": 3, "easy": 1, "hard": 2}
    assert means["hard"].acceptance == 0.25
    assert means["easy"].entropy == pytest.approx(0.1)


def written(path: Path, rounds: list[tuple[int, list[float]]], identity: object = "a") -> Path:
    """A trace of rounds given as accepted tokens and the entropies of the drafted ones."""
    lines = []
    for index, (accepted, entropies) in enumerate(rounds):
        steps = tuple(DraftStep(n + 1, 7, nats, exp(-nats), exp(-nats) / 2) for n, nats in enumerate(entropies))
        round_ = Round(index, steps, accepted, 9, ExtraToken.CORRECTION, StopReason.POLICY)
        lines.append(json.dumps(trace_line(Record(1, identity), 0, round_)) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def test_a_trace_tells_accepted_rejected_and_discarded(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", [(1, [0.1, 1.0, 5.0, 6.0]), (2, [0.2, 0.3])])
    second = written(tmp_path / "b.jsonl", [(0, []), (0, [2.0])], identity=["b"])
    judged = read_traces([first, second])
    assert judged.signals["entropy"].tolist() == [0.1, 1.0, 0.2, 0.3, 2.0]
    assert judged.accepted.tolist() == [1, 0, 1, 1, 0]
    assert judged.run.tolist() == [1, 0, 2, 1, 0]
    assert judged.prompt.tolist() == [0, 0, 0, 0, 1]
    assert judged.discarded.tolist() == [5.0, 6.0]
    found = analyse(judged)
    assert {name: group.count for name, group in found.verdicts.items()} == {
        "accepted": 3,
        "rejected": 2,
        "discarded": 2,
    }
    assert found.verdicts["rejected"].mean == pytest.approx(1.5)
    assert {name: one.auroc for name, one in found.predictors.items()} == {
        "entropy": 1,
        "top_prob": 1,
        "token_prob": 1,
    }
    assert found.acceptance.value == pytest.approx(0.6)
    assert found.theory is None
    json.dumps(plain(found), allow_nan=False)


def test_files_of_the_same_prompt_are_one_prompt(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, [(1, [0.1])]) for name in ("a.jsonl", "b.jsonl")]
    assert read_traces(paths).prompt.tolist() == [0, 0]


def test_a_write_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [(1, [0.1, 2.0])])
    with path.open("a") as file:
        file.write('\n{"id": "a", "turn": 0, "ro')
    assert len(read_traces([path]).accepted) == 2


def round_line(*steps: dict[str, object], **changes: object) -> str:
    round_ = {"id": 1, "turn": 0, "round": 0, "drafted": len(steps), "accepted": 0, "stop": "policy", "threshold": None}
    times = {"draft_ms": 1.0, "verify_ms": 1.0, "extra": 9, "extra_kind": "correction"}
    whole = [{"token": 3, "accepted": False, **step} for step in steps]
    return json.dumps({**round_, **times, "steps": whole, **changes})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "not JSON"),
        ("[1]", "Input should be a dictionary"),
        ('{"id": 1, "completion": "text"}', "drafted: Field required"),
        (round_line({"entropy": 1}, accepted=2), "2 of 1 drafted tokens accepted"),
        (round_line({"entropy": "high"}), "steps.0.entropy: Input should be a valid number"),
        (round_line({"entropy": float("nan")}), "steps.0.entropy: Input should be a finite number"),
        (round_line({"top_prob": 2}), "steps.0.top_prob: Input should be less than"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "a.jsonl", [(1, [0.1])])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UsageError) as caught:
        read_traces([path])
    assert caught.value.message.startswith(f"{path}:2: ")
    assert message in caught.value.message


def test_the_levels_of_trees_are_not_analysed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(round_line({"entropy": 1}, tree=[4]) + "\n")
    with pytest.raises(UsageError, match=r"a.jsonl:1: the levels of a tree") as caught:
        read_traces([tmp_path / "a.jsonl"])
    assert "draft.tree=0" in caught.value.hint


def test_traces_without_anything_to_analyse(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no draft token"):
        read_traces([written(tmp_path / "a.jsonl", [(0, [])])])
    with pytest.raises(UsageError, match="cannot read"):
        read_traces([tmp_path / "nowhere.jsonl"])
    (tmp_path / "b.jsonl").write_text(round_line({}) + "\n")
    with pytest.raises(UsageError, match="no signals"):
        read_traces([tmp_path / "b.jsonl"])


@pytest.mark.parametrize("tokens", [1, 2, 400])
@pytest.mark.representatives("1")
def test_every_table_and_figure_takes_few_tokens_and_many(tokens: int) -> None:
    generator = np.random.default_rng(0)
    entropy = generator.gamma(1.0, 1.0, tokens)
    acceptance = np.clip(estimate(entropy, 0.1) + generator.normal(0, 0.05, tokens), 0, 1)
    one = reading(acceptance.tolist(), entropy.tolist(), (3 * (1 - acceptance) ** 2).tolist())
    readings = Readings(one, np.arange(tokens) % 3, ["x"] * 3)
    analysis = analyse(judge(readings), readings)
    titles = [line for line in as_text(analysis_tables(analysis, greedy=False)).splitlines() if line]
    assert "Bounds on the acceptance probability" in titles
    pictures = {picture.name: picture for picture in draw_analysis(analysis, judge(readings), readings)}
    assert set(pictures) == {
        "entropy-acceptance",
        "acceptance-by-signal",
        "entropy-by-verdict",
        "entropy-run-length",
        "bounds",
        "entropy-ratio",
    }
    for picture in pictures.values():
        picture.figure.draw_without_rendering()


def test_what_the_traces_lack_is_not_drawn() -> None:
    judged = Judged(
        np.array([0, 0]), {"top_prob": np.array([0.9, 0.2])}, np.array([1.0, 0]), np.array([1.0, 0]), np.zeros(0)
    )
    analysis = analyse(judged)
    assert [picture.name for picture in draw_analysis(analysis, judged, None)] == ["acceptance-by-signal"]
    assert [table.title for table in analysis_tables(analysis)] == [
        "How well each signal separates accepted from rejected tokens"
    ]
