"""Which draft tokens to keep, and the token the verifier adds: exactness rests on this module."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
import torch

from specctl.decoding.host import TINY, array, on_host
from specctl.decoding.sampling import draw
from specctl.errors import RecordError
from specctl.records import ExtraToken


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many draft tokens are accepted, and the verifier's own token after them.

    Attributes:
        accepted: n.
        extra: id of the verifier's token.
        kind: correction after a rejection, else bonus.
        chances: acceptance probability of each accepted token and of the first rejected one; None when greedy.
    """

    accepted: int
    extra: int
    kind: ExtraToken
    chances: tuple[float, ...] | None = None


def verify(
    tokens: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, generator: torch.Generator | None
) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, Alg. 1).

    Token i is kept with probability min(1, p_i / q_i), p the target's and q the draft's probability of it, while all
    before it were kept. At the first rejection the extra token is drawn from max(p - q, 0), normalised; after none,
    from p. The emitted tokens then follow the target's distribution.

    Args:
        tokens: ``(K,)`` int64, drawn from ``draft_probs``.
        draft_probs: ``(K, V)`` float32, the very distributions the tokens were drawn from.
        target_probs: ``(K + 1, V)`` float32, on the device of the other two.
        generator: of that device.

    Raises:
        RecordError: ``target_probs`` holds NaN.
    """
    verify_here = _verify_on_host if on_host(target_probs) else verify_on_device
    return verify_here(tokens, draft_probs, target_probs, generator)


def _verify_on_host(
    tokens: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, generator: torch.Generator | None
) -> Verdict:
    """`verify` where nothing waits for a device, so that only the row of the extra token is looked at as a whole."""
    count = len(tokens)
    require_numbers(float(target_probs.sum()))  # NaN if a single number is
    if not count:
        return Verdict(0, int(draw(target_probs[0], generator)), ExtraToken.BONUS, ())
    places, drafted = np.arange(count), tokens.numpy()
    target_of, draft_of = array(target_probs)[places, drafted], array(draft_probs)[places, drafted]  # (K,)
    coins = array(torch.rand(count, generator=generator))
    kept = (target_of >= draft_of) | (coins * draft_of < target_of)
    accepted = count if kept.all() else int(kept.argmin())
    row = target_probs[accepted]  # (V,)
    if accepted < count:
        residual = (row - draft_probs[accepted]).clamp_min_(0)
        row = residual if residual.sum() > 0 else row
    chances = np.minimum(target_of / np.maximum(draft_of, np.float32(TINY)), 1)
    kind = ExtraToken.BONUS if accepted == count else ExtraToken.CORRECTION
    return Verdict(accepted, int(draw(row, generator)), kind, tuple(chances[: accepted + 1].tolist()))


def verify_on_device(
    tokens: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, generator: torch.Generator | None
) -> Verdict:
    """`verify` by tensor operations alone, with a single transfer to the host."""
    count = len(tokens)
    total = target_probs.sum().double()  # NaN if a single number is
    if not count:
        extra, sum_of_all = torch.stack([draw(target_probs[0], generator).double(), total]).tolist()
        require_numbers(sum_of_all)
        return Verdict(0, int(extra), ExtraToken.BONUS, ())
    target_of = target_probs[:-1].gather(1, tokens[:, None])[:, 0]  # (K,)
    draft_of = draft_probs.gather(1, tokens[:, None])[:, 0]  # (K,)
    coins = torch.rand(count, generator=generator, device=tokens.device)
    kept = (target_of >= draft_of) | (coins * draft_of < target_of)
    accepted = kept.int().cumprod(0).sum(0, keepdim=True)  # (1,)
    # Everything below stays on the device until the one transfer that reads the verdict.
    target_row = target_probs.index_select(0, accepted)[0]  # (V,)
    draft_row = draft_probs.index_select(0, accepted.clamp_max(count - 1))[0]
    residual = (target_row - draft_row * (accepted < count)).clamp_min(0)
    residual = torch.where(residual.sum() > 0, residual, target_row)
    chances = (target_of / draft_of.clamp_min(TINY)).clamp_max(1)  # (K,)
    # float64 holds ids and probabilities alike
    one = torch.stack([total, draw(residual, generator).double()])
    sum_of_all, *read = torch.cat([one, accepted.double(), chances.double()]).tolist()
    require_numbers(sum_of_all)
    extra, accepted_count = int(read[0]), int(read[1])
    kind = ExtraToken.BONUS if accepted_count == count else ExtraToken.CORRECTION
    return Verdict(accepted_count, extra, kind, tuple(read[2 : 3 + accepted_count]))


def require_numbers(*values: float) -> None:
    """Raise a RecordError if something that a verifier computed is not a number."""
    if any(map(isnan, values)):
        raise RecordError(
            "not_a_number",
            "a verifying model computed NaN instead of logits; float16 may be too narrow for it (try dtype bfloat16 or "
            "float32), or its weights are damaged",
        )


def verify_greedy(tokens: Sequence[int], target_choices: Sequence[int]) -> Verdict:
    """`verify` at temperature 0, where both distributions are one-hot: keep tokens while they are the target's argmax.

    Args:
        tokens: the K drafted ids.
        target_choices: the target's argmax at each of them and after the last, K + 1 ids.
    """
    accepted = 0
    while accepted < len(tokens) and tokens[accepted] == target_choices[accepted]:
        accepted += 1
    kind = ExtraToken.BONUS if accepted == len(tokens) else ExtraToken.CORRECTION
    return Verdict(accepted, target_choices[accepted], kind)
