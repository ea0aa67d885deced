"""An output layer that computes the logits of only some ids."""

from typing import TYPE_CHECKING, Any

from torch import nn

from specctl.models.passes.draft_vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TrimmedOutput(nn.Linear):
    """A copy of some rows of another output layer: that layer itself may be tied to the embeddings.

    Args:
        whole: the layer, with a plain weight ``(V or more, H)``.
        vocabulary: the ids of the N rows.

    Attributes:
        vocabulary: the ids of the rows.
    """

    def __init__(self, whole: nn.Module, vocabulary: DraftVocabulary) -> None:
        layer: Any = whole
        weight = layer.weight.detach()
        ids = vocabulary.ids_on(weight.device)
        # Created without memory: the rows become its weight.
        super().__init__(weight.shape[1], len(vocabulary), bias=layer.bias is not None, device="meta")
        self.weight = nn.Parameter(weight[ids], requires_grad=False)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach()[ids], requires_grad=False)
        self.vocabulary = vocabulary


def trims(output: nn.Module | None) -> bool:
    """Whether rows of an output layer can be taken: it is a plain matrix product."""
    return type(output) is nn.Linear and type(output.weight) is nn.Parameter


def trim_output(model: "PreTrainedModel", vocabulary: DraftVocabulary) -> None:
    """Let a model compute the logits of only some ids, where `trims` allows it."""
    model.set_output_embeddings(TrimmedOutput(model.get_output_embeddings(), vocabulary))  # type: ignore[no-untyped-call]


def vocabulary_of(model: "PreTrainedModel") -> DraftVocabulary | None:
    """The ids of the columns of a model's logits; None where columns are ids."""
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return output.vocabulary if isinstance(output, TrimmedOutput) else None
