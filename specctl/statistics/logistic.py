"""The yardstick of a head: a logistic curve through one signal."""

from dataclasses import dataclass

import numpy as np

from specctl.statistics.intervals import Floats

_NEWTON_STEPS = 50
_RIDGE = 1e-6
_STEEPEST = 30.0


@dataclass(frozen=True, slots=True)
class Logistic:
    """The logit of acceptance as ``intercept + slope * signal``."""

    intercept: float
    slope: float

    def logits(self, signal: Floats) -> Floats:
        return self.intercept + self.slope * signal


def fit_logistic(signal: Floats, accepted: Floats, reject_weight: float = 1.0) -> Logistic:
    """Fit by weighted binary cross-entropy with soft labels (Newton's method).

    Args:
        signal: ``(N,)``.
        accepted: ``(N,)`` P.
        reject_weight: what a refusal counts; an acceptance counts 1.
    """
    centre, spread = float(signal.mean()), float(signal.std()) or 1.0
    features = np.stack([np.ones(len(signal)), (signal - centre) / spread])  # (2, N)
    weights = accepted + reject_weight * (1 - accepted)
    found = np.zeros(2)
    for _ in range(_NEWTON_STEPS):
        guess = 1 / (1 + np.exp(-np.clip(found @ features, -_STEEPEST, _STEEPEST)))
        gradient = features @ (accepted - weights * guess)
        curvature = (features * (weights * guess * (1 - guess))) @ features.T + _RIDGE * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        # A whole Newton step may overshoot where the curve is flat.
        found = found + step * min(1.0, 2.0 / max(float(np.abs(step).max()), 1e-12))
        if np.abs(step).max() < 1e-9:
            break
    return Logistic(float(found[0] - found[1] * centre / spread), float(found[1] / spread))
