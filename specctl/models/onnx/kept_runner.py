"""Runners of a graph that is there."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from specctl.models.onnx.host_memory import HostMemory, Memory
from specctl.models.onnx.onnx_passes import Passes, open_session
from specctl.models.onnx.onnx_runner import CAPACITY, OnnxRunner
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.running.threads import fastest, small_round, timed

if TYPE_CHECKING:
    import torch

NARROWEST = 2
"""The fewest tokens of a pass on a CPU where weights are rounded: onnxruntime, by its own choice, computes a single row
otherwise than several. Measured on the embedded target, its logits differ by 0.015 (8 bits) and 0.023 (4 bits) of their
spread. Passes of two and more agreed bit for bit."""
SMALL = 16 << 20
"""Bytes of weights up to which a model runs with one thread: its passes are over before others have their part."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a graph is to run.

    Attributes:
        device: where it runs.
        vocabulary: the pair's shared vocabulary.
        context: the most tokens of a sequence.
        quantize: how its weights are rounded, or None.
        no_trees: as of `OnnxRunner`.
        draft_vocabulary: the ids of the columns of its logits; None where a column is an id.
    """

    device: "torch.device"
    vocabulary: int
    context: int
    quantize: str | None
    no_trees: str | None
    draft_vocabulary: DraftVocabulary | None = None

    @property
    def narrowest(self) -> int:
        """The fewest tokens of a pass."""
        return 1 if self.quantize is None or self.device.type != "cpu" else NARROWEST

    @property
    def memory(self) -> Memory:
        """Memory of the device."""
        if self.device.type == "cpu":
            return HostMemory()
        from specctl.models.onnx.device_memory import DeviceMemory

        return DeviceMemory(self.device)

    def runner(self, path: Path, seconds: float | None = None, threads: int = 1) -> OnnxRunner:
        """A runner with a number of threads.

        Args:
            path: of the graph.
            seconds: wall time that was spent on making it.
            threads: of its passes on a CPU.
        """
        session = open_session(path, self.device, threads)
        return OnnxRunner(
            Passes(session, self.memory, min(CAPACITY, self.context), self.narrowest),
            self.vocabulary,
            self.context,
            engine="onnx" if self.quantize is None else f"onnx, {self.quantize}",
            preparing_seconds=seconds,
            no_trees=self.no_trees,
            threads=threads,
            draft_vocabulary=self.draft_vocabulary,
            path=path,
        )

    def fastest(self, path: Path, weight_bytes: int, numbers: Set[int], seconds: float | None = None) -> OnnxRunner:
        """The runner whose number of threads takes the least time.

        They are tried one after the other, for each holds the weights in a form of its own.

        Args:
            path: of the graph.
            weight_bytes: of its model.
            numbers: of threads, to choose from; a small model has one all the same.
            seconds: wall time that was spent on making it.
        """
        choices = [1] if weight_bytes <= SMALL else sorted(numbers)
        if len(choices) == 1:
            return self.runner(path, seconds, choices[0])
        tried: dict[int, list[float]] = {}
        runner: OnnxRunner | None = None
        for threads in choices:
            runner = None  # before the next is opened
            runner = self.runner(path, seconds, threads)
            tried |= self._tried(runner, threads)
        if (best := fastest(tried)) != choices[-1]:
            runner = None
            runner = self.runner(path, seconds, best)
        assert runner is not None, "there is a choice"
        runner.rollback(0)
        runner.tried = {threads: median(found) * 1e3 for threads, found in tried.items()}
        return runner

    def _tried(self, runner: OnnxRunner, threads: int) -> dict[int, list[float]]:
        """Seconds of small rounds, by their number of threads."""
        play = small_round([runner], self.vocabulary)
        return timed(lambda _: play(), [threads])
