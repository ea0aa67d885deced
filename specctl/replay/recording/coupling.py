"""Draws draft tokens and verdicts for a text that is already written, in single and in block verification.

Block verification accepts i tokens or more with probability w_i, given the first i (`rows.host_verdict`). It judges a
block as a whole, but the tokens can be drawn one after another. The tokens accepted so far are the text's. So given the
next token x of the text, the draft's next token

- is x and accepted too, with probability min(w_i p(x), q(x)) / (w_i p(x)); then w_(i+1) = min(w_i p(x) / q(x), 1);
- or is rejected. It is then independent of x, as is all that the draft draws after it. None is accepted after i tokens,
  so a token y counts by q(y) (1 - w_(i+1)(y)) = max(q(y) - w_i p(y), 0): y has this distribution, normalised. Here p is
  the verifier's probability after the draft's own tokens, because w continues along them. The same holds for each
  further token.

Neither case depends on the draft length. For K tokens of which i are accepted, the paper's coins give the probability
(1 - h_(i+1)) ... (1 - h_(K-1)) (1 - w_K). Its mean over the last token is the same for K - 1 tokens: the mean of w_K
over q is w_(K-1) - Z_(K-1), so that of 1 - w_K, times 1 - h_(K-1) = (1 - w_(K-1)) / (Z_(K-1) + 1 - w_(K-1)), is
1 - w_(K-1). The products telescope into the distributions above. So one recorded draft serves every policy: cut where
the policy stops, it is the draft of a live round with the tokens that are accepted of it.

Each round begins with w = 1, so a trace holds the accepted tokens of a round from each position. Such rounds may share
coins and the tokens after a rejected one, because the rounds of one replay cover disjoint positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch

from specctl.decoding.draft_tokens import token_row
from specctl.decoding.draws import sibling
from specctl.decoding.logits.device import draw
from specctl.decoding.logits.judging import verify
from specctl.decoding.logits.logits import TINY
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor
from specctl.models.running.slot import Slot
from specctl.policies import DISTRIBUTION_SIGNALS


@dataclass(slots=True)
class TextReading:
    """Reads a finished text with a draft."""

    # target, draft: the verifier and the draft
    target: Slot
    draft: Slot
    predictors: Mapping[str, TrainedPredictor]  # the draft's trained heads by name, its usual one first
    prompt: Sequence[int]  # at least one id
    text: Sequence[int]  # N ids that the target wrote, at least one
    limit: int  # the token limit under which they were written
    depth: int  # the longest draft to be replayed
    sampling: Sampling  # as the text was generated
    generator: torch.Generator  # on the target's device; draws draft tokens and verdicts when sampling
    eos: frozenset[int]  # ids that end a sequence


def draw_draft_tokens(
    verifier_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    verifier_probs: torch.Tensor,
    generator: torch.Generator | None,
    coins: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw draft tokens and their verdicts, given the tokens that the verifier wrote.

    Speculative sampling draws a draft token y from q, accepts it with probability min(1, p(y) / q(y)) and after a
    rejection draws the verifier's token x from max(p - q, 0). So, given x, it is an accepted draft token with
    probability min(p(x), q(x)) / p(x); and after a rejection y and x are independent, y having the distribution
    max(q - p, 0), normalised.

    Args:
        verifier_tokens: x, ``(T,)`` int64, drawn from ``verifier_probs``.
        draft_probs, verifier_probs: q and p, ``(T, V)`` float32, after temperature and truncation.
        generator: on the device of the arrays.
        coins: ``(T,)`` float32, uniform in [0, 1), which decide the verdicts; None to draw them here.

    Returns:
        Draft tokens y ``(T,)`` int64, whether each is accepted ``(T,)`` bool, and min(1, p(y) / q(y)) ``(T,)`` float32.
    """
    verifier_of = verifier_probs.gather(1, verifier_tokens[:, None])[:, 0]
    draft_of = draft_probs.gather(1, verifier_tokens[:, None])[:, 0]
    if coins is None:
        coins = torch.rand(len(verifier_tokens), generator=generator, device=verifier_tokens.device)
    surplus = (draft_probs - verifier_probs).clamp_min(0)  # (T, V)
    # Where q equals p up to rounding there is nothing to reject.
    verdicts = (coins * verifier_of < draft_of) | (surplus.sum(-1) <= 0)
    drafted = torch.where(verdicts, verifier_tokens, draw(surplus, generator))
    column = drafted[:, None]
    chances = verifier_probs.gather(1, column) / draft_probs.gather(1, column).clamp_min(TINY)  # (T, 1)
    return drafted, verdicts, chances[:, 0].clamp_max(1)


