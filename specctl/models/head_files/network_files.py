"""Writing a draft head's network: its tensors and its configuration."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from specctl.outputs import naming, write_whole


def write_network(folder: Path, weights: Mapping[str, torch.Tensor], described: Mapping[str, Any]) -> None:
    """Write model.safetensors, and last config.json, each file completely or not at all.

    Args:
        folder: made if it does not exist.
        weights: by the names that the file is to have.
        described: the contents of config.json.

    Raises:
        OutputError: a file cannot be written.
    """
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    write_whole(folder / "model.safetensors", save(stored, metadata={"format": "pt"}))
    write_whole(folder / "config.json", json.dumps(described, indent=2) + "\n")
