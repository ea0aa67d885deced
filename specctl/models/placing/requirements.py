"""Everything that must be true of a model before its weights are loaded; doctor and loading ask the same."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.library_calls import hushed
from specctl.models.files.plain_config import is_plain
from specctl.models.files.skeleton import require_modules, skeleton
from specctl.models.placing.architecture import generation_config, require_runnable
from specctl.models.placing.memory import DeviceMemory, Estimate, device_memory, estimate
from specctl.models.placing.model_config import load_config
from specctl.models.placing.placement import Placement, kind_of_device, named_devices, place
from specctl.models.placing.quantization import Quantization, plan, quantised_with, require_whole, rounding
from specctl.models.placing.shard_plan import sharded_placement
from specctl.profile.schema import Engine, ModelTable


def inspected(
    checkpoint: Checkpoint, table: ModelTable, devices: Sequence[DeviceMemory], engine: Engine = "auto"
) -> Quantization | None:
    """How a model is quantised as it is loaded, or None, after a check of all that its configuration tells.

    Args:
        checkpoint: the model's files; its weights are not needed.
        table: its profile table.
        devices: those of the machine.
        engine: the one that is to run it; see `quantization.rounding`.

    Raises:
        ModelError: specctl cannot run its architecture, its configuration or generation settings are damaged, it has
            no such modules as the device table or its adapter names, or it cannot be quantised as wanted.
    """
    plain = is_plain(checkpoint.settings())
    if not plain:
        require_runnable(checkpoint, table.trust_remote_code)
    generation_config(checkpoint)
    if plain and not isinstance(table.device, dict) and checkpoint.adapter is None and table.quantize is None:
        return None
    model = skeleton(checkpoint, load_config(checkpoint, table.trust_remote_code), table.trust_remote_code)
    if isinstance(table.device, dict):
        require_modules(model, table.device, checkpoint.role)
    if checkpoint.adapter is not None:
        checkpoint.adapter.require_fit(model)
    if table.quantize is None:
        return None
    require_whole(checkpoint, table.quantize)
    if rounding(table, engine) is not None:
        return None
    return plan(checkpoint, model, table.quantize, kind_of_device(table, devices), table.dtype)


def weighed(
    checkpoint: Checkpoint, table: ModelTable, devices: Sequence[DeviceMemory], engine: Engine = "auto"
) -> Estimate:
    """The memory that a model needs in the form in which its table wants it loaded.

    Raises:
        ModelError: as for `inspected`, or its weights are missing or damaged.
    """
    return estimate(checkpoint, table.trust_remote_code, inspected(checkpoint, table, devices, engine))


def placed_here(checkpoint: Checkpoint, table: ModelTable, need: Estimate) -> Placement:
    """`placed` on this machine, of which no other GPUs are touched than the model may go to.

    Raises:
        ModelError: as for `placed`; the hint knows all devices.
    """
    if (names := named_devices(table)) is not None:
        with suppress(ModelError):
            return placed(checkpoint, table, need, device_memory(names))
    return placed(checkpoint, table, need, device_memory())


def placed(
    checkpoint: Checkpoint, table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory], *, here: bool = True
) -> Placement:
    """Where the model goes.

    Args:
        checkpoint, table, need: of the model.
        devices: of the machine.
        here: whether that is this machine, which then has to be able to read quantised weights.

    Raises:
        ModelError: it does not fit, or its quantised weights cannot be read on this machine.
    """
    if table.splits:
        placement = sharded_placement(checkpoint, table, need, devices)
    else:
        placement = place(table, need, devices, checkpoint.role)
    if here:
        require_readable(checkpoint, placement)
    return placement


PACKAGES = {
    "aqlm": "aqlm[gpu,cpu]",
    "auto-round": "auto-round",
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "kernels",
    "gptq": "gptqmodel optimum",
    "hqq": "hqq",
    "quanto": "optimum-quanto",
    "torchao": "torchao",
}
"""What to install for a method; transformers' own message may name one of several packages."""


