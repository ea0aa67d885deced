"""Draft tokens and verdicts of a text that is already written: what its verifier wrote comes first, chance after."""

import torch

from specctl.decoding.rows.device_laws import draw
from specctl.decoding.rows.host_laws import TINY


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
        coins: ``(T,)`` float32, uniform in [0, 1), which decide the verdicts; None to toss them here.

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
