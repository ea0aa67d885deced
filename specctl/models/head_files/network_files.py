"""Writing a draft head's network: what all kinds share, around what each describes of itself.

EAGLE-1 and GliDe are written in the layouts that they were published in, all others in speculators'. vLLM loads both.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.head_files.formats import FORMATS
from specctl.outputs import naming, write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERSION = "0.9.0"
"""The version of speculators whose layout is written."""
AHEAD = 3
"""How many tokens to draft at a time where neither the head nor anything else decides."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """What a head's file says of the model that it drafts for.

    Attributes:
        name: its hub id or path.
        architectures: as in its config.json.
        layers: the configuration of its decoder, which describes an MTP head's layer.
    """

    name: str
    architectures: tuple[str, ...] = ()
    layers: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, model: "PreTrainedModel") -> "Verifier":
        """For a loaded model."""
        named = model.config.architectures or [type(model).__name__]
        return cls(name, tuple(named), model.config.get_text_config(decoder=True).to_dict())


def write_head(folder: Path, head: ChainHead | BlockHead, verifier: Verifier) -> None:
    """Write model.safetensors, and last config.json, each file completely or not at all.

    What the head borrows of its verifier is left out; who loads the head takes it from the verifier.

    Args:
        folder: made if it does not exist.
        head: in the dtype to write it in.
        verifier: the model that it drafts for.

    Raises:
        ValueError: the layout has no words for the head.
        OutputError: a file cannot be written.
    """
    config, weights = described(head, verifier)
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    write_whole(folder / "model.safetensors", save(stored, metadata={"format": "pt"}))
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")


def described(head: ChainHead | BlockHead, verifier: Verifier) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The whole of a head's config.json, and the tensors of its file; see `write_head`."""
    row = FORMATS[head.kind]
    config, weights = row.describe(head, verifier)
    if head.tokens is not None:
        ids = head.tokens.cpu()
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(head.vocabulary, dtype=torch.bool).index_fill(0, ids, True)
    if row.speculators:
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": head.longest or AHEAD,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        config["speculators_model_type"] = row.kind
        config["speculators_version"] = VERSION
        config["speculators_config"] = {
            "algorithm": row.kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        }
    config["dtype"] = str(next(head.parameters()).dtype).removeprefix("torch.")
    return config, weights
