"""What is taken to be known of acceptance before anything of a pair was seen: priors of logistic estimators."""

from typing import NamedTuple

from specctl.policies.logistic import OnlineLogistic


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
DRIFT = 5e-4
"""Drift of the estimators' weights with each verified token, see `OnlineLogistic`."""


def estimator(prior: Prior) -> OnlineLogistic:
    return OnlineLogistic(prior.mean, prior.variance, DRIFT)
