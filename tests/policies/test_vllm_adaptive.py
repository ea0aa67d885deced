"""vLLM's estimate of acceptance is fitted by the equations that its source states, and admits what pays."""

import random
from math import exp, log

import numpy as np
import pytest

from specctl.policies.foreign_rules import (
    DAMPING,
    FIRST_BIAS,
    FIRST_SLOPE,
    REFIT,
    RIDGE,
    AcceptanceEstimate,
    VllmAdaptive,
)
from specctl.records import DraftStep
from tests.support.toys import round_of


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
