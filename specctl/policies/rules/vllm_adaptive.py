"""The rule by which vLLM chooses how much of a draft is verified, by an acceptance that it learns while serving."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from math import exp, log
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep, Round

FIRST_SLOPE, FIRST_BIAS = 0.5, -0.2
"""The estimate before anything was learned."""
REFIT = 100
"""Rounds between two fits."""
DAMPING, RIDGE = 50.0, 1e-3
"""Verdicts after which a fit moves a coefficient by half of a Newton step, and what is added to its diagonal."""
LARGEST = 40.0
"""The largest log-odds, with either sign."""


@dataclass(slots=True)
class AcceptanceEstimate:
    """P(token k is accepted, if all before it are) = sigma(w f_k + b_k), f_k the log-odds of the top probability there.

    One slope w for all positions and a bias b_k for each, fitted to the verdicts of every `REFIT` rounds by one damped
    Newton step on their log-likelihood, after which these are forgotten: as vLLM 0.33.0 does it
    (``OnlineAcceptanceEstimator`` in vllm/v1/worker/gpu/spec_decode/acceptance_estimator.py).

    Args:
        positions: the longest draft.
    """

    positions: InitVar[int]
    slope: float = field(init=False, default=FIRST_SLOPE)
    biases: list[float] = field(init=False)
    _sums: list[list[float]] = field(init=False)
    _rounds: int = field(init=False, default=0)

    def __post_init__(self, positions: int) -> None:
        self.biases = [FIRST_BIAS] * positions
        self._forget()

    def _forget(self) -> None:
        # By position: sums of v f f, v f, v, r f and r, v = p (1 - p) and r = verdict - p; and the number of verdicts.
        self._sums = [[0.0] * 6 for _ in self.biases]

    def at(self, position: int, top_prob: float) -> float:
        """The probability that the token at a position, counted from 0, is accepted if all before it are."""
        score = self.slope * _feature(top_prob) + self.biases[position]
        return 1 / (1 + exp(-score)) if score > -LARGEST else exp(score)

    def learn(self, top_probs: Sequence[float], accepted: int) -> None:
        """Take down a round.

        Args:
            top_probs: of the tokens that were verified.
            accepted: how many of them were.
        """
        for position, top_prob in enumerate(top_probs[: accepted + 1]):
            estimate, feature = self.at(position, top_prob), _feature(top_prob)
            weight, surprise = estimate * (1 - estimate), (position < accepted) - estimate
            new = weight * feature * feature, weight * feature, weight, surprise * feature, surprise, 1
            self._sums[position] = [old + more for old, more in zip(self._sums[position], new, strict=True)]
        self._rounds += 1
        if self._rounds == REFIT:
            self._refit()
            self._rounds = 0
            self._forget()

    def _refit(self) -> None:
        """Solve the normal equations, of which the slope has a row and each bias one that only the slope couples."""
        curvature, gradient, verdicts = RIDGE, 0.0, 0.0
        for own, coupling, single, of_slope, of_bias, count in self._sums:
            curvature += own - coupling * coupling / (single + RIDGE)
            gradient += of_slope - coupling * of_bias / (single + RIDGE)
            verdicts += count
        step = gradient / curvature * verdicts / (verdicts + DAMPING) if curvature else 0.0
        if self.slope + step < 0:
            step = 0.0
        self.slope += step
        for position, (_, coupling, single, _, of_bias, count) in enumerate(self._sums):
            self.biases[position] += (of_bias - coupling * step) / (single + RIDGE) * count / (count + DAMPING)


def _feature(top_prob: float) -> float:
    if top_prob >= 1:
        return LARGEST
    return max(-LARGEST, min(LARGEST, log(top_prob / (1 - top_prob)))) if top_prob > 0 else -LARGEST


@dataclass(slots=True, kw_only=True)
class VllmAdaptive(Rule):
    """Verify the k first tokens of a draft for which (1 + S_1 + ... + S_k) / (D + V(k)) is highest: vLLM's adaptive
    verification (``enable_adaptive_verification``, 0.33.0), for one text.

    S_k is the product of what an `AcceptanceEstimate` says of the first k tokens, D the time of a whole draft of
    ``max_draft`` tokens and V(k) that of a target pass over k + 1 tokens. S_k falls with k, and V is a line here, so
    the first token that does not raise the ratio ends what is verified, and here the draft too. vLLM does not verify
    that token, as with ``keep_trigger = false``; it drafts ``max_draft`` tokens all the same, and chooses k by what it
    estimated of the draft before, which `calibrate --export vllm` replays.

    ``cost_ratio`` is the time of a draft step and ``token_ratio`` that of each further token of a target pass, both
    divided by that of a pass over one token. vLLM measures them when it starts; here they are settings.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"top_prob"})
    max_draft: Annotated[int, Ge(1)] = 8
    cost_ratio: Annotated[float, Gt(0)] = 0.125
    token_ratio: Annotated[float, Ge(0)] = 0.02
    keep_trigger: bool = True
    carry_over: bool = True
    _estimate: AcceptanceEstimate = field(init=False, repr=False)
    _survival: float = field(init=False, repr=False, compare=False, default=1.0)
    _emitted: float = field(init=False, repr=False, compare=False, default=1.0)

    def __post_init__(self) -> None:
        self._estimate = AcceptanceEstimate(self.max_draft)

    def reset(self) -> None:
        if not self.carry_over:
            self._estimate = AcceptanceEstimate(self.max_draft)

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        if step.index == 1:
            self._survival = self._emitted = 1.0
        self._survival *= self._estimate.at(step.index - 1, read(step.top_prob))
        time = 1 + self.cost_ratio * self.max_draft + self.token_ratio * (step.index - 1)
        stops = self._survival * time <= self._emitted * self.token_ratio
        self._emitted += self._survival
        return stops

    def observe(self, round_: Round) -> None:
        self._estimate.learn([read(step.top_prob) for step in round_.steps], round_.accepted)
