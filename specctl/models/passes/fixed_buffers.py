"""Passes over a KV cache at fixed addresses, which can be compiled and captured."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache

from specctl.models.passes.buffer_layers import Cursor, FixedLayer
from specctl.models.passes.compilation import Compiler
from specctl.models.passes.masks import aligned
from specctl.models.passes.synchronisation import sent
from specctl.models.passes.token_reader import Token, TokenReader
from specctl.models.passes.tree_sight import WIDEST

SPARE = 256
STEP = 64
"""Buffers have a multiple of so many slots."""
PIECE = 512
"""Tokens of a prompt that go through the model at once."""


@dataclass(frozen=True, slots=True)
class PassKind:
    """The properties by which passes need different compiled code.

    Attributes:
        width: tokens in the pass; 0 for any number above 1, which one compiled pass covers.
        hidden: whether hidden states are wanted.
        reader: reads one token's pass within it; None for a pass that gives logits.
        rows: how many of its further arguments, from the first, have a row for each token.
        tree: whether the first of them says which tokens of a tree each token sees.
    """

    width: int
    hidden: bool = False
    reader: TokenReader | None = None
    rows: int = 0
    tree: bool = False


class FixedBuffers(ABC):
    """Preallocated buffers: a step writes in place, a rollback moves a counter, addresses stay.

    Addresses change only when a sequence outgrows the buffers.

    Args:
        layers: how many layers keep keys and values.
        vocabulary: V, the length of a row of logits.
        context: the most tokens of a sequence.
        device: of the network.
        capacity: tokens to make room for at first.
        compiler: compiles each kind of pass when it first runs; None to run uncompiled.
    """

    length = 0
    _slack = 0  # slots beyond a sequence's end that a pass may write to

    def __init__(
        self,
        layers: int,
        vocabulary: int,
        context: int,
        device: torch.device,
        *,
        capacity: int = SPARE,
        compiler: Compiler | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.context = context
        self.device = device
        self._compiler = compiler
        self._compiled: dict[PassKind, Callable[..., Any]] = {}
        self._cursor = Cursor()
        self._capacity = self._room_for(min(capacity, context))
        # One slot more than any pass attends to: a pass over the whole buffer would be compiled separately.
        self._layers = [FixedLayer(self._cursor, self._capacity + 1) for _ in range(layers)]
        self._cache = Cache(layers=list(self._layers))
        self._slots = self._numbered(self._capacity)

    @property
    def engine(self) -> str:
        return "static" if self._compiler is None else "static, compiled"

    @property
    def preparing_seconds(self) -> float | None:
        """Wall time spent on compiling so far; None if passes are not compiled."""
        return None if self._compiler is None else self._compiler.seconds

    @property
    def widest_read(self) -> int:
        """The most tokens that are read within their pass: several would have another pass compiled."""
        return 1

    @property
    def specialises(self) -> bool:
        """Whether every reader has a pass of its own compiled or captured."""
        return self.preparing_seconds is not None

    @abstractmethod
    def _pass(self, kind: PassKind, keep: int = 0) -> Callable[..., Any]:
        """A function of ids ``(1, T)``, positions ``(T,)``, slots ``(S,)`` from 0 on, and further arguments.

        Repeating it has no further effect, since it writes the same entries again. It gives three results, tensors, a
        dictionary of them or None. Without a reader the first is the logits of the last ``keep`` tokens, or of all for
        0, and the second their hidden states; with one these are what the reader gives.
        """

    def _run(self, kind: PassKind, tokens: Sequence[Token], *given: torch.Tensor | float | None) -> Any:
        """One short pass, compiled if there is a compiler and an earlier pass has made the buffers.

        A token that is on the device is the pass's only one. ``given`` are the tokens' rows, if it reads any, then a
        reader's uniform and previous numbers, if it has one.
        """
        return self._run_once(kind, tokens, *given)

    def _run_once(self, kind: PassKind, tokens: Sequence[Token], *given: torch.Tensor | float | None) -> Any:
        """`_run` of a pass that is not worth more preparation, such as a prompt's."""
        ids = _ids(tokens, self.device)
        end = self.length + len(tokens)
        there = [self._filled(value) if isinstance(value, float) else value for value in given]
        # A copy, because a view that begins at 0 would be compiled separately.
        positions = self._slots[self.length : end].clone()
        return self._best(kind, ids, positions, self._slots[: aligned(end)], *there)

    def _best(
        self,
        kind: PassKind,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        *more: torch.Tensor | None,
    ) -> Any:
        given = (ids, positions, slots, *more)
        kind = replace(kind, width=1 if kind.width == 1 else 0)
        # A size of 1 would be compiled separately, which a sequence's first token is not worth.
        if self._compiler is None or not self._layers[0].is_initialized or len(slots) == 1:
            return self._pass(kind)(*given)
        step = self._compiled.get(kind)
        if step is None:
            buffers = [buffer for layer in self._layers for buffer in (layer.keys, layer.values)]
            rows = more[: kind.rows]
            single = kind.width == 1
            step = self._compiled[kind] = self._compiler.compiled(self._pass(kind), given, buffers, single, rows)
        return step(*given)

    def _filled(self, number: float) -> torch.Tensor:
        """A number of the host as ``()`` float64 on the device, without a copy that would be waited for."""
        return torch.full((), number, dtype=torch.float64, device=self.device)

    def _pieces(self, count: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Each piece of ``count`` tokens of a prompt, its positions, and the slots that its pass looks at."""
        for start in range(0, count, PIECE):
            end = min(start + PIECE, count)
            yield (
                slice(start, end),
                self._slots[self.length + start : self.length + end],
                self._slots[: aligned(self.length + end)],
            )

    def _holds(self, tokens: int) -> bool:
        """Whether the buffers have room for this many tokens."""
        return tokens + self._slack <= self._capacity

    def _room_for(self, tokens: int) -> int:
        """Slots for this many tokens, such that the steps between rows of the buffers take few values."""
        return -(-(tokens + self._slack) // STEP) * STEP

    def _reserve(self, tokens: int) -> None:
        """Grow the buffers to hold this many tokens.

        Raises:
            torch.OutOfMemoryError: what is cached is then lost; the next pass makes all buffers anew.
        """
        if self._holds(tokens):
            return
        capacity = self._room_for(max(tokens, min(tokens + max(SPARE, tokens // 2), self.context)))
        self._capacity = 0  # until every layer has it
        for layer in self._layers:
            layer.grow(capacity + 1, self.length)
        self._slots = self._numbered(capacity)
        self._capacity = capacity

    def _numbered(self, count: int) -> torch.Tensor:  # (count,)
        # Inference tensors differ from the first, normal ones, and passes would be compiled again for them.
        with torch.inference_mode(False):
            return torch.arange(count, device=self.device)


def width_of(tokens: Sequence[Token]) -> int:
    """The width of a `PassKind` for these tokens, at most `WIDEST`."""
    assert len(tokens) <= WIDEST
    return 1 if len(tokens) == 1 else 0


def _ids(tokens: Sequence[Token], device: torch.device) -> torch.Tensor:  # (1, T)
    first = tokens[0]
    return (
        first.long().view(1, 1)
        if isinstance(first, torch.Tensor)
        else sent([int(token) for token in tokens], device)[None]
    )
