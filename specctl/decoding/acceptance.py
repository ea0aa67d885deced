"""How many tokens of a draft are kept: decided token by token, or for the draft as a block.

Each rule exists twice: by numpy where the numbers are in the processor's own memory, and by tensor operations that
never wait for a device. Below, p and q are the verifier's and the draft's probabilities.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from specctl.decoding.block_chances import kept_in_turn
from specctl.decoding.host import TINY, Floats


class Kept(NamedTuple):
    """What a rule decides on K draft tokens.

    Attributes:
        accepted: n, how many are kept, from the first.
        weight: w, such that after n < K tokens the verifier's own token is drawn from max(w p - q, 0), normalised.
        chances: of each draft token the probability of being kept, given all K tokens and that those before are kept.
    """

    accepted: int
    weight: float
    chances: Sequence[float]


class KeptOnDevice(NamedTuple):
    """`Kept` where nothing has been read yet: int64 ``(1,)``, float32 ``(1,)``, floats ``(K,)``."""

    accepted: torch.Tensor
    weight: torch.Tensor
    chances: torch.Tensor


def by_token(target_of: Floats, draft_of: Floats, coins: Sequence[float]) -> Kept:
    """Keep token i with probability min(1, p_i / q_i) while all before it are kept (arXiv 2211.17192, Alg. 1).

    Args:
        target_of, draft_of: ``(K,)``, p and q of each draft token.
        coins: K numbers, uniform in [0, 1).
    """
    kept = (target_of >= draft_of) | (np.array(coins) * draft_of < target_of)
    accepted = len(kept) if kept.all() else int(kept.argmin())
    chances = np.minimum(target_of / np.maximum(draft_of, np.float32(TINY)), 1)
    return Kept(accepted, 1.0, chances.tolist())


def by_block(
    target_of: Floats, draft_of: Floats, draft_probs: Floats, target_probs: Floats, coins: Sequence[float]
) -> Kept:
    """Keep the longest beginning of the draft that passes (Sun et al., arXiv 2403.10444, Alg. 2).

    Whether one of the beginnings passes does not depend on the others, so later ones are looked at even if an early one
    fails. Given its first i tokens alone, i or more are then kept with probability w_i, see `passing`: the most that
    leaves the verifier's distribution as it is.

    Args:
        target_of, draft_of, draft_probs, target_probs: as in `passing`.
        coins: K numbers, uniform in [0, 1).
    """
    weights, chances = passing(target_of, draft_of, draft_probs, target_probs)
    tossed = enumerate(zip(coins, chances, strict=True), start=1)
    accepted = max((number for number, (coin, chance) in tossed if coin < chance), default=0)
    return Kept(accepted, weights[accepted], kept_in_turn(chances))


def passing(
    target_of: Floats, draft_of: Floats, draft_probs: Floats, target_probs: Floats
) -> tuple[list[float], list[float]]:  # K + 1, K
    """Of block verification, the weights w_0 to w_K and the probabilities h_1 to h_K that a beginning passes.

    w_0 = 1 and w_i = min(w_{i-1} p_i / q_i, 1). The first i < K tokens pass with h_i = Z_i / (Z_i + 1 - w_i), Z_i the
    sum over x of max(w_i p(x) - q(x), 0) after these tokens, and the whole draft with h_K = w_K.

    Args:
        target_of, draft_of: ``(K,)``, p and q of each draft token.
        draft_probs: ``(K, V)``, q at each draft token.
        target_probs: ``(K, V)`` or more, p at each draft token; rows after the last are not read.
    """
    ratios = (target_of.astype(np.float64) / np.maximum(draft_of, TINY)).tolist()
    weights = list(accumulate(ratios, lambda weight, ratio: min(weight * ratio, 1.0), initial=1.0))
    chances = weights[1:]
    for place, weight in enumerate(chances[:-1], start=1):
        # At 1 it passes: also where p = q and Z / Z has no value, for then a longer beginning passes for certain.
        if 0 < weight < 1:
            above = target_probs[place] * np.float32(weight)  # (V,)
            above -= draft_probs[place]
            surplus = float(np.maximum(above, 0, out=above).sum())
            chances[place - 1] = surplus / (surplus + (1 - weight))
    return weights, chances


def by_token_on_device(target_of: torch.Tensor, draft_of: torch.Tensor, coins: torch.Tensor) -> KeptOnDevice:
    """`by_token` by tensor operations alone."""
    kept = (target_of >= draft_of) | (coins * draft_of < target_of)
    chances = (target_of / draft_of.clamp_min(TINY)).clamp_max(1)
    return KeptOnDevice(kept.int().cumprod(0).sum(0, keepdim=True), torch.ones_like(target_of[:1]), chances)


def by_block_on_device(
    target_of: torch.Tensor,
    draft_of: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
) -> KeptOnDevice:
    """`by_block` by tensor operations alone: log w_i is a walk held below 0, S_i - max(S_0, ..., S_i)."""
    logs = (target_of.double() / draft_of.double().clamp_min(TINY)).log()
    walk = torch.cat([logs.new_zeros(1), logs.cumsum(0)])  # (K + 1,); -inf from a token on that cannot be kept
    weights = (walk - walk.cummax(0).values).exp()
    inner = weights[1:-1]  # (K - 1,)
    above = (inner.float()[:, None] * target_probs[1 : len(coins)] - draft_probs[1:]).clamp_min(0)  # (K - 1, V)
    surplus = above.sum(-1)
    chances = torch.where(inner < 1, surplus / (surplus + (1 - inner)).clamp_min(TINY), 1.0)
    chances = torch.cat([chances, weights[-1:]])  # (K,)
    numbers = torch.arange(1, len(coins) + 1, device=coins.device)
    accepted = ((coins < chances) * numbers).amax(0, keepdim=True)
    at_least = 1 - (1 - chances).flip(0).cumprod(0).flip(0)  # (K,)
    each = at_least / torch.cat([at_least.new_ones(1), at_least[:-1]]).clamp_min(TINY)
    return KeptOnDevice(accepted, weights[accepted].float(), each)
