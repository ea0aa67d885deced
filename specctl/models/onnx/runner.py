"""A runner whose passes are onnxruntime's."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime

from specctl.models.onnx.passes import HostMemory, Memory, PackedPasses, Passes, Results, open_session
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward, joined
from specctl.models.passes.preparation_time import preparing
from specctl.models.passes.tree_sight import TreeSight
from specctl.models.passes.watching import LAST
from specctl.models.running.runner import Runner
from specctl.models.running.threads import fastest, small_round, timed

if TYPE_CHECKING:
    import torch

CAPACITY = 256
"""Tokens to make room for at first; the buffers double when they are full."""
SMALL = 64 << 20
"""Bytes of a graph with its weights up to which several of it are opened, each with weights of its own, for passes over
fewer sequences and for those that tell signals."""
WORTH = 100
"""Passes that wanted to tell signals before a graph is opened that does."""
PIECE = 512
"""Tokens of a prompt that go through the graph at once, so that attention's scratch memory stays small."""


class OnnxRunner(Runner):
    """A `Slot` over one key-value buffer: a pass writes in place, a rollback moves a counter.

    Args:
        passes: of the model's graph.
        vocabulary: as for `EagerPasses`.
        context: the most tokens of a sequence.
        engine: its name in reports.
        preparing_seconds: wall time that was spent on making the graph; None if it was there.
        no_trees: why the graph does not read trees, as the end of a sentence; None if it does.
        threads: of its passes on a CPU.
        draft_vocabulary: the ids of the columns of the graph's logits; None where a column is an id.
        path: of the graph; None where there is only one text for it.

    Attributes:
        passes: of the model's graph.
        facts: the file that may tell of its model; None where no model can be known again by its files.
    """

    length = 0
    engine: str = "onnx"
    preparing_seconds: float | None = None
    threads: int

    def __init__(
        self,
        passes: Passes,
        vocabulary: int,
        context: int,
        *,
        engine: str = "onnx",
        preparing_seconds: float | None = None,
        no_trees: str | None,
        threads: int = 1,
        draft_vocabulary: DraftVocabulary | None = None,
        path: Path | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.context = context
        self.device = passes.memory.device
        self.engine = engine
        self.preparing_seconds = preparing_seconds
        self.no_trees = no_trees
        self.threads = threads
        self.draft_vocabulary = draft_vocabulary
        self.no_rows = self._no_rows(path, passes)
        self._path = path
        self.facts: Path | None = None
        self.passes = passes
        self._missed = 0  # passes that were to tell signals and could not
        self._stepping: onnxruntime.InferenceSession | None = None  # for one token of each of any number of texts
        self.token_bytes = passes.token_bytes
        if path is not None and self.no_rows is None:
            self.rows_bytes = sum(file.stat().st_size for file in path.parent.iterdir())  # a session of their own
        self._tellable = 0 < self.rows_bytes <= SMALL and passes.columns <= vocabulary
        self._watched: tuple[int, ...] = ()
        self._sight = TreeSight()
        self._tree = 0  # the length before the last tree

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        count = len(tokens)
        if count > PIECE:
            return self._in_pieces(tokens, keep, hidden)
        if self.length + count > self.passes.capacity:
            self._grow(self.length + count)
        layers = self._layers if hidden else self._watched
        found = self.passes.run(tokens, self.length, keep, layers, told=keep > 0 and self.tells and self._can_tell())
        self.length += count
        return self._forward(found, keep, hidden)

    def _can_tell(self) -> bool:
        """Whether there is a graph that tells signals, which is opened once some passes have wanted it."""
        if self.passes.telling is None:
            self._missed += self._tellable
            if self._missed <= WORTH or self._path is None:
                return False
            from specctl.models.onnx.store import kept_packed

            try:
                with preparing():
                    graph = kept_packed(self._path, "signals")
                    self.passes.telling = open_session(self._path, self.device, self.threads, graph)
            except (ImportError, OSError):  # nothing to make it with, or no place for it: the host goes on reading
                self._tellable, self._missed = False, 0
        return self.passes.telling is not None

    def _in_pieces(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        parts = []
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            behind = len(tokens) - start - len(piece)
            parts.append(self.extend(piece, max(0, min(keep - behind, len(piece))), hidden=hidden))
        return joined(parts)

    @property
    def _layers(self) -> tuple[int, ...]:
        """The layers whose states a pass gives that is asked for the last one."""
        return tuple(sorted({*self._watched, LAST}))

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        if self.length + len(tokens) > self.passes.capacity:
            self._grow(self.length + len(tokens))
        layers = self._layers if hidden else self._watched
        seen = self._sight.grown(parents, before)
        found = self.passes.run(tokens, self.length, len(tokens), layers, seen=seen)
        self._tree = self.length - before
        self.length += len(tokens)
        return self._forward(found, len(tokens), hidden)

    def keep_path(self, path: Sequence[int]) -> None:
        self.passes.keep_path(self._tree, path)
        self.length = self._tree + len(path)

    def _forward(self, found: Results, keep: int, hidden: bool) -> Forward:
        """What a pass gave: all but numpy's logits and states in memory that the next pass leaves alone."""
        logits, states = found.logits[:keep, : self.vocabulary], found.states
        if not isinstance(logits, np.ndarray):
            logits = self._kept(logits, found)
            states = {layer: self._kept(rows, found) for layer, rows in states.items()}
        if not hidden:
            return Forward(logits, None, states or None, self.draft_vocabulary, None, found.signals)
        import torch  # whoever reads the last states is a network

        last = torch.as_tensor(self._kept(states[LAST][len(states[LAST]) - keep :], found))
        seen = {layer: states[layer] for layer in self._watched} if self._watched else None
        return Forward(logits, last, seen, self.draft_vocabulary)

    def _kept(self, rows: Any, found: Results) -> Any:
        return self.passes.memory.copied(rows) if found.shared else rows

    def watch(self, layers: Iterable[int]) -> None:
        wanted = {*self._watched, *layers}
        if unknown := [layer for layer in wanted if not LAST <= layer < self.passes.layers]:
            raise IndexError(f"the model has {self.passes.layers} layers, and none is number {unknown[0]}")
        self._watched = tuple(sorted(wanted))

    @staticmethod
    def _no_rows(path: Path | None, passes: Passes) -> str | None:
        if path is None or passes.memory.device.type != "cpu":
            return "specctl lets onnxruntime read several texts at once on a CPU only"
        return "its graph reads trees" if passes.trees else None

    def over(self, slots: int, width: int | None = None) -> PackedPasses:
        assert self._path is not None, self.no_rows
        from specctl.models.onnx.store import kept_packed

        path, device, threads = self._path, self.device, self.threads

        def opened(rows: int | None) -> onnxruntime.InferenceSession:
            if rows is None and self._stepping is not None:
                return self._stepping
            session = open_session(path, device, threads, kept_packed(path, rows))
            if rows is None:
                self._stepping = session
            return session

        capacity = min(CAPACITY, self.context)
        alone = self.passes.session if self.passes.narrowest == 1 else None
        ids, apart = self.draft_vocabulary, width is not None
        made = PackedPasses(
            opened(slots),
            alone,
            slots,
            self.vocabulary,
            capacity,
            ids,
            self._watched,
            apart=apart,
            further=opened if self.rows_bytes <= SMALL and not apart else None,
        )
        return made.like(self)

    def fresh(self) -> "OnnxRunner":
        """Another runner of the same graph with an empty cache."""
        passes = self.passes.fresh()
        return OnnxRunner(
            passes,
            self.vocabulary,
            self.context,
            engine=self.engine,
            no_trees=self.no_trees,
            threads=self.threads,
            draft_vocabulary=self.draft_vocabulary,
            path=self._path,
        )

    def rollback(self, length: int) -> None:
        self.length = min(self.length, length)

    def _grow(self, tokens: int) -> None:
        """Let the buffers hold this many tokens."""
        # Padding of a `FixedWidthRunner` may end beyond the context.
        self.passes.grow(max(tokens, 2 * self.passes.capacity), self.length)


NARROWEST = 2
"""The fewest tokens of a pass on a CPU where weights are rounded: onnxruntime, by its own choice, computes a single row
otherwise than several. Measured on the embedded target, its logits differ by 0.015 (8 bits) and 0.023 (4 bits) of their
spread. Passes of two and more agreed bit for bit."""
ONE_THREAD = 16 << 20
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
        from specctl.models.onnx.passes import DeviceMemory

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
        choices = [1] if weight_bytes <= ONE_THREAD else sorted(numbers)
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
