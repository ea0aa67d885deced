"""Everything that must be true of a model before its weights are loaded; doctor and loading ask the same."""

from collections.abc import Sequence
from contextlib import suppress

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.skeleton import require_modules, skeleton
from specctl.models.placing.architecture import generation_config, require_runnable
from specctl.models.placing.memory import DeviceMemory, Estimate, device_memory, estimate, load_config
from specctl.models.placing.placement import Placement, kind_of_device, named_devices, place
from specctl.models.placing.quantization import Quantization, plan, require_whole, rounding
from specctl.models.placing.quantized_checkpoint import require_readable
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
    require_runnable(checkpoint, table.trust_remote_code)
    generation_config(checkpoint)
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


def placed(checkpoint: Checkpoint, table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory]) -> Placement:
    """Where the model goes.

    Raises:
        ModelError: it does not fit, or its quantised weights cannot be read on this machine.
    """
    if table.splits:
        placement = sharded_placement(checkpoint, table, need, devices)
    else:
        placement = place(table, need, devices, checkpoint.role)
    require_readable(checkpoint, placement)
    return placement