class InBlocks(NamedTuple):
    """The next draft token of T rounds."""

    tokens: list[int]  # of each round
    accepted: list[bool]  # whether the token is accepted, if those before it are
    weights: list[float]  # w after the token
    passing: list[float]  # h before the token: the probability that the tokens before it pass, if the draft continues


def draw_in_blocks(
    verifier_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    verifier_probs: torch.Tensor,
    weights: Sequence[float],
    generator: torch.Generator | None,
    coins: torch.Tensor,
) -> InBlocks:
    """Draw the next draft token of T rounds whose tokens were all accepted, given the verifier's next tokens.

    Args:
        verifier_tokens: x, ``(T,)`` int64.
        draft_probs, verifier_probs: q and p, ``(T, V)`` float32, after temperature and truncation.
        weights: w of each round so far, in [0, 1].
        generator: on the device of the arrays.
        coins: ``(T,)`` float32, uniform in [0, 1), which decide the verdicts.
    """
    before = torch.tensor(weights, dtype=torch.float32, device=verifier_probs.device)  # (T,)
    above = verifier_probs * before[:, None]  # (T, V)
    surplus = (above - draft_probs).clamp_min(0).sum(-1)  # (T,)
    # With w p in place of p it is the step of single tokens, and min(1, w p / q) is the next w.
    tokens, accepted, after = draw_draft_tokens(verifier_tokens, draft_probs, above, generator, coins)
    return InBlocks(tokens.tolist(), accepted.tolist(), after.tolist(), _passing(weights, surplus.tolist()))


class AfterRejected(NamedTuple):
    """Draft tokens after a rejected one, as columns."""

    tokens: list[int]  # at least one
    # weights, passing: of each token, see `InBlocks`
    weights: list[float]
    passing: list[float]


def draw_after_rejected(
    drafted: torch.Tensor,
    draft_probs: torch.Tensor,
    verifier_probs: torch.Tensor,
    weight: float,
    generator: torch.Generator | None,
) -> AfterRejected:
    """Draw the tokens after a rejected one, from max(q - w p, 0), with few passes of the verifier.

    The draft continues by q first. Speculative sampling then makes its tokens follow the wanted distribution: the
    longest prefix that passes, and one token more if that is not all of them.

    Args:
        drafted: ``(C,)`` int64, drawn from ``draft_probs``, at least one.
        draft_probs, verifier_probs: q and p at each of them, ``(C, V)`` float32.
        weight: w after the newest token.
        generator: on the device of the arrays.
    """
    ratios = _of(drafted, verifier_probs) / _of(drafted, draft_probs).clamp_min(TINY)  # (C,)
    weights = list(accumulate(ratios.tolist(), lambda w, ratio: min(w * ratio, 1.0), initial=weight))
    before = torch.tensor(weights[:-1], dtype=torch.float32, device=verifier_probs.device)  # (C,)
    above = verifier_probs * before[:, None]  # (C, V)
    passing = _passing(weights[:-1], (above - draft_probs).clamp_min(0).sum(-1).tolist())
    wanted = (draft_probs - above).clamp_min(0)  # (C, V)
    wanted /= wanted.sum(-1, keepdim=True).clamp_min(TINY)
    # The distribution after the last token is never used, so any will do.
    verdict = verify(drafted, draft_probs, torch.cat([wanted, torch.eye(1, wanted.shape[1]).to(wanted)]), generator)
    count = verdict.accepted
    if count == len(drafted):
        return AfterRejected(drafted.tolist(), weights[1:], passing)
    assert verdict.extra is not None, "a row follows the last token"
    ratio = float(verifier_probs[count, verdict.extra]) / max(float(draft_probs[count, verdict.extra]), TINY)
    return AfterRejected(
        [*drafted[:count].tolist(), verdict.extra],
        [*weights[1 : count + 1], min(weights[count] * ratio, 1.0)],
        passing[: count + 1],
    )


