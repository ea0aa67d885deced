"""Passes over preallocated buffers, captured as CUDA graphs and replayed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specctl.models.passes.compilation import Compiler
from specctl.models.passes.cuda_capture import Capture, CudaCapture, why_uncaptured
from specctl.models.passes.fixed_buffers import SHORTEST, FixedBuffers, PassKind, span_class
from specctl.models.passes.forward import Token
from specctl.models.passes.masks import aligned
from specctl.models.passes.preparation_time import preparing
from specctl.models.passes.synchronisation import staged
from specctl.models.passes.tree_sight import WIDEST
from specctl.models.passes.watching import LayerWatch
from specctl.models.running.passes import Passes, Request
from specctl.models.running.static import WIDE, BatchOutputs, Shape, StaticBatch, StaticPasses

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, WIDEST)  # Passes are padded to the next of these widths
CLASSES = tuple(next(known for known in WIDTHS if known >= width) for width in range(WIDEST + 1))
"""The padded width of each width."""
UNPADDED = sum(width == place for place, width in enumerate(WIDTHS, start=1))
"""Passes of at most this many tokens are not padded."""
READERS = 8  # The most readers with captured passes: each record with its own temperature adds one


def width_class(width: int) -> int:
    return CLASSES[width]


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured pass with its own input tensors, filled before each replay."""

    # ``(2 T + U,)`` float64 for ids, positions and host numbers alike: T ids, T positions and U numbers, in one copy
    # from the host
    given: torch.Tensor
    more: tuple[torch.Tensor | None, ...]  # further arguments; None for host numbers and missing ones
    replay: Callable[[], Any]  # runs the pass; the next replay overwrites the results


class Capturing(FixedBuffers):
    """Passes over fixed buffers that are captured by class on first use and replayed from then on.

    A class is a width and a span. A pass is padded to the width after its tokens, where no token attends to the padding
    and later tokens overwrite it. A span is a number of slots that covers the sequence; those after a token are masked.
    A draft step is captured with its reader, so that a draft token and its signals take one replay and one small
    transfer. The draw's random number and the previous numbers are copied in before a replay.

    Args:
        network: the model or draft head, in the form that the capturing runner takes.
        vocabulary: as for `EagerPasses`.
        capture: a separate `CudaCapture`, or a stand-in for it.
        name: the network's name for messages.
        compiler: compiles passes before they are captured; None to capture them uncompiled.
        notice: called with one line when a pass cannot be captured; from then on passes run uncaptured.
        progress: called with the name of each pass that is captured.
    """

    captures = True
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
        # The next class in the runner's bases takes the network as its first argument.
        runner: Any = super()
        runner.__init__(network, vocabulary, capacity=2 * SHORTEST, compiler=compiler)
        self._capture: Capture | None = capture
        self._widest = max(super().widest_sample, UNPADDED)
        self._captured: dict[tuple[PassKind, int], Captured] = {}
        self._name, self._notice, self._progress = name, notice, progress
        self._seconds = 0.0

    @property
    def engine(self) -> str:
        return super().engine.replace("static", "graph")

    @property
    def preparing_seconds(self) -> float | None:
        """Wall time spent on compiling and capturing so far; None once a pass could not be captured."""
        return None if self._capture is None else self._seconds

    @property
    def widest_sample(self) -> int:
        """Passes of several tokens can sample too, as long as they are not padded."""
        return self._widest if self._capture is not None else super().widest_sample

    @property
    def runs_ahead(self) -> bool:
        """Whether the next draft step may start before the last one's numbers are read. True: a replay is a single
        call.
        """
        return self._capture is not None

    def _run(self, kind: PassKind, tokens: Sequence[Token], *given: torch.Tensor | float | None) -> Any:
        if self._capture is None or not self._layers[0].is_initialized:
            return super()._run(kind, tokens, *given)
        width = width_class(len(tokens))
        if kind.width != width:
            kind = replace(kind, width=width)
        span = min(span_class(self.length + width), aligned(self.context) + WIDEST)
        self._reserve(span)
        captured = self._captured.get((kind, span)) or self._new(kind, span, given)
        if captured is None:
            return super()._run(kind, tokens, *given)
        numbers = [value for value in given if isinstance(value, float)]
        known = [0 if isinstance(token, torch.Tensor) else token for token in tokens]
        padded = [*known, *[0] * (width - len(tokens)), *range(self.length, self.length + width), *numbers]
        captured.given.copy_(staged(padded, self.device, torch.float64), non_blocking=True)
        if isinstance(tokens[0], torch.Tensor):
            captured.given[0].copy_(tokens[0])  # the token has not been on the host
        for argument, value in zip(captured.more, given, strict=True):
            if argument is not None and isinstance(value, torch.Tensor):
                filled = argument[: len(value)] if value.dim() else argument  # rows of padding keep old values
                filled.copy_(value)
        results = captured.replay()
        if kind.reader is None:
            return [_copied(result, slice(len(tokens))) for result in results]
        numbers_read, *others = results
        # Read before the next replay, so that they need no copy.
        return [numbers_read, *(_copied(result, slice(None)) for result in others)]

    def _new(self, kind: PassKind, span: int, given: Sequence[torch.Tensor | float | None]) -> Captured | None:
        """Capture a class of pass at the end of the sequence. None if that fails, and then for every later pass.

        Raises:
            RuntimeError: for a reason other than the capture, such as a lack of memory.
        """
        if self._capture is None:
            return None
        self._forget_readers(kind)
        self._progress(f"capturing {self._name} ({kind.width} tokens, {span} slots)")
        width, numbers = kind.width, [isinstance(value, float) for value in given]
        packed = torch.zeros(2 * width + sum(numbers), dtype=torch.float64, device=self.device)
        packed[width : 2 * width].copy_(self._slots[self.length : self.length + width])
        more = [value.clone() if isinstance(value, torch.Tensor) else None for value in given]
        for number, rows in enumerate(more[: kind.rows]):
            if rows is not None:
                more[number] = torch.cat([rows, rows[-1:].expand(width - len(rows), -1)])  # (width, H)
        slots = self._slots[:span]

        def step() -> Any:
            ids, positions = packed[:width].long()[None], packed[width : 2 * width].long()
            rest = iter(packed[2 * width :])
            filled = [next(rest).clone() if number else value for value, number in zip(more, numbers, strict=True)]
            return self._best(kind, ids, positions, slots, *filled)

        began = perf_counter()
        try:
            with preparing():
                replay = self._capture(step)
        except (RuntimeError, UserWarning) as error:
            self._notice(f"{self._name} runs uncaptured from here on: {why_uncaptured(error)}")
            self._capture = None
            self._captured.clear()
            return None
        finally:
            self._seconds += perf_counter() - began
        captured = self._captured[kind, span] = Captured(packed, tuple(more), replay)
        return captured

    def _forget_readers(self, kind: PassKind) -> None:
        """Drop all passes if there are too many readers: a graph freed alone would free memory that the others use."""
        readers = {known.reader for known, _ in self._captured if known.reader is not None}
        if kind.reader is not None and kind.reader not in readers and len(readers) >= READERS:
            self._captured.clear()

    def _reserve(self, tokens: int) -> None:
        if self._holds(tokens):
            return
        self._captured.clear()  # captured passes write to the old buffers
        super()._reserve(tokens)


