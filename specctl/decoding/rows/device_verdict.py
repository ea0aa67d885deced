"""How many tokens of a draft are kept, and the verifier's own token after them, by torch: exactness rests on this.

`host_verdict` has the same by numpy, with the rules' explanations. Below, p and q are the verifier's and the draft's
probabilities.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from specctl.decoding.rows.device_laws import pick
from specctl.decoding.rows.draft_verdict import Verdict, require_numbers, verdict_of
from specctl.decoding.rows.host_laws import TINY
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.profile.schema import Verification
from specctl.records import ExtraToken


class Kept(NamedTuple):
    """`host_verdict.Kept` where nothing has been read yet: int64 and float32 ``(..., 1)``, floats ``(..., K)``."""

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

        def surplus(weights: torch.Tensor) -> torch.Tensor:  # (K - 1,), of (K - 1, V)
            return less(weights[:, None] * target[1:count], draft[1:], vocabulary).clamp_min(0).sum(-1)

        kept = by_block(target_of, draft_of, coins, surplus)
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
    """`host_verdict.by_token` by tensor operations alone, of one draft or of several.

    Args:
        target_of, draft_of: ``(..., K)``; behind a shorter draft tokens that are never kept, 0 and 1.
        coins: ``(..., K)``.
    """
    kept = (target_of >= draft_of) | (coins * draft_of < target_of)
    chances = (target_of / draft_of.clamp_min(TINY)).clamp_max(1)
    return Kept(kept.int().cumprod(-1).sum(-1, keepdim=True), torch.ones_like(target_of[..., :1]), chances)


def by_block(
    target_of: torch.Tensor,
    draft_of: torch.Tensor,
    coins: torch.Tensor,
    surplus: Callable[[torch.Tensor], torch.Tensor],
    last: torch.Tensor | None = None,
) -> Kept:
    """`host_verdict.by_block` by tensor operations alone: log w_i is a walk held below 0, S_i - max(S_0, ..., S_i).

    Args:
        target_of, draft_of, coins: as of `by_token`.
        surplus: Z_1 to Z_{K-1} from w_1 to w_{K-1}, both ``(..., K - 1)`` float32.
        last: ``(..., K)`` bool, where drafts end; None where each has K tokens.
    """
    logs = (target_of.double() / draft_of.double().clamp_min(TINY)).log()
    walk = torch.cat([torch.zeros_like(logs[..., :1]), logs.cumsum(-1)], -1)  # -inf from a token on that cannot be kept
    weights = (walk - walk.cummax(-1).values).exp()  # (..., K + 1)
    inner = weights[..., 1:-1]
    above = surplus(inner.float())
    chances = torch.where(inner < 1, above / (above + (1 - inner)).clamp_min(TINY), 1.0)
    chances = torch.cat([chances, weights[..., -1:]], -1)  # (..., K)
    if last is not None:
        chances = torch.where(last, weights[..., 1:], chances)
    numbers = torch.arange(1, coins.shape[-1] + 1, device=coins.device)
    accepted = ((coins < chances) * numbers).amax(-1, keepdim=True)
    at_least = 1 - (1 - chances).flip(-1).cumprod(-1).flip(-1)
    each = at_least / torch.cat([torch.ones_like(at_least[..., :1]), at_least[..., :-1]], -1).clamp_min(TINY)
    return Kept(accepted, weights.gather(-1, accepted).float(), each)
