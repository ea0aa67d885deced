"""What a draft head's configuration asks of the model whose states it reads."""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.running.context import context_length


def require_same(subject: str, what: str, own: int, verifiers: int) -> None:
    """Raise a ModelError if a number of the draft head is not the verifier's.

    Args:
        subject: the draft head.
        what: what the number counts, such as ``a vocabulary of``.
        own: the draft head's.
        verifiers: the verifier's.
    """
    if own != verifiers:
        raise ModelError(
            f"{subject} needs {what} {own}; the verifier has {verifiers}.",
            "Choose the head that was trained on this verifier, or train one with `specctl train-draft`.",
        )


def require_layers(subject: str, layers: Sequence[int], depth: int) -> None:
    """Raise a ModelError if a draft head reads the input of a layer that a verifier of ``depth`` layers does not have.

    The last layer's output is no layer's input; implementations differ in whether it is normed.
    """
    if outside := [layer for layer in layers if not 0 <= layer < depth]:
        raise ModelError(
            f"{subject} reads the inputs of layers {', '.join(map(str, layers))}; "
            f"the verifier has {depth} layers, 0 to {depth - 1}, and none is layer {outside[0]}."
        )


def context_of(shape: LayerShape, target: PreTrainedModel) -> int:
    """The most tokens that a draft head can read: the verifier's, where the head's file has fewer.

    Published heads name the length that they were trained with. Rotary positions go on beyond it, and what suffers is
    how much of a draft is accepted, whereas a limit would end the text.
    """
    return max(shape.max_positions, context_length(target) or 0)


def borrowed_embeddings(target: PreTrainedModel, shape: LayerShape, subject: str) -> nn.Module:
    """A verifier's embeddings, for a head that has none of its own; of another width they are a ModelError."""
    shared: nn.Module = target.get_input_embeddings()
    width = int(shared.weight.shape[1])  # type: ignore[index]
    require_same(subject, "without embeddings of its own, token embeddings of width", shape.hidden_size, width)
    return shared
