"""The graphs of a draft head in a folder. No torch here."""

from dataclasses import dataclass
from pathlib import Path

from specctl.models.onnx.store import GRAPH
from specctl.models.onnx_heads.sized_graph import SizedGraph

PASS, FUSE, REMEMBER, ROW, CONFIDENCE = GRAPH, "fuse.onnx", "remember.onnx", "row.onnx", "confidence.onnx"
"""Their files; every head has the first, and the others as it needs them."""


@dataclass(frozen=True, slots=True)
class HeadGraphs:
    """The graphs of a draft head.

    Attributes:
        folder: which they are in.
        threads: of their passes.
        seconds: wall time that was spent on making them; None if they were there.
    """

    folder: Path
    threads: int
    seconds: float | None = None

    def has(self, name: str) -> bool:
        """Whether the head needs this one."""
        return (self.folder / name).exists()

    def opened(self, name: str, capacity: int = 0) -> SizedGraph:
        """One of them, ready to run, with room for so many tokens in its cache at first."""
        return SizedGraph(self.folder / name, self.threads, capacity)
