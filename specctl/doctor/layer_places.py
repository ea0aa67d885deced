"""On which devices the layers of a model go, told without its weights."""

from typing import TYPE_CHECKING, Any

from specctl.models.passes.watching import decoder_layers
from specctl.models.placing.placement import STRATEGIES, Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def layer_places(model: "PreTrainedModel", placement: Placement) -> dict[str, int]:
    """How many layers go to each device; of one that is split within layers, how many each device has a part of.

    Args:
        model: a `skeleton`, in the dtype of the placement.
        placement: of that model.
    """
    layers = decoder_layers(model)
    name, count = next(name for name, part in model.named_modules() if part is layers), len(layers)
    devices = placement.devices
    if placement.sharded == "tensor":
        return dict.fromkeys(devices, count)
    if placement.sharded == "pipeline":
        least, more = divmod(count, len(devices))
        return {device: least + (number < more) for number, device in enumerate(devices)}
    where = placement.device_map
    if isinstance(where, str) and where in STRATEGIES:
        where = _accelerates(model, f"{name}.0", where, placement)
    elif isinstance(where, str):
        return {where: count}
    found: dict[str, int] = {}
    for number in range(count):
        layer = f"{name}.{number}"
        keys = [key for key in where if key == "" or layer == key or layer.startswith(f"{key}.")]
        inside = [key for key in where if key.startswith(f"{layer}.")]
        if keys or inside:
            device = where[max(keys, key=len) if keys else inside[0]]
            label = f"cuda:{device}" if isinstance(device, int) else str(device)
            found[label] = found.get(label, 0) + 1
    return found


def _accelerates(model: "PreTrainedModel", layer: str, strategy: str, placement: Placement) -> dict[str, Any]:
    """The map that accelerate makes for a strategy, as transformers asks it when the weights are loaded."""
    import torch
    from accelerate import infer_auto_device_map  # type: ignore[import-untyped]
    from accelerate.utils import get_balanced_memory  # type: ignore[import-untyped]

    whole = [type(model.get_submodule(layer)).__name__]
    dtype = getattr(torch, placement.dtype)
    memory: dict[Any, Any] = dict(placement.max_memory or {})
    model.tie_weights()
    if strategy != "sequential":
        low = strategy == "balanced_low_0"
        memory = get_balanced_memory(model, memory, no_split_module_classes=whole, dtype=dtype, low_zero=low)
    found: dict[str, Any] = infer_auto_device_map(model, memory, no_split_module_classes=whole, dtype=dtype)
    return found
