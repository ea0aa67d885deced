"""What all draft heads have in common."""

from torch import nn


class DraftHead(nn.Module):
    """A network that drafts from the states of the model that verifies it.

    Attributes:
        layers: the verifier's layers whose states it reads; i is the input of decoder layer i, -1 the last state
            after the final norm.
        state_size: width of the verifier's states.
        width: H, the width of its own states.
        draft_vocabulary: how many of the verifier's tokens it can draft.
        num_layers: layers that keep keys and values.
        cached_values: numbers in its cache for each token.
        context: the most tokens that it can read.
    """

    layers: tuple[int, ...]
    state_size: int
    width: int
    draft_vocabulary: int
    num_layers: int
    cached_values: int
    context: int
