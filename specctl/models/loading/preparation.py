"""Everything that must be true of a model before its weights are loaded; doctor and loading ask the same."""

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from specctl.errors import ModelError
from specctl.models.loading.architecture import require_runnable
from specctl.models.loading.checkpoint import GENERATION, Checkpoint
from specctl.models.loading.hushing import hushed
from specctl.models.loading.memory import DeviceMemory, Estimate, estimate
from specctl.models.loading.placement import Placement, kind_of_device, place
from specctl.models.loading.quantization import plan
from specctl.models.loading.quantized_checkpoint import require_readable
from specctl.models.loading.skeleton import require_modules, skeleton
from specctl.profile.schema import ModelTable


def weighed(checkpoint: Checkpoint, table: ModelTable, config: Any, devices: Sequence[DeviceMemory]) -> Estimate:
    """The memory that a model needs in the form in which its table wants it loaded.

    Args:
        checkpoint: the model's files.
        table: its profile table.
        config: its transformers configuration.
        devices: those of the machine.

    Raises:
        ModelError: specctl cannot run its architecture, its configuration or generation settings are damaged, it has
            no such modules as the device table names, it cannot be quantised as wanted, or its weights are damaged.
    """
    require_runnable(checkpoint, config, table.trust_remote_code)
    generation_config(checkpoint)
    model = skeleton(checkpoint, config, table.trust_remote_code)
    if isinstance(table.device, dict):
        require_modules(model, table.device, checkpoint.role)
    quantization = None
    if table.quantize is not None:
        kind = kind_of_device(table, devices)
        quantization = plan(checkpoint, model, table.quantize, kind, table.dtype)
    return estimate(checkpoint, table.trust_remote_code, quantization)


def placed(checkpoint: Checkpoint, table: ModelTable, need: Estimate, devices: Sequence[DeviceMemory]) -> Placement:
    """Where the model goes.

    Raises:
        ModelError: it does not fit, or its quantised weights cannot be read on this machine.
    """
    placement = place(table, need, devices, checkpoint.role)
    require_readable(checkpoint, placement)
    return placement


def generation_config(checkpoint: Checkpoint) -> GenerationConfig | None:
    """The checkpoint's generation settings; None if it has none.

    Raises:
        ModelError: they are damaged. transformers would go on without them, and so without their end of sequence.
    """
    settings = checkpoint.generation_settings()
    if settings is None:
        return None
    try:
        with hushed():
            return GenerationConfig.from_dict(settings)
    except Exception as error:
        raise ModelError(
            f"{checkpoint} has a damaged {GENERATION}: {' '.join(str(error).split()).rstrip('.')}.",
            f"Copy or download {checkpoint.folder / GENERATION} again.",
        ) from error
