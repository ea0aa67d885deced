"""What a stopping policy may read of a draft's distribution, many places at once."""

import torch


def read_signals(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Entropy in nats, top probability and the tokens' probability under the softmax at temperature 1.

    Args:
        logits: ``(T, V)``, raw.
        tokens: ``(T,)`` int64.

    Returns:
        ``(3, T)`` float32.
    """
    raw = logits.float().softmax(-1)  # (T, V)
    return torch.stack([torch.special.entr(raw).sum(-1), raw.amax(-1), raw.gather(1, tokens[:, None])[:, 0]])
