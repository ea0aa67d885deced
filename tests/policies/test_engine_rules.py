"""Rules of other engines against what their sources say, worked out by hand."""

import random
from math import exp, log

import numpy as np
import pytest

from specctl.policies import POLICIES, Setting
from specctl.policies.foreign_rules import (
    DAMPING,
    FIRST_BIAS,
    FIRST_SLOPE,
    REFIT,
    RIDGE,
    AcceptanceEstimate,
    CalibratedConfidence,
    ProbedLength,
    SteppedLength,
    VllmAdaptive,
)
from specctl.policies.registry import ENGINE_RULES
from specctl.records import DraftStep, Round
from tests.support.toys import round_of


def played(policy: ProbedLength | SteppedLength, accepted: float, seconds: float = 1.0) -> int:
    """The length of one round of which a share is accepted."""
    length = policy.draft_limit()
    steps = tuple(DraftStep(k, 0) for k in range(1, length + 1))
    policy.observe(Round(0, steps, int(accepted * length), 5, None, None, verify_seconds=seconds))
    return length


@pytest.mark.parametrize("name", ENGINE_RULES)
def test_rules_of_engines_are_not_offered_but_known(name: str) -> None:
    assert name not in POLICIES
    assert name not in list(POLICIES)
    setting = Setting.of({"name": name})
    assert setting.all_values
    assert isinstance(setting.build(), ENGINE_RULES[name])


# onnxruntime-genai


def test_a_longer_draft_is_tried_and_kept_while_it_is_as_fast() -> None:
    policy = ProbedLength(least=2)
    # Two rounds of 2, then 3 is tried in two, waits for one and needs a second observation before 4 is tried.
    assert [played(policy, 1) for _ in range(7)] == [2, 2, 3, 3, 3, 3, 4]


def test_a_length_that_is_far_slower_is_given_up_at_once() -> None:
    policy = ProbedLength(least=2)
    lengths = [played(policy, 1, 1.0 if policy.draft_limit() == 2 else 9.0) for _ in range(11)]
    assert lengths == [2, 2, 3, *[2] * 7, 3]


def test_a_shorter_draft_is_tried_where_little_is_accepted() -> None:
    policy = ProbedLength(least=1)
    while policy.draft_limit() < 3:
        played(policy, 1)
    for _ in range(30):
        played(policy, 0)
    assert policy.draft_limit() == 1
    policy.reset()
    assert policy == ProbedLength(least=1)


def test_tokens_behind_a_rejection_are_not_judged() -> None:
    policy = ProbedLength(least=1, max_draft=3)
    assert [played(policy, 1) for _ in range(20)][-1] == 3
    # One accepted and one rejected: half of those judged, which is not so little that a shorter draft is tried.
    assert {played(policy, 0.4) for _ in range(40)} == {3}


def test_three_rounds_in_vain_are_followed_by_one_without_a_draft() -> None:
    policy = ProbedLength(least=2, max_draft=2, cooldown=True)
    assert [played(policy, 0) for _ in range(6)] == [2, 2, 2, 0, 2, 2]
    assert played(policy, 0.5) == 2  # the count begins anew
    assert [played(policy, 0) for _ in range(4)] == [2, 2, 2, 0]
    steady = ProbedLength(least=2, max_draft=2)
    assert {played(steady, 0) for _ in range(9)} == {2}


# exllamav3


def verdicts(policy: CalibratedConfidence, logit: float, accepted: int, count: int) -> None:
    """Rounds of one token in one bin, of which the first ones are accepted."""
    for number in range(count):
        step = DraftStep(1, 0, top_prob=logit)
        policy.observe(Round(0, (step,), int(number < accepted), 5, None, None))


def test_little_is_cut_before_64_verdicts() -> None:
    policy = CalibratedConfidence(confidence=0.9)
    verdicts(policy, 3.5, 0, 60)
    assert policy.estimate(3.5) == 1
    verdicts(policy, 3.5, 0, 30)
    assert policy.estimate(3.5) == 0


def test_an_estimate_is_that_of_the_nearest_bin_below() -> None:
    policy = CalibratedConfidence(confidence=0.5)
    verdicts(policy, 2.9, 0, 60)
    verdicts(policy, 8.1, 60, 60)
    low, high = policy.estimate(2.0), policy.estimate(8.99)
    assert (low, high) == (0, 1)
    assert policy.estimate(7.9) == low
    assert policy.estimate(-4.0) == low
    assert policy.estimate(30.0) == high


def test_a_draft_stops_where_the_product_falls_below_the_confidence() -> None:
    policy = CalibratedConfidence(confidence=0.6)
    verdicts(policy, 5.0, 0, 30)
    for _ in range(300):
        verdicts(policy, 5.0, 3, 4)
    share = policy.estimate(5.5)
    assert 0.7 < share < 0.78
    stops = [policy.should_stop(DraftStep(k, 0, top_prob=5.5)) for k in (1, 2, 3)]
    assert stops == [False, True, True]
    assert policy.should_stop(DraftStep(1, 0, top_prob=5.5)) is False


