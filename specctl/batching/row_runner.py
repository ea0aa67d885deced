"""One of several sequences that a model reads in the same passes."""

from collections.abc import Callable, Sequence

from specctl.models.passes.forward import Forward, joined
from specctl.models.running.runner import RowRequest, Runner

PIECE = 512
"""Tokens of a prompt that go through one pass at once: all other sequences wait for it."""


class RowRunner(Runner):
    """A `Runner` of one sequence, whose passes another makes together with those of others.

    Args:
        model: the runner of the model for one sequence, whose context, device and engine this one has.
        row: the sequence's number.
        ask: waits for a pass and gives its outputs.
    """

    no_trees = "a batch reads chains"

    def __init__(self, model: Runner, row: int, ask: Callable[[RowRequest], Forward]) -> None:
        self.context, self.device = model.context, model.device
        self.runs_model, self.verifies, self.threads = model.runs_model, model.verifies, model.threads
        self._engine = model.engine
        self._row, self._ask = row, ask
        self._length = 0

    @property
    def engine(self) -> str:
        return self._engine

    @property
    def length(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        parts = []
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            behind = len(tokens) - start - len(piece)
            wanted = max(0, min(keep - behind, len(piece)))
            parts.append(self._ask(RowRequest(self._row, self._length, piece, wanted, hidden)))
            self._length += len(piece)
        return parts[0] if len(parts) == 1 else joined(parts)

    def rollback(self, length: int) -> None:
        self._length = min(self._length, length)
