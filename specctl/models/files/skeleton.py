"""A model without weights: its modules and their shapes, as its configuration describes them."""

import copy
import difflib
from typing import TYPE_CHECKING, Any, cast

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.hushing import hushed
from specctl.models.files.loading_failures import explained
from specctl.models.files.text_model import text_only_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def skeleton(checkpoint: Checkpoint, config: Any, trust_remote_code: bool = False) -> "PreTrainedModel":
    """The model on torch's meta device, with plain weights even if the checkpoint's are quantised.

    Raises:
        ModelError: no model can be made from the configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM

    known = text_only_class(config)
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    model: PreTrainedModel
    with explained(checkpoint.role, checkpoint.name, by_config=True), torch.device("meta"), hushed():
        try:
            if known is not None:
                made: Any = known(plain)
                return cast("PreTrainedModel", made.to(plain.dtype) if isinstance(plain.dtype, torch.dtype) else made)
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                plain, trust_remote_code=trust_remote_code
            )
        except KeyError as error:
            if keys := _keys_of(error.args[0] if error.args else None, checkpoint.settings()):
                raise ModelError(
                    f"{checkpoint}: transformers does not know {' = '.join(keys)} = {error} of its config.json.",
                    f"Correct it in {checkpoint.folder / 'config.json'}, or update transformers.",
                ) from error
            raise
    return model


def require_modules(model: "PreTrainedModel", device_map: dict[str, int | str], role: str) -> None:
    """Raise a ModelError if a device_map names a module that the model does not have.

    Args:
        model: a `skeleton`.
        device_map: from module to device; ``""`` is the whole model.
        role: the model's key in the profile, for the message.
    """
    known = {*dict(model.named_modules()), *dict(model.named_parameters())}
    for name in device_map:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ModelError(
                f"[{role}] device: the model has no module {name!r}.",
                f"{hint}Its outermost modules are {', '.join(dict(model.named_children()))}; '' is the whole model.",
            )


def _keys_of(value: Any, settings: Any) -> list[str]:
    """The dotted keys under which nested settings hold a value."""
    found = []
    for key, setting in settings.items() if isinstance(settings, dict) else ():
        if isinstance(setting, dict):
            found += [f"{key}.{inner}" for inner in _keys_of(value, setting)]
        elif value is not None and setting == value:
            found.append(key)
    return found
