"""An output layer that computes logits of some ids only."""

from typing import TYPE_CHECKING, Any

from torch import nn

from specctl.models.passes.draft_vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TrimmedOutput(nn.Linear):
    """Some rows of another output layer, in memory of their own: the other one may be tied to the embeddings.

    Args:
        whole: the layer, with a plain weight ``(V or more, H)``.
        vocabulary: the ids of the N rows.

    Attributes:
        vocabulary: as given.
    """

    def __init__(self, whole: nn.Module, vocabulary: DraftVocabulary) -> None:
        layer: Any = whole
        weight = layer.weight.detach()
        ids = vocabulary.ids_on(weight.device)
        # Made without memory: the rows take the place of its weights.
        super().__init__(weight.shape[1], len(vocabulary), bias=layer.bias is not None, device="meta")
        self.weight = nn.Parameter(weight[ids], requires_grad=False)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach()[ids], requires_grad=False)
        self.vocabulary = vocabulary


def trims(output: nn.Module | None) -> bool:
    """Whether some rows of an output layer can be taken: it is a plain product."""
    return type(output) is nn.Linear and type(output.weight) is nn.Parameter


def trim_output(model: "PreTrainedModel", vocabulary: DraftVocabulary) -> None:
    """Let a model whose output layer `trims` compute logits of some ids only."""
    model.set_output_embeddings(TrimmedOutput(model.get_output_embeddings(), vocabulary))  # type: ignore[no-untyped-call]


def vocabulary_of(model: "PreTrainedModel") -> DraftVocabulary | None:
    """The ids of the columns of a model's logits; None where a column is an id."""
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return output.vocabulary if isinstance(output, TrimmedOutput) else None
