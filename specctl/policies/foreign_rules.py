"""Stopping rules of other engines: SGLang, onnxruntime-genai, exllamav3 and vLLM."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from math import exp, floor, log
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep, Round

SHARE = 0.2  # Weight of the newest round in the mean
FIRST, EVERY = 10, 5  # Rounds before the first decision, and between two decisions
DOWN = -0.25  # Offset of the mean's bound for a shorter length


@dataclass(slots=True, kw_only=True)
class SteppedLength(Rule):
    """SGLang's ``--speculative-adaptive`` (sglang/srt/speculative/adaptive_spec_params.py, 0.5.23), for one text.

    The mean number of accepted tokens decides between two neighbouring ``lengths``. Above the shorter length minus 0.5
    the longer one is taken; at or below that bound minus 0.25 the shorter one. The mean starts at the first length
    minus 1.
    """

    lengths: tuple[int, ...] = (1, 3, 5, 7)
    first: int = 3
    _at: int = field(init=False, default=0)
    _mean: float = field(init=False, default=0.0)
    _rounds: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._at, self._mean = self.lengths.index(self.first), self.first - 1.0

    def draft_limit(self) -> int:
        return self.lengths[self._at]

    def observe(self, round_: Round) -> None:
        self._mean += SHARE * (round_.accepted - self._mean)
        self._rounds += 1
        if self._rounds > FIRST and not (self._rounds - FIRST) % EVERY:
            self._decide()

    def _decide(self) -> None:
        lengths, start = self.lengths, self._at
        while self._at and self._mean <= lengths[self._at - 1] - 0.5 + DOWN:
            self._at -= 1
        if self._at == start:
            while self._at < len(lengths) - 1 and self._mean > lengths[self._at] - 0.5:
                self._at += 1


LONGEST = 16
MEMORY = 0.75  # Factor on the mean of a length's earlier rounds when one ends
HIGH, LOW = 0.75, 0.5  # Acceptance from which a longer draft is tried, and below which a shorter one is
AS_FAST, FAR_SLOWER = 0.97, 0.8
"""The share of the earlier length's speed that a tried length must reach to stay, and below which it is dropped at
once.
"""
TRIED = 2  # Rounds of a tried length before a decision
AFTER_SUCCESS, AFTER_FAILURE = 1, 6  # Rounds until the next try
IN_VAIN = 3  # Rounds in a row without an accepted token after which ``cooldown`` drafts nothing once


@dataclass(slots=True)
class _Means:
    """Fading means over the rounds of one length: emitted tokens, seconds, and acceptance."""

    rounds: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    acceptance: float = 0.0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def learn(self, tokens: float, seconds: float, acceptance: float) -> None:
        share = 1 - MEMORY if self.rounds else 1.0
        self.rounds += 1
        self.tokens += share * (tokens - self.tokens)
        self.seconds += share * (seconds - self.seconds)
        self.acceptance += share * (acceptance - self.acceptance)


@dataclass(slots=True, kw_only=True)
class ProbedLength(Rule):
    """onnxruntime-genai's ``min_adaptive_k`` and ``cooldown`` (src/speculative_decoding_strategy.h, a0c04eb).

    Drafts start with ``least`` tokens and have at most ``max_draft``. Acceptance is accepted over judged tokens; tokens
    after a rejection do not count. Where it is high, one token more is tried for two rounds; where it is low, one less.
    The new length stays if it is as fast. Times are those of the proposing and verifying passes; a round's first draft
    token already exists.
    """

    least: int = 2
    max_draft: int = LONGEST
    cooldown: bool = False
    _length: int = field(init=False, default=0)
    _known: dict[int, _Means] = field(init=False, default_factory=dict)
    _before: int | None = field(init=False, default=None)  # the previous length, while another one is tried
    _rounds: int = field(init=False, default=0)  # rounds since the last decision
    _waits: int = field(init=False, default=0)
    _in_vain: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._length, self._known, self._before = self.least, {}, None
        self._rounds = self._waits = self._in_vain = 0

    def draft_limit(self) -> int:
        return 0 if self._in_vain == IN_VAIN else self._length

    def observe(self, round_: Round) -> None:
        if not round_.drafted:
            self._in_vain = 0
            return
        if self.cooldown:
            vain = not round_.accepted and round_.drafted == self.least
            self._in_vain = self._in_vain + 1 if vain else 0
        if round_.drafted == self._length:  # a shorter draft was cut by the end of the text
            judged = min(round_.accepted + 1, round_.drafted)
            proposing = round_.draft_seconds * (1 - 1 / round_.drafted)
            known = self._known.setdefault(self._length, _Means())
            known.learn(len(round_.emitted), proposing + round_.verify_seconds, round_.accepted / judged)
            self._rounds += 1
            self._judge(known) if self._before is not None else self._try(known)

    def _judge(self, known: _Means) -> None:
        """Whether the tried length stays."""
        assert self._before is not None
        earlier = self._known[self._before].speed
        if known.speed < FAR_SLOWER * earlier:
            self._settle(stays=False)
        elif self._rounds == TRIED:
            longer = self._length > self._before
            self._settle(known.speed >= AS_FAST * earlier and not (longer and known.acceptance < HIGH))

    def _settle(self, stays: bool) -> None:
        assert self._before is not None
        self._length = self._length if stays else self._before
        self._waits = AFTER_SUCCESS if stays else AFTER_FAILURE
        self._before, self._rounds = None, 0

    def _try(self, known: _Means) -> None:
        """Try another length if it is time."""
        if self._waits:
            self._waits -= 1
        elif known.rounds < TRIED:
            return
        elif known.acceptance < LOW and self._length > self.least:
            self._before, self._length, self._rounds = self._length, self._length - 1, 0
        elif known.acceptance >= HIGH and self._length < self.max_draft and self._rounds >= TRIED:
            self._before, self._length, self._rounds = self._length, self._length + 1, 0


VERDICT_MEMORY = 0.995  # Factor on the weight of earlier verdicts when a round ends
TRUSTED, ENOUGH = 64.0, 8.0  # Weights of all verdicts, and of one bin's verdicts, from which they are trusted


@dataclass(slots=True, kw_only=True)
class CalibratedConfidence(Rule):
    """exllamav3's ``dynamic_draft_tokens`` (generator/draft_confidence.py and generator.py, 1.6.5), for a draft model.

    The draft's largest logit, rounded down, is a token's bin. A bin's estimate is the share of its tokens that were
    accepted. A token in a bin with too few verdicts gets the estimate of the nearest known bin below, or of the lowest
    one. A draft stops after the token at which the product of the estimates falls below ``confidence``. The signal is
    the largest logit instead of the top probability.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"top_prob"})
    confidence: float = 0.4
    max_draft: int = 4
    # By bin, the weights of all and of accepted tokens.
    _bins: dict[int, list[float]] = field(init=False, default_factory=dict)
    _total: float = field(init=False, default=0.0)
    _reached: float = field(init=False, compare=False, default=1.0)

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        before = 1.0 if step.index == 1 else self._reached
        self._reached = before * self.estimate(read(step.top_prob))
        return self._reached < self.confidence

    def estimate(self, logit: float) -> float:
        """The share of accepted tokens among those with about this largest logit; 1 while little is known."""
        known = sorted(one for one, (weight, _) in self._bins.items() if weight >= ENOUGH)
        if self._total < TRUSTED or not known:
            return 1.0
        weight, accepted = self._bins[max((one for one in known if one <= floor(logit)), default=known[0])]
        return accepted / weight

    def observe(self, round_: Round) -> None:
        if not round_.steps:
            return
        for position, step in enumerate(round_.steps[: round_.accepted + 1]):
            sums = self._bins.setdefault(floor(read(step.top_prob)), [0.0, 0.0])
            sums[0] += 1
            sums[1] += position < round_.accepted
            self._total += 1
        for sums in self._bins.values():
            sums[:] = [VERDICT_MEMORY * one for one in sums]
        self._total *= VERDICT_MEMORY


