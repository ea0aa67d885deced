"""What agreement with a lookup says about acceptance, believed only while that predicts better."""

from dataclasses import dataclass, field
from math import log

from specctl.policies.acceptance_priors import AGREEING, DRIFT
from specctl.policies.base import read
from specctl.policies.logistic import FLAT, OnlineLogistic, log_odds
from specctl.records import DraftStep

MEMORY = 0.99
"""Factor on the lead so far with each verified token that has a match."""
MARGIN = 2.0
"""Nats by which its predictions must have been better: a chance lead seldom is as large, and a real one soon is."""


@dataclass(slots=True)
class AgreementCurve:
    """Corrects an acceptance probability by `DraftStep.agreement`, while corrected ones have predicted verdicts better.

    A logistic curve reads the log-odds of the probability and the agreement. It learns from every verified token that
    has a match. Each time the log losses of the probability and of what the curve makes of it, both from before the
    verdict, are compared; their difference is added up in a sum that fades, the lead. While that is not above `MARGIN`
    nothing is corrected. A token without a match is never corrected, and teaches nothing.
    """

    _curve: OnlineLogistic = field(default_factory=lambda: OnlineLogistic(AGREEING.mean, AGREEING.variance, DRIFT))
    _lead: float = 0.0

    def corrected(self, probability: float, step: DraftStep) -> float:
        """The probability that a token is accepted, given what is expected without looking at its agreement."""
        agreement = read(step.agreement)
        if not agreement or self._lead <= MARGIN:
            return probability
        return self._curve.predict(log_odds(probability), agreement)

    def learn(self, outcome: float, probability: float, step: DraftStep) -> None:
        """Add the outcome of a token: 0 or 1, or the probability of 1; the others as in `corrected`."""
        if not (agreement := read(step.agreement)):
            return
        odds = log_odds(probability)
        better = _loss(outcome, probability) - _loss(outcome, self._curve.predict(odds, agreement))
        self._lead = MEMORY * self._lead + better
        self._curve.learn(outcome, odds, agreement)


def _loss(outcome: float, probability: float) -> float:
    """Log loss in nats."""
    probability = min(max(probability, FLAT), 1 - FLAT)
    return -(outcome * log(probability) + (1 - outcome) * log(1 - probability))
