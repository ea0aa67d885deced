"""The tensors of MTP heads in files: within a target's shards, or alone in speculators' layout."""

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
"""The layouts of Qwen, with a single set of modules outside the decoder layers, and of speculators."""
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
"""Modules outside the decoder layer: their names in the layouts of DeepSeek, Qwen and speculators, and in `MtpHead`."""


@dataclass(frozen=True, slots=True)
class MtpTensors:
    """The tensors of MTP layers among others."""

    # by name in the file: the index of the MTP layer, and the name within `MtpHead`. Experts are not fused yet.
    places: dict[str, tuple[int, str]]

    @property
    def layers(self) -> int:
        """The number of MTP layers."""
        return len({layer for layer, _ in self.places.values()})

    @property
    def first(self) -> dict[str, str]:
        """The first layer's tensors: names in the file mapped to names within `MtpHead`."""
        return {name: own for name, (layer, own) in self.places.items() if layer == 0}


def mtp_tensors(names: Iterable[str], depth: int) -> MtpTensors:
    """The MTP layers' tensors among these names, for a target with ``depth`` decoder layers."""
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
    """The MTP layers in a target's own files; weights on the hub are not downloaded.

    Raises:
        ModelError: it has none, or its files are missing or damaged.
    """
    settings = checkpoint.settings()
    text = settings.get("text_config")
    depth = (text if isinstance(text, dict) else settings).get("num_hidden_layers")
    names = checkpoint.tensor_files()
    # Without a depth no layer index exceeds it.
    found = mtp_tensors(names, depth if isinstance(depth, int) else 1 << 31)
    if not found.first:
        other = next((f" (it has {name}, of an unknown layout)" for name in names if "mtp" in name), "")
        raise ModelError(
            f"{checkpoint} has no MTP layers in its files{other}.",
            "Draft with a small model or another kind of head. Some conversions leave MTP layers out: look for a "
            "checkpoint that has them.",
        )
    return found


def read_mtp(checkpoint: Checkpoint) -> "dict[str, torch.Tensor]":
    """Read the first MTP layer's tensors from a target's own files, by their names there, and nothing else.

    Raises:
        ModelError: as for `mtp_in`.
    """
    return checkpoint.read(mtp_in(checkpoint).first)
