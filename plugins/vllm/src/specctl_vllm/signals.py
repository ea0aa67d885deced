"""What policies read of one draft step, for all requests at once."""

from collections.abc import Sequence

import torch

from specctl.policies import Signal

COMPUTED: tuple[Signal, ...] = ("entropy", "top_prob")
"""The signals that are computed: both read the distribution, neither the token that was drawn from it."""


def signals_of(logits: torch.Tensor) -> torch.Tensor:
    """The signals of each row at temperature 1.

    Args:
        logits: floats (B, V); left as they are.

    Returns:
        float64 (2, B): `COMPUTED`, entropy in nats.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    entropy = -(logprobs.exp() * logprobs.nan_to_num(neginf=0.0)).sum(dim=-1)
    return torch.stack([entropy, logprobs.amax(dim=-1).exp()]).double()


def read_step(signals: torch.Tensor, tokens: torch.Tensor) -> tuple[list[int], list[Sequence[float]]]:
    """Drafted tokens, integers (B), and the signals (2, B) of each as `COMPUTED` names them, in one transfer."""
    # Every id is a float64 exactly.
    ids, *rows = torch.cat([tokens.double().unsqueeze(0), signals]).tolist()
    return [int(token) for token in ids], list(zip(*rows, strict=True))