FIRST_SLOPE, FIRST_BIAS = 0.5, -0.2  # The estimate's parameters before the first fit
REFIT = 100  # Rounds between two fits
DAMPING, RIDGE = 50.0, 1e-3
"""Verdicts after which a fit moves a coefficient by half of a Newton step, and what is added to its diagonal."""
LARGEST_ODDS = 40.0  # Bound on the absolute log-odds


@dataclass(slots=True)
class AcceptanceEstimate:
    """P(token k is accepted, if all before it are) = sigma(w f_k + b_k), f_k the log-odds of the top probability there.

    One slope w for all positions and a bias b_k for each. Every `REFIT` rounds they are fitted to the verdicts by one
    damped Newton step on the log-likelihood, and the verdicts are forgotten. vLLM 0.33.0 does the same
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
        return 1 / (1 + exp(-score)) if score > -LARGEST_ODDS else exp(score)

    def learn(self, top_probs: Sequence[float], accepted: int) -> None:
        """Record a round.

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
        """Solve the normal equations: a row for the slope, and one for each bias, coupled only to the slope."""
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
        return LARGEST_ODDS
    return max(-LARGEST_ODDS, min(LARGEST_ODDS, log(top_prob / (1 - top_prob)))) if top_prob > 0 else -LARGEST_ODDS


@dataclass(slots=True, kw_only=True)
class VllmAdaptive(Rule):
    """vLLM's adaptive verification (``enable_adaptive_verification``, 0.33.0), for one text.

    Verifies the first k tokens of a draft, with the k that maximises (1 + S_1 + ... + S_k) / (D + V(k)).

    S_k is the product of an `AcceptanceEstimate`'s probabilities of the first k tokens, D the time of a whole draft of
    ``max_draft`` tokens and V(k) the time of a target pass over k + 1 tokens. S_k falls with k, and V is a line here.
    So the first token that does not raise the ratio ends the verified part, and here the draft too. vLLM does not
    verify that token, as with ``keep_trigger = false``. It always drafts ``max_draft`` tokens, and chooses k by its
    estimates for the previous draft; `calibrate --export vllm` replays that.

    ``cost_ratio`` is the time of a draft step, and ``token_ratio`` that of each further token of a target pass, both
    divided by the time of a pass over one token. vLLM measures them at startup; here they are settings.
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
