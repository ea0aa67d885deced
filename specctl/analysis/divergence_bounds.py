"""Bounds on the acceptance probability by divergence, and its estimate by entropy (SVIP, arXiv 2411.18462)."""

import numpy as np

from specctl.analysis.readings import Reading
from specctl.statistics.intervals import Floats

PUBLISHED_C = 0.15
"""The constant of SVIP's published code (arXiv 2411.18462)."""


def pinsker(divergence: Floats) -> Floats:
    """1 - sqrt(KL/2), at most sum(min(p, q)) (SVIP eq. 4)."""
    return 1 - np.sqrt(divergence / 2)


def bretagnolle_huber(divergence: Floats) -> Floats:
    """1 - sqrt(1 - exp(-KL)), at most sum(min(p, q)) (SVIP App. B)."""
    return 1 - np.sqrt(-np.expm1(-divergence))


def estimate(entropy: Floats, c: float) -> Floats:
    """1 - sqrt(c H_q) (SVIP eq. 6)."""
    return 1 - np.sqrt(c * entropy)


def fit_c(entropy: Floats, acceptance: Floats) -> float:
    """The c for which `estimate` fits the acceptance probabilities best, by least squares."""
    total = float(entropy.sum())
    slope = float(((1 - acceptance) * np.sqrt(entropy)).sum()) / total if total else 0.0
    return slope**2


def bounds(reading: Reading, fitted_c: float) -> dict[str, Floats]:
    """Every bound and estimate of the acceptance probability, by name; they may be negative."""
    return {
        "Pinsker": pinsker(reading.divergence),
        "Bretagnolle-Huber": bretagnolle_huber(reading.divergence),
        f"estimate, c = {PUBLISHED_C}": estimate(reading.entropy, PUBLISHED_C),
        f"estimate, c = {fitted_c:.3g} (fitted)": estimate(reading.entropy, fitted_c),
    }
