"""Passes over several sequences, captured as CUDA graphs and replayed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specctl.models.passes.cuda_capture import Capture, why_uncaptured
from specctl.models.passes.preparation_time import preparing
from specctl.models.passes.synchronisation import staged
from specctl.models.passes.watching import LayerWatch
from specctl.models.running.graph import width_class
from specctl.models.running.passes import Request
from specctl.models.running.row_passes.fixed_rows import WIDE, FixedRows, Found, Shape


@dataclass(frozen=True, slots=True)
class _Captured:
    """A pass over ``given`` of `FixedRows._packed`, filled in before each replay, which overwrites its results."""

    given: torch.Tensor
    replay: Callable[[], Any]


class CapturedRows(FixedRows):
    """`FixedRows` whose passes are captured by classes, so that one over any sequences is a copy and a replay.

    A class is a number of sequences, a power of two or all there are; a width; a span; and whether logits of the last
    tokens alone are wanted, or of all. Missing sequences are padding.

    Args:
        model, slots, vocabulary, watch, last, width: as there.
        capture: a `CudaCapture` of its own, or a stand-in for it.
        notice: called with one line when a pass cannot be captured; from then on passes run uncaptured.
        name: the model's, in messages.
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
        """Whether all buffers are there: memory may have run out between two layers of the first pass."""
        return all(layer.is_initialized for layer in self._layers)

    def _shape(self, requests: Sequence[Request], longest: int) -> Shape:
        shape = super()._shape(requests, longest)
        if self._capture is None or shape.width > WIDE or not self._made:
            return shape
        width = width_class(shape.width)
        count = min(1 << (shape.count - 1).bit_length(), self.slots)
        return Shape(count, width, self._span(shape.span), 1 if shape.keep == 1 else width)

    def _results(self, shape: Shape, packed: Sequence[int], hidden: bool) -> Found:
        captured = None
        if shape.width <= WIDE and self._made:
            captured = self._captured.get((shape, hidden)) or self._new(shape, packed, hidden)
        if captured is None:
            return super()._results(shape, packed, hidden)
        captured.given.copy_(staged(packed, self._device, torch.int64), non_blocking=True)
        logits, states, last = captured.replay()
        # Texts hold on to what they were given while others have the next pass.
        seen = None if states is None else {layer: rows.clone() for layer, rows in states.items()}
        return logits.clone(), seen, None if last is None else last.clone()

    def _new(self, shape: Shape, packed: Sequence[int], hidden: bool) -> _Captured | None:
        """Capture a class of pass; None if that fails, and then for every later one.

        Raises:
            RuntimeError: for another reason than the capture, such as memory that has run out.
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
