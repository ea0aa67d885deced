"""The static runner with every pass captured as a CUDA graph and replayed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from specctl.models.running.compilation import Compiler
from specctl.models.running.fixed_buffers import FixedBufferRunner, PassKind
from specctl.models.running.masks import WIDEST
from specctl.models.running.static import StaticRunner
from specctl.models.running.token_reader import Token

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, WIDEST)
"""Passes are padded to the next of these."""
SHORTEST = 256
"""Spans are powers of two from here on, because a graph attends to a fixed number of slots."""

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Runs a pass over fixed tensors; returns a function that runs it again and leaves its results in the same tensors."""


def width_class(width: int) -> int:
    return next(known for known in WIDTHS if known >= width)


def span_class(slots: int) -> int:
    return max(SHORTEST, 1 << (slots - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Captured:
    """A pass over tensors of its own, filled in before each replay.

    Attributes:
        ids, positions: ``(1, T)`` and ``(T,)`` int64.
        more: further arguments.
        replay: runs the pass; the next replay overwrites its results.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    more: tuple[torch.Tensor | None, ...]
    replay: Callable[[], Any]


class CudaCapture:
    """Captures passes as CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries initialise in their first calls, which cannot be captured
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = step()

        def replay() -> Any:
            graph.replay()
            return results

        return replay


class Capturing(FixedBufferRunner):
    """A runner over fixed buffers that captures each class of pass when it first runs and replays it from then on.

    A class is a width and a span. The tokens of a pass are padded to the width: padding stands behind them, where
    nothing attends to it and later tokens overwrite it. A span is a number of slots that covers the sequence; those
    ahead of a token are masked. A draft step is captured with its reader, so that a draft token and its signals are
    one replay and one small transfer; the draw's randomness and the previous numbers are copied in before a replay.

    Args:
        network: the model or draft head, as the runner takes it that captures.
        vocabulary: as for `EagerRunner`.
        capture: `CudaCapture`, or a stand-in for it.
        name: the network's, in messages.
        compiler: compiles passes before they are captured; None to capture them uncompiled.
        notice: called with one line when a pass cannot be captured; from then on passes run uncaptured.
        progress: called with what is being captured.
    """

    _slack = WIDEST

    def __init__(
        self,
        network: nn.Module,
        vocabulary: int,
        capture: Capture,
        *,
        name: str = "the model",
        compiler: Compiler | None = None,
        notice: Callable[[str], None] = lambda _: None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        # The class that it stands before in a runner's bases: each takes its network first.
        runner: Any = super()
        runner.__init__(network, vocabulary, capacity=2 * SHORTEST, compiler=compiler)
        self._capture: Capture | None = capture
        self._captured: dict[tuple[PassKind, int], Captured] = {}
        self._name, self._notice, self._progress = name, notice, progress
        self._seconds = 0.0

    @property
    def engine(self) -> str:
        return super().engine.replace("static", "graph")

    @property
    def preparing_seconds(self) -> float:
        """Wall time spent on compiling and capturing so far."""
        return self._seconds

    @property
    def prepares(self) -> bool:
        return self._capture is not None

    @property
    def runs_ahead(self) -> bool:
        """Whether the next draft step may be started before the last one's numbers are read: a replay is one call."""
        return self.prepares

    def _run(self, kind: PassKind, tokens: Sequence[Token], *given: torch.Tensor | None) -> Any:
        if self._capture is None or not self._layers[0].is_initialized:
            return super()._run(kind, tokens, *given)
        width = width_class(len(tokens))
        kind = replace(kind, width=width)
        span = min(span_class(self.length + width), self.context + WIDEST)
        self._reserve(span)
        captured = self._captured.get((kind, span)) or self._new(kind, span, given)
        if captured is None:
            return super()._run(kind, tokens, *given)
        if width == 1:
            captured.ids.fill_(tokens[0])  # no copy from the host, and where the id is on the device none to it
        else:
            captured.ids.copy_(torch.tensor([[*tokens, *[0] * (width - len(tokens))]]))
        captured.positions.copy_(self._slots[self.length : self.length + width])
        for argument, value in zip(captured.more, given, strict=True):
            if argument is not None and value is not None:
                filled = argument[: len(value)] if value.dim() else argument  # rows of padding stay as they are
                filled.copy_(value)
        kept = slice(None) if kind.reader is not None else slice(len(tokens))
        return [_copied(result, kept) for result in captured.replay()]

    def _new(self, kind: PassKind, span: int, given: Sequence[torch.Tensor | None]) -> Captured | None:
        """Capture a class of pass at the end of the sequence; None if that fails, and then for every later pass."""
        if self._capture is None:
            return None
        self._progress(f"capturing {self._name} ({kind.width} tokens, {span} slots)")
        began = perf_counter()
        ids = torch.zeros(1, kind.width, dtype=torch.int64, device=self.device)
        positions = self._slots[self.length : self.length + kind.width].clone()
        more = [None if value is None else value.clone() for value in given]
        for number, rows in enumerate(more[: kind.rows]):
            if rows is not None:
                more[number] = torch.cat([rows, rows[-1:].expand(kind.width - len(rows), -1)])  # (width, H)
        slots = self._slots[:span]
        try:
            replay = self._capture(lambda: self._best(kind, ids, positions, slots, *more))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            self._notice(f"{self._name} runs uncaptured from here on: {reason[:200]}")
            self._capture = None
            self._captured.clear()
            return None
        finally:
            self._seconds += perf_counter() - began
        captured = self._captured[kind, span] = Captured(ids, positions, tuple(more), replay)
        return captured

    def _reserve(self, tokens: int) -> None:
        before = self._capacity
        super()._reserve(tokens)
        if self._capacity != before:
            self._captured.clear()  # captured passes write to the old buffers


def _copied(result: Any, kept: slice) -> Any:
    """Some rows of a result, where the next replay does not overwrite them."""
    if isinstance(result, dict):
        return {name: _copied(value, kept) for name, value in result.items()}
    return None if result is None else result[kept].clone()


class GraphRunner(Capturing, StaticRunner):
    """A `StaticRunner` with its passes captured; its model has no `obstacle`."""
