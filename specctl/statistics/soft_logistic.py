"""Logistic regression with soft labels."""

from dataclasses import dataclass

import numpy as np

from specctl.statistics.intervals import Floats

_NEWTON_STEPS = 50
_LONGEST_STEP = 2.0
_RIDGE = 1e-6


@dataclass(frozen=True, slots=True)
class Logistic:
    """The logit of acceptance as ``intercept + slope * signal``."""

    intercept: float
    slope: float

    def logits(self, signal: Floats) -> Floats:
        return self.intercept + self.slope * signal


def sigmoid(logits: Floats) -> Floats:
    """Chances from logits of any shape; small ones keep their digits."""
    found: Floats = np.exp(-np.logaddexp(0.0, -logits))
    return found


def fit_logistic(signal: Floats, accepted: Floats, reject_weight: float = 1.0) -> Logistic:
    """Fit a logistic curve through one signal by weighted binary cross-entropy.

    Args:
        signal: ``(N,)``.
        accepted: ``(N,)`` probability of acceptance.
        reject_weight: weight of a rejection; an acceptance weighs 1.
    """
    centre, spread = float(signal.mean()), float(signal.std()) or 1.0
    features = np.stack([np.ones(len(signal)), (signal - centre) / spread], axis=1)  # (N, 2)
    intercept, slope = fit_weights(features, accepted, ridge=_RIDGE, reject_weight=reject_weight)
    return Logistic(float(intercept - slope * centre / spread), float(slope / spread))


def fit_weights(features: Floats, accepted: Floats, *, ridge: float, reject_weight: float = 1.0) -> Floats:
    """The weights (F,) of a logistic regression, by Newton's method on the cross-entropy summed over tokens.

    Args:
        features: ``(N, F)``, of similar scale.
        accepted: ``(N,)`` probability of acceptance.
        ridge: ``ridge / 2 * |weights|^2`` is added to the loss; above 0, so that separable data have a solution.
        reject_weight: weight of a rejection; an acceptance weighs 1.
    """
    importance = accepted + reject_weight * (1 - accepted)  # (N,)
    penalty = ridge * np.eye(features.shape[1])
    weights = np.zeros(features.shape[1])
    for _ in range(_NEWTON_STEPS):
        predicted = sigmoid(features @ weights)  # (N,)
        gradient = features.T @ (accepted - importance * predicted) - penalty @ weights
        curvature = (features.T * (importance * predicted * (1 - predicted))) @ features + penalty
        step = np.linalg.solve(curvature, gradient)
        longest = float(np.abs(step).max())
        # A whole Newton step may overshoot where the curve is flat.
        weights = weights + step * min(1.0, _LONGEST_STEP / max(longest, 1e-12))
        if longest < 1e-9:
            break
    return weights