# SGLang


def test_lengths_step_after_ten_rounds_and_then_every_five() -> None:
    policy = SteppedLength(lengths=(1, 3, 5), first=3)
    lengths = [played(policy, 1) for _ in range(16)]
    assert lengths == [*[3] * 15, 5]
    assert [played(policy, 0) for _ in range(6)] == [5, 5, 5, 5, 3, 3]


def test_between_two_lengths_the_mean_decides() -> None:
    policy = SteppedLength(lengths=(1, 3), first=1)
    for _ in range(15):
        played(policy, 1)
    assert policy.draft_limit() == 3  # the mean tends to 1, above 1 - 0.5
    for _ in range(15):
        played(policy, 0.34)  # and stays there with one token of three
    assert policy.draft_limit() == 3
    for _ in range(15):
        played(policy, 0)
    assert policy.draft_limit() == 1


def sigma(score: float) -> float:
    return 1 / (1 + exp(-score))


def test_before_any_fit_the_slope_is_a_half() -> None:
    estimate = AcceptanceEstimate(3)
    assert estimate.at(0, 0.8) == pytest.approx(sigma(0.5 * log(4) - 0.2))
    assert estimate.at(2, 1.0) == pytest.approx(sigma(0.5 * 40 - 0.2))


def test_a_fit_is_one_damped_newton_step_on_all_coefficients() -> None:
    chance, positions = random.Random(0), 3
    estimate = AcceptanceEstimate(positions)
    design, weights, surprises, counts = [], [], [], np.zeros(positions)
    for _ in range(REFIT):
        probs = [chance.uniform(0.3, 0.99) for _ in range(positions)]
        accepted = next((k for k in range(positions) if chance.random() > probs[k]), positions)
        for k in range(min(accepted + 1, positions)):
            feature, known = log(probs[k] / (1 - probs[k])), estimate.at(k, probs[k])
            design.append([feature, *(float(k == other) for other in range(positions))])
            weights.append(known * (1 - known))
            surprises.append((k < accepted) - known)
            counts[k] += 1
        assert (estimate.slope, estimate.biases) == (FIRST_SLOPE, [FIRST_BIAS] * positions)
        estimate.learn(probs, accepted)
    rows = np.array(design)
    hessian = rows.T @ (np.array(weights)[:, None] * rows) + RIDGE * np.eye(positions + 1)
    slope, *_ = np.linalg.solve(hessian, rows.T @ np.array(surprises))
    slope *= counts.sum() / (counts.sum() + DAMPING)
    own = rows[:, 1:].T @ np.array(surprises) - hessian[1:, 0] * slope
    assert estimate.slope == pytest.approx(FIRST_SLOPE + slope)
    assert estimate.biases == pytest.approx(FIRST_BIAS + own / np.diag(hessian)[1:] * counts / (counts + DAMPING))
    assert estimate.slope != pytest.approx(FIRST_SLOPE)


def test_a_slope_never_falls_below_zero() -> None:
    estimate = AcceptanceEstimate(1)
    for _ in range(REFIT // 2):
        estimate.learn([0.99], 0)
        estimate.learn([0.05], 1)
    assert estimate.slope == FIRST_SLOPE
    assert estimate.biases != [FIRST_BIAS]


def test_a_draft_ends_where_verifying_one_more_token_lowers_the_rate() -> None:
    policy = VllmAdaptive(max_draft=4, cost_ratio=0.1, token_ratio=0.5)
    probs = [0.95, 0.9, 0.4, 0.3]
    survival = [1.0]
    for probability in probs:
        survival.append(survival[-1] * sigma(0.5 * log(probability / (1 - probability)) - 0.2))
    rates = [sum(survival[: k + 1]) / (1 + 0.1 * 4 + 0.5 * k) for k in range(5)]
    stops = [policy.should_stop(DraftStep(k, 0, top_prob=probability)) for k, probability in enumerate(probs, start=1)]
    assert stops.index(True) == rates.index(max(rates)) == 2


@pytest.mark.parametrize("carried", [True, False])
def test_what_was_learned_is_kept_if_it_shall_be(carried: bool) -> None:
    policy = VllmAdaptive(carry_over=carried)
    step = DraftStep(1, 0, top_prob=0.6)
    before = [policy.should_stop(step), policy._survival]
    one = round_of(0, 1, entropies=[0.5])
    for _ in range(REFIT):
        policy.observe(one)
    policy.reset()
    policy.should_stop(step)
    assert (policy._survival == before[1]) is not carried
