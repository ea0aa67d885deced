"""Last hidden states of whole sequences, for training acceptance heads."""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specctl.models.passes.weights import device_of

TOKENS_AT_ONCE = 8192


def last_hidden_states(model: PreTrainedModel, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The ``hidden`` states of `Runner.extend`, for several sequences at once and without logits.

    Args:
        model: a causal language model in eval mode.
        sequences: ids, each ``(T,)``.

    Returns:
        ``(T, H)`` of each sequence, in the model's dtype, on the device of its input embeddings.
    """
    device = device_of(model)
    states: list[torch.Tensor] = [torch.empty(0)] * len(sequences)
    for group in _groups([len(sequence) for sequence in sequences]):
        # Padded on the right only: later tokens do not change a token's state.
        ids = pad_sequence([sequences[index].long() for index in group], batch_first=True).to(device)  # (B, T)
        output = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # (B, T, H)
        for row, index in enumerate(group):
            states[index] = output[row, : len(sequences[index])].to(device)
    return states


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences in groups of similar length: at most `TOKENS_AT_ONCE` when padded, or a single sequence."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > TOKENS_AT_ONCE:
            groups.append([])
        groups[-1].append(index)
    return groups
