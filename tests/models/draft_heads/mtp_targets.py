"""The tiny targets whose MTP layers references have run, and passes over a fixed cache."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel

from specctl.models.draft_heads.chain import ChainPass
from specctl.models.draft_heads.file_layout import read_head
from specctl.models.draft_heads.mtp import MtpHead
from specctl.models.draft_heads.mtp_tensors import read_mtp
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.passes.fixed_buffers import Cursor, FixedLayer

FOLDER = Path(__file__).parents[2] / "data" / "draft_heads" / "mtp"
IN_SHARDS = ("glm4_moe", "deepseek_v3")
WITH_SPECULATORS = ("qwen3_next", "qwen3_5_text")
KINDS = (*IN_SHARDS, *WITH_SPECULATORS)


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(str(folder), "target", None, folder, "folder")


@cache
def target_of(kind: str) -> PreTrainedModel:
    with torch.inference_mode(False):
        return AutoModelForCausalLM.from_pretrained(FOLDER / kind, dtype=torch.float32).eval()


def shards_of(kind: str) -> dict[str, torch.Tensor]:
    return read_mtp(checkpoint(FOLDER / kind))


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def head_of(kind: str) -> MtpHead:
    return read_head("mtp", config_of(FOLDER / kind), shards_of(kind), target_of(kind))


def alone(kind: str) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Configuration and tensors of the same head in the layout of speculators."""
    folder = FOLDER / kind / "speculators"
    return config_of(folder), load_file(folder / "model.safetensors")


def expected_of(kind: str) -> dict[str, torch.Tensor]:
    return load_file(FOLDER / kind / "expected.safetensors")


class Passes:
    """Passes of one head over one sequence; slot 0 is attended by nobody."""

    def __init__(self, head: MtpHead, capacity: int = 32) -> None:
        self._head, self._cursor = head, Cursor()
        self.layer = FixedLayer(self._cursor, capacity)
        self._cache = Cache(layers=[self.layer])

    def __call__(self, ids: torch.Tensor, rows: torch.Tensor, start: int, keep: int = 0) -> ChainPass:
        """Read ids ``(T,)`` at positions from ``start`` on, with the rows ``(T, H)`` of the places before them."""
        positions = torch.arange(start, start + len(ids))
        slots = torch.arange(start + len(ids))
        self._cursor.positions, self._cursor.span = positions, len(slots)
        mask = (slots <= positions[:, None]) & (slots > 0)
        with torch.inference_mode():
            return self._head(ids[None], rows[None], positions, mask[None, None], self._cache, keep)
