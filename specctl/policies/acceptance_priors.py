"""Logistic estimators of acceptance: what they read, and what they take to be known before anything was seen."""

from math import sqrt
from typing import NamedTuple

from specctl.policies.base import read
from specctl.policies.logistic import OnlineLogistic, log_odds
from specctl.records import DraftStep, Round


class Prior(NamedTuple):
    """Mean and variance of each weight of a logistic estimator: the constant first, then its features in order."""

    mean: tuple[float, ...]
    variance: tuple[float, ...]


ACCEPTED = Prior((0.9, 0.9, -0.2), (0.5, 0.1, 0.1))
"""Acceptance of a token, from log-odds of the top probability and sqrt(entropy)."""
ACCEPTED_BY_HEAD = Prior((0.2, 0.4, -0.1, 0.6), (0.5, 0.1, 0.1, 0.1))
"""Acceptance of a token, from log-odds of the top probability, sqrt(entropy) and log-odds of the head's prediction."""
NEXT = Prior((0.9, -0.2, 0.4), (0.25, 0.03, 0.05))
"""Acceptance of the next token, from sqrt(entropy) and `TokenRates.surplus` of the current token."""
NEXT_FORESEEN = Prior((0.0, 1.0, 0.2), (0.25, 0.1, 0.05))
"""The same, from log-odds of the draft's own prediction for the next token in place of sqrt(entropy)."""
FIRST = Prior((0.9, 0.5), (0.5, 0.1))
"""Acceptance of a round's first token, from `TokenRates.surplus` of the last emitted token."""
AGREEING = Prior((0.0, 1.0, 0.0), (0.02, 0.01, 0.5))
"""Acceptance of a token with a match, from log-odds of what is expected otherwise and `DraftStep.agreement`."""
DRIFT = 5e-4
"""Drift of the estimators' weights with each verified token, see `OnlineLogistic`."""


def estimators(foresight: bool) -> list[OnlineLogistic]:
    """Of a token, of one by a head, of the next token, foreseen or not, and of a round's first."""
    priors = ACCEPTED, ACCEPTED_BY_HEAD, NEXT_FORESEEN if foresight else NEXT, FIRST
    return [OnlineLogistic(prior.mean, prior.variance, DRIFT) for prior in priors]


def kept(round_: Round) -> float:
    """How many tokens of a draft stay, in expectation over the verdict where that is known."""
    return round_.accepted if round_.chances is None else sum(round_.chances)


def foreseen(step: DraftStep) -> float:
    """Log-odds of the draft's own prediction for the next token."""
    return log_odds(read(step.next_accept_prob))


def features(step: DraftStep) -> tuple[float, float]:
    """Log-odds of the top probability, and sqrt(entropy)."""
    entropy, top = step.entropy, step.top_prob
    if entropy is None or top is None:
        entropy, top = read(entropy), read(top)
    return log_odds(top), sqrt(entropy) if entropy > 0 else 0.0 * entropy
