"""The weights of a model."""

from transformers import PreTrainedModel


def weight_bytes(model: PreTrainedModel) -> int:
    """The memory that a model's parameters take, wherever they are."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())
