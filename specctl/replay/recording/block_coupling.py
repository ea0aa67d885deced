"""Draft tokens of a text that is already written, verified as a block: one by one, though a block is judged whole.

Block verification keeps i tokens or more with probability w_i, given the first i (`rows.host_verdict`). What
has been drafted and kept is the text, so given the next token x of the text, the draft's next token

- is x and kept too with probability min(w_i p(x), q(x)) / (w_i p(x)), and w_(i+1) = min(w_i p(x) / q(x), 1);
- or is not kept. It is then independent of x, as is all that the draft draws after it. Beyond i tokens none is kept, so
  a token y counts by q(y) (1 - w_(i+1)(y)) = max(q(y) - w_i p(y), 0): y has this distribution, normalised. p is the
  verifier's probability behind the draft's own tokens, for w goes on along them; so has each further token.

Neither line asks how long the draft is. For K tokens that are not kept beyond i, the paper's coins give the probability
(1 - h_(i+1)) ... (1 - h_(K-1)) (1 - w_K), and its mean over the last token is the same for K - 1 tokens: the mean of
w_K over q is w_(K-1) - Z_(K-1), so that of 1 - w_K, times 1 - h_(K-1) = (1 - w_(K-1)) / (Z_(K-1) + 1 - w_(K-1)), is
1 - w_(K-1). The products telescope into the distributions above. So one recorded draft serves every policy: cut where
the policy stops, by whatever it has seen till then, it is the draft of a live round with what is kept of it.

Each round begins with w = 1, so a trace holds what is kept of a round from each position. Such rounds may share coins
and what follows a token that is not kept: the rounds of one replay cover disjoint positions, and what they share
belongs to one position.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from specctl.decoding.rows.host_laws import TINY
from specctl.decoding.rows.rows_of import verify
from specctl.replay.recording.coupling import draw_draft_tokens


class InBlocks(NamedTuple):
    """The next draft token of T rounds.

    Attributes:
        tokens, kept: of each round the token, and whether it is kept, if those before it are.
        weights: w after the token.
        passing: h before the token: the probability that the tokens before it pass, if the draft goes on.
    """

    tokens: list[int]
    kept: list[bool]
    weights: list[float]
    passing: list[float]


def draw_in_blocks(
    verifier_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    verifier_probs: torch.Tensor,
    weights: Sequence[float],
    generator: torch.Generator | None,
    coins: torch.Tensor,
) -> InBlocks:
    """Draw the next draft token of T rounds that keep all their tokens so far, given the verifier's next tokens.

    Args:
        verifier_tokens: x, ``(T,)`` int64.
        draft_probs, verifier_probs: q and p, ``(T, V)`` float32, after temperature and truncation.
        weights: w of each round so far, in [0, 1].
        generator: on the device of the arrays.
        coins: ``(T,)`` float32, uniform in [0, 1), which decide what is kept.
    """
    before = torch.tensor(weights, dtype=torch.float32, device=verifier_probs.device)  # (T,)
    above = verifier_probs * before[:, None]  # (T, V)
    surplus = (above - draft_probs).clamp_min(0).sum(-1)  # (T,)
    # With w p in the place of p it is the step of single tokens, and min(1, w p / q) is the next w.
    tokens, kept, after = draw_draft_tokens(verifier_tokens, draft_probs, above, generator, coins)
    return InBlocks(tokens.tolist(), kept.tolist(), after.tolist(), _passing(weights, surplus.tolist()))


class Unkept(NamedTuple):
    """Draft tokens behind one that is not kept, as columns.

    Attributes:
        tokens: at least one.
        weights, passing: of each token, see `InBlocks`.
    """

    tokens: list[int]
    weights: list[float]
    passing: list[float]


def draw_unkept(
    drafted: torch.Tensor,
    draft_probs: torch.Tensor,
    verifier_probs: torch.Tensor,
    weight: float,
    generator: torch.Generator | None,
) -> Unkept:
    """Draw the tokens behind one that is not kept, from max(q - w p, 0), with few passes of the verifier.

    q alone says how the draft would go on, so it goes on first, and speculative sampling makes the draft's tokens those
    of the distribution that is wanted: the longest beginning that passes, and one token more if it is not all of them.

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
    # What comes after all of them is not asked for, so any distribution will do.
    verdict = verify(drafted, draft_probs, torch.cat([wanted, torch.eye(1, wanted.shape[1]).to(wanted)]), generator)
    count = verdict.accepted
    if count == len(drafted):
        return Unkept(drafted.tolist(), weights[1:], passing)
    assert verdict.extra is not None, "a row follows the last token"
    ratio = float(verifier_probs[count, verdict.extra]) / max(float(draft_probs[count, verdict.extra]), TINY)
    return Unkept(
        [*drafted[:count].tolist(), verdict.extra],
        [*weights[1 : count + 1], min(weights[count] * ratio, 1.0)],
        passing[: count + 1],
    )


def _of(tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:  # (T,), (T, V) -> (T,)
    return probs.gather(1, tokens[:, None])[:, 0]


def _passing(weights: Sequence[float], surplus: Sequence[float]) -> list[float]:
    """h = Z / (Z + 1 - w); 1 where w is."""
    return [z / (z + 1 - w) if w < 1 else 1.0 for w, z in zip(weights, surplus, strict=True)]
