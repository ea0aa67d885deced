"""Which draft tokens to keep, and the token the verifier adds: exactness rests on this module."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
import torch

from specctl.decoding.acceptance import by_block, by_block_on_device, by_token, by_token_on_device
from specctl.decoding.host import array, on_host, picked
from specctl.decoding.sampling import pick, uniforms
from specctl.errors import RecordError
from specctl.profile.schema import Verification
from specctl.records import ExtraToken

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many draft tokens are accepted, and the verifier's own token after them.

    Attributes:
        accepted: n.
        extra: id of the verifier's token; None after a draft that is kept as a whole, where the verifier has read no
            place behind it.
        kind: correction after a rejection, else bonus; None where there is no such token.
        chances: of each accepted token and of the first rejected one, see `specctl.records.Round.chances`; None when
            greedy.
    """

    accepted: int
    extra: int | None
    kind: ExtraToken | None
    chances: tuple[float, ...] | None = None


def verify(
    tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    generator: torch.Generator | None,
    verification: Verification = "token",
) -> Verdict:
    """Speculative sampling: keep a beginning of the draft and draw one token after it.

    How many tokens are kept is decided token by token or for the draft as a block, see `specctl.decoding.acceptance`.
    At the first token that is not kept the extra token is drawn from max(w p - q, 0), normalised, p the target's and q
    the draft's probabilities there, and w 1 for single tokens; after a draft that is kept as a whole, from p. The
    emitted tokens then follow the target's distribution.

    Args:
        tokens: ``(K,)`` int64, drawn from ``draft_probs``.
        draft_probs: ``(K, V)`` float32, the very distributions the tokens were drawn from.
        target_probs: ``(K + 1, V)`` float32, on the device of the other two; or ``(K, V)``, K > 0, where no token is to
            follow a draft that is kept as a whole.
        generator: of that device.
        verification: which of the two rules.

    Raises:
        RecordError: ``target_probs`` holds NaN.
    """
    verify_here = _verify_on_host if on_host(target_probs) else verify_on_device
    return verify_here(tokens, draft_probs, target_probs, generator, verification)


def _verify_on_host(
    tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    generator: torch.Generator | None,
    verification: Verification,
) -> Verdict:
    """`verify` where nothing waits for a device, so that token by token only the extra token's row is read whole."""
    count = len(tokens)
    target, draft = array(target_probs), array(draft_probs)  # (K + 1, V), (K, V)
    require_numbers(float(target.sum()))  # NaN if a single number is
    *coins, last = uniforms((count + 1,), CPU, generator).tolist()
    if not count:
        return Verdict(0, picked(target[0], last), ExtraToken.BONUS, ())
    places, drafted = np.arange(count), tokens.numpy()
    of_tokens = target[places, drafted], draft[places, drafted]  # (K,) each
    block = verification == "block"
    kept = by_block(*of_tokens, draft, target, coins) if block else by_token(*of_tokens, coins)
    if kept.accepted == len(target):
        return _verdict(count, None, kept.chances)
    row = target[kept.accepted]  # (V,)
    if kept.accepted < count:
        residual = np.maximum(row * np.float32(kept.weight) - draft[kept.accepted], 0)
        row = residual if residual.any() else row
    return _verdict(kept.accepted, picked(row, last), kept.chances)


def verify_on_device(
    tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    generator: torch.Generator | None,
    verification: Verification = "token",
) -> Verdict:
    """`verify` by tensor operations alone, with a single transfer to the host."""
    count = len(tokens)
    total = target_probs.sum().double()  # NaN if a single number is
    numbers = uniforms((count + 1,), target_probs.device, generator)
    coins, last = numbers[:-1], numbers[-1]
    if not count:
        extra, sum_of_all = torch.stack([pick(target_probs[0], last).double(), total]).tolist()
        require_numbers(sum_of_all)
        return Verdict(0, int(extra), ExtraToken.BONUS, ())
    target_of = target_probs[:count].gather(1, tokens[:, None])[:, 0]  # (K,)
    draft_of = draft_probs.gather(1, tokens[:, None])[:, 0]  # (K,)
    if verification == "block":
        kept = by_block_on_device(target_of, draft_of, draft_probs, target_probs, coins)
    else:
        kept = by_token_on_device(target_of, draft_of, coins)
    # Everything below stays on the device until the one transfer that reads the verdict.
    target_row = target_probs.index_select(0, kept.accepted.clamp_max(len(target_probs) - 1))[0]  # (V,)
    draft_row = draft_probs.index_select(0, kept.accepted.clamp_max(count - 1))[0]
    residual = (target_row * kept.weight - draft_row).clamp_min(0)
    use_residual = (kept.accepted < count) & (residual.sum() > 0)
    extra_row = torch.where(use_residual, residual, target_row)
    # float64 holds ids and probabilities alike
    one = torch.stack([total, pick(extra_row, last).double()])
    sum_of_all, *read = torch.cat([one, kept.accepted.double(), kept.chances.double()]).tolist()
    require_numbers(sum_of_all)
    accepted = int(read[1])
    return _verdict(accepted, int(read[0]) if accepted < len(target_probs) else None, read[2:])


def _verdict(accepted: int, extra: int | None, chances: Sequence[float]) -> Verdict:
    """The verdict on a draft of at least one token, from the chances of all its tokens."""
    if extra is None:
        return Verdict(accepted, None, None, tuple(chances))
    kind = ExtraToken.BONUS if accepted == len(chances) else ExtraToken.CORRECTION
    return Verdict(accepted, extra, kind, tuple(chances[: accepted + 1]))


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
        target_choices: the target's argmax at each of them and after the last, K + 1 ids; or K, K > 0, where no token
            is to follow a draft that is kept as a whole.
    """
    accepted = 0
    while accepted < len(tokens) and tokens[accepted] == target_choices[accepted]:
        accepted += 1
    if accepted == len(target_choices):
        return Verdict(accepted, None, None)
    kind = ExtraToken.BONUS if accepted == len(tokens) else ExtraToken.CORRECTION
    return Verdict(accepted, target_choices[accepted], kind)
