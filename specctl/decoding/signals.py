"""What a stopping policy may read of a draft's distribution."""

from collections.abc import Set

import torch

from specctl.decoding.sampling import Sampling
from specctl.models.acceptance_head import SIGNALS
from specctl.policies import Signal


def read_signals(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: Set[Signal] = frozenset(SIGNALS),
    probs: torch.Tensor | None = None,
    sampling: Sampling | None = None,
) -> dict[Signal, torch.Tensor]:
    """Entropy in nats, top probability and the tokens' probability under the softmax at temperature 1.

    Args:
        logits: ``(..., V)``, raw.
        tokens: ``(...)`` int64.
        wanted: which of `SIGNALS`.
        probs: ``(..., V)`` float32, what ``sampling`` makes of the logits; spares the softmax where that is it.

    Returns:
        ``(...)`` float32 of each signal wanted, in the order of `SIGNALS`.
    """
    found: dict[Signal, torch.Tensor] = {}
    if not wanted:
        return found
    plain = probs is not None and sampling is not None and sampling.plain
    raw = probs if probs is not None and plain else logits.float().softmax(-1)  # (..., V)
    if "entropy" in wanted:
        found["entropy"] = torch.special.entr(raw).sum(-1)
    if "top_prob" in wanted:
        found["top_prob"] = raw.amax(-1)
    if "token_prob" in wanted:
        found["token_prob"] = raw.gather(-1, tokens[..., None])[..., 0]
    return found
