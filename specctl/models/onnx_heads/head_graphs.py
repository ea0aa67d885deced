"""The graphs of a draft head in a folder. No torch here."""

from dataclasses import dataclass, field
from pathlib import Path

from onnxruntime import InferenceSession

from specctl.models.onnx.passes import open_session
from specctl.models.onnx.store import GRAPH
from specctl.models.onnx_heads.sized_graph import SizedGraph
from specctl.models.passes.host_device import HOST

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
    _sessions: dict[str, InferenceSession] = field(init=False, repr=False, compare=False, default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the head needs this one."""
        return (self.folder / name).exists()

    def opened(self, name: str, capacity: int = 0) -> SizedGraph:
        """One of them, ready to run, with room for so many tokens in its cache at first; weights are in memory once."""
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = open_session(self.folder / name, HOST, self.threads)
        return SizedGraph(session, capacity)
