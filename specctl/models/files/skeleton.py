"""The transformers class of a checkpoint's text model, and the model without weights (skeleton).

A multimodal model is a wrapper around a text decoder. On text alone, only the decoder matters, so the other parts are
left out to save memory and their weights are not read. The result is still transformers' own class, with its module
names, positions, and renaming of older checkpoints' weights.
"""

import copy
import difflib
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.library_calls import explained, hushed

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

KEPT = {"gemma3n": ("embed_audio", "embed_vision"), "qwen2_audio": ("audio_tower",)}
"""Modules outside the decoder that a wrapper needs even for text, by ``model_type``. Gemma 3n compares every token with
the first id of each module; Qwen2-Audio moves its input to a module's device.
"""

WRAPPED = frozenset({"emu3"})
"""Families whose decoder-only class does not find its weights in a wrapper's files, by ``model_type``."""


def is_wrapper(config: Any) -> bool:
    """Whether a configuration of transformers has a text decoder and further parts, such as an image encoder."""
    return config.get_text_config(decoder=True) is not config


def known_class(config: Any) -> "type[PreTrainedModel] | None":
    """transformers' class for text generation; None if there is none, such as for code from a repository."""
    return next(iter(_known(config)), None)


def text_only_class(config: Any) -> "type[PreTrainedModel] | None":
    """A wrapper's class without the parts unneeded for text: a subclass of `known_class` with the same name.

    None for other models, and if `known_class` is the decoder's. AutoModelForCausalLM then loads the model, also from a
    wrapper's files.
    """
    known: Any = known_class(config)
    return _text_only(known) if known is not None and _wraps(known, config) else None


def left_out(config: Any) -> int:
    """The number of a wrapper's weights outside its text model; 0 for other models."""
    import torch

    wrappers: list[Any] = [known for known in _known(config) if _wraps(known, config)]
    if not wrappers:
        return 0
    with torch.device("meta"):
        made: Any = _text_only(wrappers[0])(config)
    return int(made.left_out)


def _wraps(known: "type[PreTrainedModel]", config: Any) -> bool:
    """Whether a class builds more than a configuration's text decoder."""
    import transformers

    if not is_wrapper(config):
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is None
    # A class may belong to another family's wrapper, so only its own configuration is compared with the decoder's.
    return known.config_class is not type(config.get_text_config(decoder=True))


def _known(config: Any) -> "list[type[PreTrainedModel]]":
    import transformers

    mappings = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )
    first = 1 if config.model_type in WRAPPED else 0
    found: list[Any] = [mapping.get(type(config), None) for mapping in mappings[first:]]
    return [known[0] if isinstance(known, tuple) else known for known in found if known is not None]


@cache
def _text_only(known: Any) -> "type[PreTrainedModel]":
    def init(self: Any, config: Any, *more: Any, **named: Any) -> None:
        known.__init__(self, config, *more, **named)
        self.left_out = _leave_out(self)

    # transformers looks up the renaming of weights by the class's name and module.
    return type(known.__name__, (known,), {"__init__": init, "__module__": known.__module__, "__doc__": known.__doc__})


def _leave_out(model: Any) -> int:
    """Remove all modules with weights except the text decoder, its embeddings and output layer; returns the number of
    removed weights.
    """
    ends = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    kept = {id(module) for module in ends if module is not None}
    return 0 if id(model) in kept else _without(model, kept, KEPT.get(model.config.model_type, ()))


def _without(module: "nn.Module", kept: set[int], names: tuple[str, ...]) -> int:
    count = 0
    for name, child in list(module.named_children()):
        if id(child) in kept or name in names:
            continue
        if any(id(part) in kept for part in child.modules()):
            count += _without(child, kept, names)
        elif weights := sum(weight.numel() for weight in child.parameters()):
            count += weights
            setattr(module, name, None)
    return count


def load_config(checkpoint: Checkpoint, trust_remote_code: bool = False) -> Any:
    """The checkpoint's transformers configuration."""
    from transformers import AutoConfig

    checkpoint.settings()
    with explained(checkpoint.role, checkpoint.name, by_config=True):
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)


def skeleton(
    checkpoint: Checkpoint, trust_remote_code: bool = False, config: Any = None, *, buffers: bool = False
) -> "PreTrainedModel":
    """The model on torch's meta device, with plain weights even if the checkpoint's are quantised.

    Args:
        checkpoint: the model's files.
        trust_remote_code: whether code from its repository may run.
        config: its `load_config`; None to load it.
        buffers: whether its buffers, such as the frequencies of rotary positions, are computed, on the CPU.

    Raises:
        ModelError: no model can be made from the configuration.
    """
    import torch
    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from transformers import AutoModelForCausalLM

    config = load_config(checkpoint, trust_remote_code) if config is None else config
    known = text_only_class(config)
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    model: PreTrainedModel
    empty = init_empty_weights(include_buffers=False) if buffers else torch.device("meta")
    with explained(checkpoint.role, checkpoint.name, by_config=True), empty, hushed():
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
    """Raise a ModelError if a device_map, from module to device, names a module that a `skeleton` does not have.

    ``""`` is the whole model. ``role`` is the model's key in the profile, for the message.
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
    """The dotted keys with this value in nested settings."""
    found = []
    for key, setting in settings.items() if isinstance(settings, dict) else ():
        if isinstance(setting, dict):
            found += [f"{key}.{inner}" for inner in _keys_of(value, setting)]
        elif value is not None and setting == value:
            found.append(key)
    return found