def _copied(result: Any, kept: slice) -> Any:
    """A copy of some rows of a result, which the next replay does not overwrite."""
    if isinstance(result, dict):
        return {name: _copied(value, kept) for name, value in result.items()}
    return None if result is None else result[kept].clone()


class GraphPasses(Capturing, StaticPasses):
    """Captured `StaticPasses`; the model must have no `obstacle`."""

    def over(self, slots: int, width: int | None = None) -> Passes:
        if self._capture is None:
            return super().over(slots, width)

        return GraphBatch(
            self._model,
            slots,
            self.vocabulary,
            self._watch,
            self._last,
            # Graphs of one capture are dropped together, and these go with their passes.
            CudaCapture(self.device) if isinstance(self._capture, CudaCapture) else self._capture,
            self._notice,
            self._name,
            width,
        ).like(self)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A pass over ``given`` of `StaticBatch._packed`, filled before each replay, which overwrites the results."""

    given: torch.Tensor
    replay: Callable[[], Any]


class GraphBatch(StaticBatch):
    """A `StaticBatch` with passes captured by class, so that a pass over any sequences is a copy and a replay.

    A class is a number of sequences (a power of two, or all), a width, a span, and whether logits are wanted for the
    last tokens only or for all. Missing sequences are padding.

    Args:
        model, slots, vocabulary, watch, last, width: see `StaticBatch`.
        capture: a separate `CudaCapture`, or a stand-in for it.
        notice: called with one line when a pass cannot be captured; from then on passes run uncaptured.
        name: the model's name for messages.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        vocabulary: int,
        watch: LayerWatch,
        last: LayerWatch,
        capture: Capture,
        notice: Callable[[str], None],
        name: str,
        width: int | None = None,
    ) -> None:
        super().__init__(model, slots, vocabulary, watch, last, width)
        self._capture: Capture | None = capture
        self._captured: dict[tuple[Shape, bool], _Captured] = {}
        self._notice, self._name = notice, name

    @property
    def _made(self) -> bool:
        """Whether all buffers exist: memory may have run out between two layers of the first pass."""
        return all(layer.is_initialized for layer in self._layers)

    def _shape(self, requests: Sequence[Request], longest: int) -> Shape:
        shape = super()._shape(requests, longest)
        if self._capture is None or shape.width > WIDE or not self._made:
            return shape
        width = width_class(shape.width)
        count = min(1 << (shape.count - 1).bit_length(), self.slots)
        return Shape(count, width, self._span(shape.span), 1 if shape.keep == 1 else width)

    def _results(self, shape: Shape, packed: Sequence[int], hidden: bool) -> BatchOutputs:
        captured = None
        if shape.width <= WIDE and self._made:
            captured = self._captured.get((shape, hidden)) or self._new(shape, packed, hidden)
        if captured is None:
            return super()._results(shape, packed, hidden)
        captured.given.copy_(staged(packed, self._device, torch.int64), non_blocking=True)
        logits, states, last = captured.replay()
        # Texts hold on to their results during the others' next pass.
        seen = None if states is None else {layer: rows.clone() for layer, rows in states.items()}
        return logits.clone(), seen, None if last is None else last.clone()

    def _new(self, shape: Shape, packed: Sequence[int], hidden: bool) -> _Captured | None:
        """Capture a class of pass. None if that fails, and then for every later one.

        Raises:
            RuntimeError: for a reason other than the capture, such as a lack of memory.
        """
        if self._capture is None:
            return None
        given = torch.zeros(len(packed), dtype=torch.int64, device=self._device)
        given.copy_(staged(packed, self._device, torch.int64), non_blocking=True)
        try:
            with preparing():
                replay = self._capture(lambda: self._network(shape, given, hidden))
        except (RuntimeError, UserWarning) as error:
            self._notice(f"{self._name} runs uncaptured from here on: {why_uncaptured(error)}")
            self._capture = None
            self._captured.clear()
            return None
        captured = self._captured[shape, hidden] = _Captured(given, replay)
        return captured

    def _reserve(self, slots: int) -> None:
        if slots > self._capacity:
            self._captured.clear()  # captured passes write to the old buffers
        super()._reserve(slots)
