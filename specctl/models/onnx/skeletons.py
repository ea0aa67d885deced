"""Models whose weights stay in their files: torch has their modules and their small parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.gguf import GgufFile
from specctl.models.files.skeleton import load_config, skeleton

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specctl.models.onnx.weights import Weights


def packed_weights(checkpoint: Checkpoint, model: "PreTrainedModel") -> "Weights":
    """The weights of a checkpoint that keeps them in blocks.

    Args:
        checkpoint: the model's files.
        model: its skeleton, for names and shapes.

    Raises:
        ModelError: the files are damaged, or a GGUF file cannot run as it is.
        Unable: another checkpoint cannot run as it is.
    """
    if checkpoint.weights is not None:
        from specctl.models.onnx.gguf_weights import GgufWeights

        return GgufWeights(GgufFile(checkpoint.weights), model, checkpoint.role)
    from specctl.models.onnx.checkpoint_weights import CheckpointWeights, format_of

    return CheckpointWeights(checkpoint, format_of(checkpoint.quantization()), model)


def packed_model(checkpoint: Checkpoint) -> "tuple[PreTrainedModel, Weights]":
    """A model with its buffers and its parameters of one dimension. The others have a shape, no memory, and the value
    NaN; `lent` gives them their numbers.

    Raises:
        ModelError, Unable: see `packed_weights`, and no model can be made from the configuration.
    """
    config = load_config(checkpoint)
    config.dtype = torch.float32
    model = skeleton(checkpoint, config=config, buffers=True)
    model.tie_weights()  # accelerate makes each parameter anew
    weights = packed_weights(checkpoint, model)
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = _parameter(parameter, weights, f"{path}.{name}")
            setattr(module, name, made[parameter])
    model.eval()  # type: ignore[no-untyped-call]
    return model, weights


def _parameter(blank: nn.Parameter, weights: "Weights", name: str) -> nn.Parameter:
    if blank.ndim < 2:
        found = torch.from_numpy(weights.array(name).copy())
    else:
        found = torch.full((1,) * blank.ndim, torch.nan).expand(blank.shape)
    return nn.Parameter(found, requires_grad=False)


@contextmanager
def lent(model: nn.Module, weights: "Weights") -> Iterator[None]:
    """Let a `packed_model` compute. Each of its modules has its numbers, float32, while it runs."""
    kept: dict[nn.Module, dict[str, nn.Parameter]] = {}
    paths = {module: path for path, module in model.named_modules()}

    def give(module: nn.Module, _: Any) -> None:
        kept[module] = dict(module.named_parameters(recurse=False))
        for name, parameter in kept[module].items():
            if parameter.ndim >= 2:
                numbers = np.require(weights.array(f"{paths[module]}.{name}"), requirements="W")  # for torch
                setattr(module, name, nn.Parameter(torch.from_numpy(numbers), requires_grad=False))

    def take(module: nn.Module, *_: Any) -> None:
        for name, parameter in kept.pop(module, {}).items():
            setattr(module, name, parameter)

    handles = []
    for module in paths:
        if any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False)):
            handles.append(module.register_forward_pre_hook(give))
            handles.append(module.register_forward_hook(take, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
