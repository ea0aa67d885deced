"""One of several sequences that a model reads in the same passes."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from specctl.models.passes.forward import Forward, joined
from specctl.models.running.rotating import judged_after, read_after
from specctl.models.running.runner import RowRequest, Runner

if TYPE_CHECKING:
    import torch

    from specctl.batching.read_passes import Reading
    from specctl.models.passes.forward import Numbers
    from specctl.models.passes.token_reader import PassReader, Token, TokenReader

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
    judges = True

    def __init__(self, model: Runner, row: int, ask: Callable[[RowRequest], Any]) -> None:
        self.context, self.device = model.context, model.device
        self.runs_model, self.verifies, self.threads = model.runs_model, model.verifies, model.threads
        self.draft_vocabulary = model.draft_vocabulary
        self._engine = model.engine
        self._row, self._ask = row, ask
        self._length = 0
        self._rotated_as = 0

    @property
    def engine(self) -> str:
        return self._engine

    @property
    def length(self) -> int:
        return self._length

    def rotate_as(self, length: int) -> None:
        self._rotated_as = length

    def _request(self, tokens: Sequence[int], keep: int, hidden: bool, *reader: Any) -> RowRequest:
        return RowRequest(self._row, self._length, tokens, keep, hidden, self._rotated_as, *reader)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        parts: list[Forward] = []
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            behind = len(tokens) - start - len(piece)
            wanted = max(0, min(keep - behind, len(piece)))
            parts.append(self._ask(self._request(piece, wanted, hidden)))
            self._length += len(piece)
        return parts[0] if len(parts) == 1 else joined(parts)

    def extend_judged(
        self, tokens: Sequence[int], keep: int, judge: "PassReader", about: Any, *, hidden: bool = False
    ) -> Any:
        if len(tokens) > PIECE:  # a prompt, with the first draft
            return judged_after(self, tokens, keep, judge, about, hidden=hidden)
        found = self._ask(self._request(tokens, keep, hidden, judge, about))
        self._length += len(tokens)
        return found

    @property
    def widest_read(self) -> int:
        return PIECE

    def read(
        self,
        tokens: "Sequence[Token]",
        reader: "TokenReader",
        uniform: float | None,
        previous: "torch.Tensor | None" = None,
    ) -> "tuple[list[float] | torch.Tensor, Numbers | None]":
        ids = cast("Sequence[int]", tokens)  # no step of a text runs ahead of its host
        if reader.hidden:  # over the last state: a network's, a text at a time
            return read_after(self, ids, reader, uniform, previous)
        found: Reading = self._ask(self._request(ids, 1, False, reader, uniform))
        self._length += len(ids)
        return found

    def rollback(self, length: int) -> None:
        self._length = min(self._length, length)
