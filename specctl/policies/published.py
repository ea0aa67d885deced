"""The stopping policies of the papers, and their baselines."""

from dataclasses import dataclass, field
from math import sqrt
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from specctl.policies.base import Rule, Signal, read
from specctl.records import DraftStep, Round


@dataclass(slots=True)
class Constant(Rule):
    """Draft ``draft_length`` tokens every round (K of Leviathan et al. 2023, arXiv 2211.17192)."""

    draft_length: Annotated[int, Ge(1)] = 5

    def draft_limit(self) -> int:
        return self.draft_length


@dataclass(slots=True)
class NoDraft(Rule):
    """Target-only autoregressive decoding through the same loop: the baseline of every speedup."""

    drafts = False

    def draft_limit(self) -> int:
        return 0


@dataclass(slots=True)
class Svip(Rule):
    """Stop when sqrt(c H) > h, H the entropy of the draft (Zhang et al. 2024, arXiv 2411.18462, eq. 6 and Alg. 1).

    1 - sqrt(c H) estimates a lower bound of the acceptance probability. The published code uses c = 0.15; with c = 1
    the paper's thresholds stop almost at once.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"entropy"})
    threshold: Annotated[float, Ge(0)] = 0.3
    c: Annotated[float, Gt(0)] = 0.15
    max_draft: Annotated[int, Ge(1)] = 40
    keep_trigger: bool = True

    @property
    def current_threshold(self) -> float:
        return self.threshold

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        return sqrt(self.c * read(step.entropy)) > self.threshold


Share = Annotated[float, Ge(0), Le(1)]


@dataclass(slots=True, kw_only=True)
class AdaptiveThreshold(Rule):
    """A lower bound lambda on confidence that moves with the acceptance rate (Agrawal et al. 2024, arXiv 2410.18351).

    After a round with n_acc of n_drafted accepted: AR = beta1 AR + (1 - beta1) n_acc / n_drafted; the step
    lambda' = lambda + eps if AR < alpha, else lambda - eps unless n_acc = max_draft; lambda = beta2 lambda +
    (1 - beta2) lambda'. AR starts at the rate of the first round. Rounds without draft tokens change nothing.
    """

    threshold: Share = 0.4
    alpha: Share = 0.9
    eps: Annotated[float, Ge(0)] = 0.01
    beta1: Share = 0.5
    beta2: Share = 0.9
    max_draft: Annotated[int, Ge(1)] = 7
    keep_trigger: bool = True
    carry_over: bool = False
    _lambda: float = field(init=False, repr=False, default=0.0)
    _acceptance: float | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._lambda, self._acceptance = self.threshold, None

    @property
    def current_threshold(self) -> float:
        return self._lambda

    def reset(self) -> None:
        if not self.carry_over:
            self._restart()

    def draft_limit(self) -> int:
        return self.max_draft

    def observe(self, round_: Round) -> None:
        if not round_.drafted:
            return
        rate = round_.accepted / round_.drafted
        previous = rate if self._acceptance is None else self._acceptance
        self._acceptance = self.beta1 * previous + (1 - self.beta1) * rate
        moved = self._lambda
        if self._acceptance < self.alpha:
            moved += self.eps
        elif round_.accepted != self.max_draft:
            moved -= self.eps
        self._lambda = self.beta2 * self._lambda + (1 - self.beta2) * moved


@dataclass(slots=True, kw_only=True)
class AdaEdl(AdaptiveThreshold):
    """Stop when 1 - sqrt(gamma H) < lambda, H the draft's entropy (arXiv 2410.18351, eq. 6 and Alg. 1)."""

    reads: ClassVar[frozenset[Signal]] = frozenset({"entropy"})
    gamma: Annotated[float, Gt(0)] = 0.2

    def should_stop(self, step: DraftStep) -> bool:
        return 1 - sqrt(self.gamma * read(step.entropy)) < self._lambda


@dataclass(slots=True, kw_only=True)
class MaxConfidence(AdaptiveThreshold):
    """Stop when the draft's largest probability is below lambda; ``adapt = false`` keeps lambda at its start value."""

    reads: ClassVar[frozenset[Signal]] = frozenset({"top_prob"})
    adapt: bool = True

    def should_stop(self, step: DraftStep) -> bool:
        return read(step.top_prob) < self._lambda

    def observe(self, round_: Round) -> None:
        if self.adapt:
            AdaptiveThreshold.observe(self, round_)


