"""The tensors of MTP heads in files: in a target's own shards, or alone in the layout of speculators."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

_DEEPSEEK = re.compile(r"(?:model\.|language_model\.)*layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_OTHERS = re.compile(r"(?:(?:model\.)?mtp\.(?:layers\.(?P<layer>\d+)\.)?|mtp_layers\.(?P<number>\d+)\.)(?P<rest>.+)")
"""The layouts of Qwen, which has the modules outside the decoder layers only once, and of speculators."""
_PARTS = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "norm",
    "input_proj": "eh_proj",
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "final_layernorm": "norm",
}
"""Modules outside the decoder layer, by their names in DeepSeek's, Qwen's and speculators' layout, and in `MtpHead`."""


@dataclass(frozen=True, slots=True)
class MtpTensors:
    """The tensors of MTP layers among others."""

    # by the name in the file, the number of the MTP layer from 0 on, and the name within `MtpHead`. Each expert still
    # has its own tensor.
    places: dict[str, tuple[int, str]]

    @property
    def layers(self) -> int:
        """The number of MTP layers."""
        return len({layer for layer, _ in self.places.values()})

    @property
    def first(self) -> dict[str, str]:
        """The tensors of the first layer: from the name in the file to that within `MtpHead`."""
        return {name: own for name, (layer, own) in self.places.items() if layer == 0}


def mtp_tensors(names: Iterable[str], depth: int) -> MtpTensors:
    """The tensors of MTP layers, of a target with ``depth`` decoder layers, among these names."""
    places = {}
    for name in names:
        if found := _OTHERS.fullmatch(name):
            layer = int(found["layer"] or found["number"] or 0)
        elif (found := _DEEPSEEK.fullmatch(name)) and int(found["layer"]) >= depth:
            layer = int(found["layer"]) - depth
        else:
            continue
        module, _, parameter = found["rest"].rpartition(".")
        places[name] = layer, f"{_PARTS[module]}.{parameter}" if module in _PARTS else f"block.{found['rest']}"
    return MtpTensors(places)


def mtp_in(checkpoint: Checkpoint) -> MtpTensors:
    """The MTP layers in a target's own files; of a target in the hub, no weights are downloaded.

    Raises:
        ModelError: it has none, or its files are missing or damaged.
    """
    settings = checkpoint.settings()
    text = settings.get("text_config")
    depth = (text if isinstance(text, dict) else settings).get("num_hidden_layers")
    names = checkpoint.tensor_files()
    # Without a depth, no number of a layer is beyond it.
    found = mtp_tensors(names, depth if isinstance(depth, int) else 1 << 31)
    if not found.first:
        other = next((f" (it has {name}, of a layout that is not known)" for name in names if "mtp" in name), "")
        raise ModelError(
            f"{checkpoint} has no MTP layers in its files{other}.",
            "Draft with a small model or another kind of head. Some conversions leave MTP layers out: look for a "
            "checkpoint that has them.",
        )
    return found


def read_mtp(checkpoint: Checkpoint) -> "dict[str, torch.Tensor]":
    """The tensors of the first MTP layer in a target's own files, by their names there; nothing else is read.

    Raises:
        ModelError: as for `mtp_in`.
    """
    return checkpoint.read(mtp_in(checkpoint).first)