def _of(tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:  # (T,), (T, V) -> (T,)
    return probs.gather(1, tokens[:, None])[:, 0]


def _passing(weights: Sequence[float], surplus: Sequence[float]) -> list[float]:
    """h = Z / (Z + 1 - w); 1 where w is."""
    return [z / (z + 1 - w) if w < 1 else 1.0 for w, z in zip(weights, surplus, strict=True)]


HELD = 512  # Number of draft distributions held in memory while the draft continues alone


@dataclass(slots=True, eq=False)
class Tail:
    """The tokens of a block from the rejected one: final ones, then tokens that the verifier has not read yet."""

    position: int  # of the first token, in the text that it departs from
    room: int  # the most tokens
    eos: frozenset[int]  # ids that no token can follow
    tokens: list[int]  # the final ones, at least one
    values: list[list[float]]  # of each final token, `DISTRIBUTION_SIGNALS`, then each head's prediction
    # weights, passing: of each final token, see `InBlocks`
    weights: list[float]
    passing: list[float]
    drafted: list[int] = field(default_factory=list)  # the tokens after them, with which the draft alone continued
    drafted_values: list[list[float]] = field(default_factory=list)  # of each of ``drafted``
    logits: list[torch.Tensor] = field(default_factory=list)  # ``(V,)`` of each of ``drafted``

    @property
    def full(self) -> bool:
        """Whether no further token may follow."""
        newest = (self.drafted or self.tokens)[-1]
        return len(self.tokens) + len(self.drafted) >= self.room or newest in self.eos

    def draft(self, token: int, values: list[float], logits: torch.Tensor) -> None:
        """Add the next token of the draft."""
        self.drafted.append(token)
        self.drafted_values.append(values)
        self.logits.append(logits)

    @property
    def to_read(self) -> list[int]:
        """The ids that the verifier must read after the text to give a distribution for each drafted token."""
        return [*self.tokens, *self.drafted[:-1]]

    def settle(self, verifier_probs: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> None:
        """Decide which drafted tokens become final, and draw a replacement for the first that does not.

        Args:
            verifier_probs: ``(C, V)`` at each of the C drafted tokens.
            sampling: of both models.
            generator: draws.
        """
        device = verifier_probs.device
        logits = torch.stack(self.logits)  # (C, V)
        drafted = torch.tensor(self.drafted, device=device)  # (C,)
        draft_probs = sampling.probs(logits).to(device)
        found = draw_after_rejected(drafted, draft_probs, verifier_probs, self.weights[-1], sibling(generator, device))
        count = len(found.tokens)
        self.values += self.drafted_values[:count]
        if found.tokens[-1] != self.drafted[count - 1]:
            changed = token_row(Forward(logits[count - 1 : count]), found.tokens[-1])
            self.values[-1][: len(DISTRIBUTION_SIGNALS)] = changed
        self.tokens += found.tokens
        self.weights += found.weights
        self.passing += found.passing
        self.drafted, self.drafted_values, self.logits = [], [], []


class Detours:
    """Reads tokens that depart from a text, and returns to the text afterwards.

    Args:
        runner: its cache may hold a prefix of the text.
        text: all ids, those of the prompt too.
    """

    def __init__(self, runner: Slot, text: Sequence[int]) -> None:
        self._runner, self._text = runner, text
        self._shared: int | None = None  # number of cached tokens that belong to the text; None for all

    def after(self, length: int, tokens: Sequence[int], keep: int) -> torch.Tensor:
        """The logits ``(keep, V)`` after the last of some tokens that follow the first ``length`` of the text."""
        self._go_back(length)
        forward = self._runner.extend([*self._text[self._runner.length : length], *tokens], keep=keep)
        self._shared = length
        return forward.logits

    def come_back(self, length: int) -> None:
        """Reduce the cache to the first ``length`` tokens of the text after a detour."""
        if self._shared is None:
            return
        self._go_back(length)
        if missing := self._text[self._runner.length : length]:
            self._runner.extend(missing, keep=0)
        self._shared = None

    def _go_back(self, length: int) -> None:
        own = self._runner.length if self._shared is None else self._shared
        self._runner.rollback(min(own, length))
