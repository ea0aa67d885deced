"""Runners of a graph that is there."""

from dataclasses import dataclass
from pathlib import Path

import torch

from specctl.models.onnx.onnx_passes import Passes, open_session
from specctl.models.onnx.onnx_runner import CAPACITY, OnnxRunner


@dataclass(frozen=True, slots=True)
class Opening:
    """How a graph is to run.

    Attributes:
        device: where it runs.
        vocabulary: the pair's shared vocabulary.
        context: the most tokens of a sequence.
        quantize: how its weights are rounded, or None.
        no_trees: as of `OnnxRunner`.
    """

    device: torch.device
    vocabulary: int
    context: int
    quantize: str | None
    no_trees: str | None

    @property
    def narrowest(self) -> int:
        """The fewest tokens of a pass."""
        if self.quantize is None or self.device.type != "cpu":
            return 1
        from specctl.models.onnx.graph_quantization import NARROWEST

        return NARROWEST

    def runner(self, path: Path, seconds: float | None = None, threads: int = 1) -> OnnxRunner:
        """A runner with a number of threads.

        Args:
            path: of the graph.
            seconds: wall time that was spent on making it.
            threads: of its passes on a CPU.
        """
        session = open_session(path, self.device, threads)
        return OnnxRunner(
            Passes(session, self.device, min(CAPACITY, self.context), self.narrowest),
            self.vocabulary,
            self.context,
            self.device,
            engine="onnx" if self.quantize is None else f"onnx, {self.quantize}",
            preparing_seconds=seconds,
            no_trees=self.no_trees,
            threads=threads,
        )