@dataclass(slots=True)
class SelfVerify(Rule):
    """Stop when H > tau, tau the mean entropy of the tokens rejected so far in this sequence (Syu and Lee 2025).

    Before the first rejection tau is 0, so a round drafts one token. Only a round's first rejected token counts, since
    those after it are discarded with it. In block verification it may be a token that would have been accepted alone.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"entropy"})
    max_draft: Annotated[int, Ge(1)] = 10
    carry_over: bool = False
    _entropy_sum: float = field(init=False, repr=False, default=0.0)
    _rejections: int = field(init=False, repr=False, default=0)

    @property
    def current_threshold(self) -> float:
        return self._entropy_sum / self._rejections if self._rejections else 0.0

    def reset(self) -> None:
        if not self.carry_over:
            self._entropy_sum, self._rejections = 0.0, 0

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        return read(step.entropy) > self.current_threshold

    def observe(self, round_: Round) -> None:
        rejected = round_.rejected
        if rejected is not None:
            self._entropy_sum += read(rejected.entropy)
            self._rejections += 1


@dataclass(slots=True)
class SpecDecPlusPlus(Rule):
    """Stop when 1 - prod_i P_i > h, P_i a head's predictions (Huang et al. 2024, arXiv 2405.19715, Alg. 1).

    The product is over the tokens drafted before the newest one, and restarts each round. The head predicts a token's
    acceptance from the hidden state after the draft has read this token, so the newest token is not in the product, and
    a round's first step has P = 1. No round stops before ``min_draft`` tokens. The released code uses min_draft = 2 and
    max_draft = 20; the paper uses h = 0.7.

    Theorem 4.3 of the paper explains the threshold: drafting is a Markov decision process in which a discarded token
    costs c1 and a verification c2, and it is optimal to stop when

        P(some draft token is rejected) >= (c2 + D) / (c1 + c2 + D)

    A generated token costs t_draft + t_draft * discard rate + (t_target - t_draft) * verification rate, so c1 = t_draft
    and c2 = t_target - t_draft, with t_draft and t_target the times of one forward pass. D >= 0, in the same unit,
    depends on the process and is not known in advance; `implied_threshold` takes D = 0.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"accept_prob"})
    threshold: Annotated[float, Ge(0), Le(1)] = 0.7
    min_draft: Annotated[int, Ge(1)] = 2
    max_draft: Annotated[int, Ge(1)] = 20
    _all_accepted: float = field(init=False, repr=False, default=1.0)

    def __post_init__(self) -> None:
        if self.min_draft > self.max_draft:
            raise ValueError(f"min_draft = {self.min_draft} is more than max_draft = {self.max_draft}")

    @property
    def current_threshold(self) -> float:
        return self.threshold

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        if step.index == 1:
            self._all_accepted = 1.0
        self._all_accepted *= read(step.accept_prob)
        return step.index >= self.min_draft and 1 - self._all_accepted > self.threshold


def implied_threshold(draft: float, target: float) -> float:
    """The threshold of SpecDec++'s Theorem 4.3 with D = 0 (see `SpecDecPlusPlus`).

    For example 0.9 if the target is ten times as slow as the draft, and 0 (stop at once) if it is not slower.

    Args:
        draft: time of one forward pass of the draft.
        target: time of one forward pass of the target, in the same unit.
    """
    return max(0.0, target - draft) / target


@dataclass(slots=True)
class Disco(Rule):
    """Stop when C_i < threshold, C_i token i's predicted acceptance probability (Mamou et al. 2024, arXiv 2405.04304).

    C_i is the output of a network of two layers that reads the ten largest probabilities of the distribution that the
    token was drawn from, its entropy, and i. It reads neither the token nor its own earlier predictions, so each token
    is judged alone, while `SpecDecPlusPlus` multiplies the predictions. The paper tunes the threshold on the data of a
    task. At the default, rejection and acceptance are equally likely.
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"own_accept_prob"})
    threshold: Annotated[float, Ge(0), Le(1)] = 0.5
    max_draft: Annotated[int, Ge(1)] = 20

    @property
    def current_threshold(self) -> float:
        return self.threshold

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        return read(step.own_accept_prob) < self.threshold


@dataclass(slots=True)
class ConfidentPrefix(Rule):
    """Stop when prod_i c_i < threshold, c_i the draft head's acceptance probability of token i, given those before it.

    c_i depends on the tokens before token i and not on token i (Cheng and others 2026, arXiv 2607.05147, Eq. 7). So the
    product includes the next token, and the rule stops before that token is drawn. A round's first token is always
    drafted, and the product starts with c_2. It is the probability that all tokens from the second to the next are
    accepted if the first one is.

    The paper's survival probability of a prefix is this product (Alg. 1). Its released code compares each c_i alone
    with a threshold. That threshold is 0 by default, so whole blocks are verified. Here the default is 0.5, where one
    more token is as likely to be accepted as rejected. The paper sweeps thresholds from 0 to 0.8 (Fig. 5).
    """

    reads: ClassVar[frozenset[Signal]] = frozenset({"next_accept_prob"})
    threshold: Annotated[float, Ge(0), Le(1)] = 0.5
    max_draft: Annotated[int, Ge(1)] = 40
    _all_accepted: float = field(init=False, repr=False, default=1.0)

    @property
    def current_threshold(self) -> float:
        return self.threshold

    def draft_limit(self) -> int:
        return self.max_draft

    def should_stop(self, step: DraftStep) -> bool:
        if step.index == 1:
            self._all_accepted = 1.0
        self._all_accepted *= read(step.next_accept_prob)
        return self._all_accepted < self.threshold


@dataclass(slots=True)
class Heuristic(Rule):
    """Draft K tokens: K grows by 2 after a fully accepted round and shrinks by 1, to at least 1, after any other."""

    draft_length: Annotated[int, Ge(1)] = 5
    max_draft: Annotated[int, Ge(1)] = 40
    carry_over: bool = False
    _length: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        self._length = self.draft_length

    def reset(self) -> None:
        if not self.carry_over:
            self._length = self.draft_length

    def draft_limit(self) -> int:
        return min(self._length, self.max_draft)

    def observe(self, round_: Round) -> None:
        if not round_.drafted:
            return
        # Clamped here too: a length far above the cap would need many rejections before drafts get shorter.
        self._length = min(self._length + 2, self.max_draft) if round_.fully_accepted else max(1, self._length - 1)
