"""What has to be known of a model whose graph is there, so that the model itself need not be loaded."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from specctl.models.files.tokenizer import Spelling
from specctl.models.passes.tree_sight import WINDOWS

VERSION = 3
CHAINS = "its onnx graph was made for chains"
"""Why a graph reads no trees that could have been made so."""
HEAD_CHAINS = "the onnx graph of a draft head reads no trees"
"""Why none of a draft head does."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A model that has a graph.

    Attributes:
        rows: width of its logits.
        context: the most tokens of a sequence.
        eos: the end-of-sequence ids of its generation settings, sorted.
        repetition_penalty: of its generation settings; None where they have other rules about tokens too, or what
            specctl cannot honour.
        everything: whether every layer sees the whole sequence.
        checked: whether it is compared with a fresh read unasked.
        parameters: how many weights it has.
        weight_bytes: what they take in torch.
        spelling: of its tokenizer; None where only transformers can spell.
    """

    rows: int
    context: int
    eos: tuple[int, ...]
    repetition_penalty: float | None
    everything: bool
    checked: bool
    parameters: int
    weight_bytes: int
    spelling: Spelling | None

    @classmethod
    def read(cls, path: Path) -> "Kept | None":
        """What a file says; None if it is not there, of another version, or damaged."""
        try:
            first, _, second = path.read_text(encoding="utf-8").partition("\n")
            if json.loads(first) != _heading(second):
                return None
            told: dict[str, Any] = json.loads(second)
            spelling = None if told["spelling"] is None else Spelling.from_json(told["spelling"])
            return cls(**{**told, "eos": tuple(told["eos"]), "spelling": spelling})
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def write(self, path: Path) -> None:
        """Write a file as a whole: a line about it, and one that it is. Where that cannot be, there is none."""
        told = json.dumps(asdict(self))
        new = path.with_name(f".{path.name}-{os.getpid()}")
        try:
            new.write_text(f"{json.dumps(_heading(told))}\n{told}", encoding="utf-8")
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)


def _heading(told: str) -> dict[str, int]:
    return {"schema_version": VERSION, "sum": crc32(told.encode())}


def no_tree_graph(everything: bool, kind: str, quantize: str | None) -> str | None:
    """Why the graph of a model of which this is known cannot read trees, as the end of a sentence; None if it can.

    A quantised graph rounds what its products read to 8 bits. A branch of a tree stands elsewhere in the cache than a
    chain does, and its logits were measured to differ from the chain's: by 0.03 of their spread on the embedded target,
    where those of a graph that is not quantised differ by 4e-6.

    Args:
        everything: whether every layer sees the whole sequence.
        kind: of its device, such as ``cpu``.
        quantize: how the graph's weights are rounded.
    """
    if quantize is not None:
        return f"onnxruntime computes something else for the branches of a tree where weights are {quantize}"
    if not everything:
        return WINDOWS
    if kind != "cpu":
        return "specctl lets onnxruntime read trees on a CPU only"
    return None