def require_readable(checkpoint: Checkpoint, placement: Placement) -> None:
    """Raise a ModelError if a checkpoint is quantised in a way that transformers cannot read here.

    Args:
        checkpoint: one with any weights, quantised or not.
        placement: where the model will go, since some methods need a GPU.

    Raises:
        ModelError: the method is unknown, its package is missing, it does not run on the placement's devices, or its
            blocks do not fill the weights.
    """
    described = quantised_with(checkpoint.settings())
    if described is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    method = _method(described)
    where = checkpoint.folder / "config.json"
    with hushed():
        try:
            known = AutoHfQuantizer.supports_quant_method(described)  # type: ignore[no-untyped-call]
        except (TypeError, ValueError):
            known = False
        if not known:
            raise ModelError(
                f"{checkpoint} is quantised with {method!r}, a method that transformers does not know.",
                f"Update transformers, or correct quant_method in {where}.",
            )
        try:
            quantizer = AutoHfQuantizer.from_config(dict(described), pre_quantized=True)
            quantizer.validate_environment(device_map=_device_map(placement), weights_only=True)
        except ImportError as error:
            hint = f"Run `pip install {PACKAGES[method]}`." if method in PACKAGES else "Install what it names."
            raise ModelError(f"{checkpoint} is quantised with {method}: {_sentence(error)}.", hint) from error
        except Exception as error:
            raise ModelError(
                f"{checkpoint} is quantised with {method}, which cannot run here: {_sentence(error)}.",
                f"Use a device that {method} supports, or a checkpoint that is not quantised; quantization_config in "
                f"{where} may also be damaged.",
            ) from error
    if method == "fp8" and getattr(quantizer.quantization_config, "dequantize", False):
        _require_whole_blocks(checkpoint, quantizer.quantization_config.weight_block_size)


def _require_whole_blocks(checkpoint: Checkpoint, block: Sequence[int] | None) -> None:
    """Raise a ModelError if FP8 weights do not consist of whole blocks.

    Where a device has no FP8 kernels, transformers (5.24) unpacks the weights and takes a side divided by its number of
    scales for the block. With 128 x 128 blocks, a side of 192 would be read in blocks of 96: wrong numbers without an
    error.

    Args:
        checkpoint: with FP8 weights, each with its scales in a tensor of the name + ``_scale_inv``.
        block: rows and columns of a block; None where each weight has one scale.
    """
    shapes = checkpoint.headers().shapes
    for name, shape in shapes.items():
        scales = shapes.get(f"{name}_scale_inv", ())
        if len(shape) < 2 or len(scales) < 2:
            continue
        sides = list(zip(shape[-2:], scales[-2:], block or shape[-2:], strict=True))
        configured = all(count == -(-size // step) for size, count, step in sides)
        if any(size % count or (configured and count > 1 and size % step) for size, count, step in sides):
            wanted = " x ".join(str(step) for _, _, step in sides)
            raise ModelError(
                f"{checkpoint}: {name} has {shape[-2]} x {shape[-1]} weights, which is not a whole number of FP8 "
                f"blocks of {wanted}.",
                "transformers unpacks whole blocks only where there is no GPU with FP8 kernels. Use a GPU of compute "
                "capability 8.9 or newer, or the checkpoint that this one was made from.",
            )


def _method(described: dict[str, Any]) -> str:
    method = described.get("quant_method")
    if method is None and (described.get("load_in_8bit") or described.get("load_in_4bit")):
        return "bitsandbytes"
    return str(method)


def _device_map(placement: Placement) -> dict[str, Any]:
    """A map that names every device of the placement: a strategy's own map is only made from the loaded model."""
    if isinstance(placement.device_map, dict):
        return placement.device_map
    names = placement.devices
    return {"": names[0]} if len(names) == 1 else {str(index): name for index, name in enumerate(names)}


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
