"""How many tokens of a draft are kept, and the verifier's own token after them, by torch: exactness rests on this.

`host_verdict` has the same by numpy, with the rules' explanations. Below, p and q are the verifier's and the draft's
probabilities.
"""

from typing import NamedTuple

import torch

from specctl.decoding.rows.device_laws import pick
from specctl.decoding.rows.draft_verdict import Verdict, require_numbers, verdict_of
from specctl.decoding.rows.host_laws import TINY
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.profile.schema import Verification
from specctl.records import ExtraToken


class Kept(NamedTuple):
    """`host_verdict.Kept` where nothing has been read yet: int64 ``(1,)``, float32 ``(1,)``, floats ``(K,)``."""

    accepted: torch.Tensor
    weight: torch.Tensor
    chances: torch.Tensor


def verified(
    tokens: torch.Tensor,
    draft: torch.Tensor,
    target: torch.Tensor,
    numbers: torch.Tensor,
    verification: Verification = "token",
    vocabulary: DraftVocabulary | None = None,
) -> Verdict:
    """`host_verdict.verified` by tensor operations alone, with a single transfer to the host.

    Args:
        tokens: ``(K,)`` int64.
        draft, target, verification, vocabulary: as there, on one device.
        numbers: ``(K + 1,)`` float64, uniform in [0, 1).
    """
    count = len(tokens)
    total = target.sum().double()  # NaN if a single number is
    coins, last = numbers[:-1], numbers[-1]
    if not count:
        extra, sum_of_all = torch.stack([pick(target[0], last).double(), total]).tolist()
        require_numbers(sum_of_all)
        return Verdict(0, int(extra), ExtraToken.BONUS, ())
    target_of = target[:count].gather(1, tokens[:, None])[:, 0]  # (K,)
    columns = tokens if vocabulary is None else vocabulary.columns_of(tokens)
    draft_of = draft.gather(1, columns[:, None])[:, 0]  # (K,)
    if verification == "block":
        kept = by_block(target_of, draft_of, draft, target, coins, vocabulary)
    else:
        kept = by_token(target_of, draft_of, coins)
    # Everything below stays on the device until the one transfer that reads the verdict.
    target_row = target.index_select(0, kept.accepted.clamp_max(len(target) - 1))[0]  # (V,)
    draft_row = draft.index_select(0, kept.accepted.clamp_max(count - 1))[0]
    residual = less(target_row * kept.weight, draft_row, vocabulary).clamp_min(0)
    use_residual = (kept.accepted < count) & (residual.sum() > 0)
    extra_row = torch.where(use_residual, residual, target_row)
    # float64 holds ids and probabilities alike
    one = torch.stack([total, pick(extra_row, last).double()])
    sum_of_all, *read = torch.cat([one, kept.accepted.double(), kept.chances.double()]).tolist()
    require_numbers(sum_of_all)
    accepted = int(read[1])
    return verdict_of(accepted, int(read[0]) if accepted < len(target) else None, read[2:])


def less(rows: torch.Tensor, draft: torch.Tensor, vocabulary: DraftVocabulary | None) -> torch.Tensor:
    """`host_verdict.less` by tensor operations alone."""
    return rows - draft if vocabulary is None else vocabulary.less(rows, draft)


def by_token(target_of: torch.Tensor, draft_of: torch.Tensor, coins: torch.Tensor) -> Kept:
    """`host_verdict.by_token` by tensor operations alone."""
    kept = (target_of >= draft_of) | (coins * draft_of < target_of)
    chances = (target_of / draft_of.clamp_min(TINY)).clamp_max(1)
    return Kept(kept.int().cumprod(0).sum(0, keepdim=True), torch.ones_like(target_of[:1]), chances)


def by_block(
    target_of: torch.Tensor,
    draft_of: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    coins: torch.Tensor,
    vocabulary: DraftVocabulary | None = None,
) -> Kept:
    """`host_verdict.by_block` by tensor operations alone: log w_i is a walk held below 0, S_i - max(S_0, ..., S_i)."""
    logs = (target_of.double() / draft_of.double().clamp_min(TINY)).log()
    walk = torch.cat([logs.new_zeros(1), logs.cumsum(0)])  # (K + 1,); -inf from a token on that cannot be kept
    weights = (walk - walk.cummax(0).values).exp()
    inner = weights[1:-1]  # (K - 1,)
    above = less(inner.float()[:, None] * target_probs[1 : len(coins)], draft_probs[1:], vocabulary).clamp_min(0)
    surplus = above.sum(-1)  # of (K - 1, V)
    chances = torch.where(inner < 1, surplus / (surplus + (1 - inner)).clamp_min(TINY), 1.0)
    chances = torch.cat([chances, weights[-1:]])  # (K,)
    numbers = torch.arange(1, len(coins) + 1, device=coins.device)
    accepted = ((coins < chances) * numbers).amax(0, keepdim=True)
    at_least = 1 - (1 - chances).flip(0).cumprod(0).flip(0)  # (K,)
    each = at_least / torch.cat([at_least.new_ones(1), at_least[:-1]]).clamp_min(TINY)
    return Kept(accepted, weights[accepted].float(), each)
