"""What is said of a model that can be loaded, but leaves little memory or is larger than one might think."""

from specctl.models.files.checkpoint import Checkpoint
from specctl.models.placing.quantization import Quantization
from specctl.printable import gib

MOSTLY = 0.5


def graph_advice(checkpoint: Checkpoint, making: int, room: int) -> list[str]:
    """Where making its graph takes more than what it leaves; both in bytes."""
    if making <= room:
        return []
    told = f"{gib(room)} free, but making its graph for onnxruntime, once, takes up to {gib(making)}."
    return [f"{checkpoint} leaves {told}"]


def room_advice(checkpoint: Checkpoint, work: int, room: int, tokens: int, *, on_cuda: bool) -> list[str]:
    """Where a text takes more than what it leaves.

    Args:
        checkpoint: of the model.
        work: bytes that a text takes.
        room: bytes that it leaves.
        tokens: of the text.
        on_cuda: whether it goes to a CUDA device, where more than the cache takes memory.
    """
    if work <= room:
        return []
    takes = "s, CUDA's context and working memory take" if on_cuda else "s takes"
    told = f"{gib(room)} free, but the cache of {tokens} token{takes} {gib(work)}"
    return [f"{checkpoint} leaves {told}: use short prompts or a device with more memory."]


def quantization_advice(checkpoint: Checkpoint, parameters: int, quantization: Quantization) -> list[str]:
    """Where few of its weights, of so many in all, are quantised."""
    share = quantization.weights / parameters
    if share >= MOSTLY:
        return []
    return [
        f"{checkpoint}: quantize covers {share:.0%} of its weights; embeddings, the output layer and what is not in "
        "linear layers of a size that fits stay as they are."
    ]
