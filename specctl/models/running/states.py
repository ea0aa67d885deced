"""Last hidden states of whole sequences, for training what reads them."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

TOKENS_AT_ONCE = 8192


def last_hidden_states(model: PreTrainedModel, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `Runner.extend` gives as ``hidden``, for several sequences at once and without logits.

    Args:
        model: a causal language model in eval mode.
        sequences: ids, each ``(T,)``.

    Returns:
        ``(T, H)`` of each sequence, in the model's dtype, on the device of its input embeddings.
    """
    device = next(model.parameters()).device
    states: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    for places in _groups([len(sequence) for sequence in sequences]):
        # Padded on the right only: what follows a token does not change its state.
        ids = pad_sequence([sequences[place].long() for place in places], batch_first=True).to(device)  # (B, T)
        output = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H)
        for row, place in enumerate(places):
            states[place] = output[row, : len(sequences[place])].to(device)
    return states


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Places of sequences of like length, so many as padded make `TOKENS_AT_ONCE` or a single one."""
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > TOKENS_AT_ONCE:
            groups.append([])
        groups[-1].append(place)
    return groups
