"""The results of a forward pass, and the readers that sample or judge within it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.watching import States, joined_states

if TYPE_CHECKING:
    import torch

Numbers = Union[npt.NDArray[np.float32], "torch.Tensor"]
"""Rows of numbers where they are: numpy's of a pass whose results are numpy's, else torch's."""

Signals: TypeAlias = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""Entropy in nats and top probability of R rows, each ``(R,)``."""


class Certain(NamedTuple):
    """The predictions of a draft that writes text in its own tokens."""

    tokens: Sequence[int]  # the target's id predicted by each of R rows
    whole: int  # V, the pair's shared vocabulary


class Forward:
    """The outputs of one forward pass.

    Args:
        columns: ``(keep, N)`` logits of the last ``keep`` tokens: a float32 numpy array from a pass on the host without
            torch, which the next pass may overwrite; else a tensor of the model's dtype.
        hidden: ``(keep, D)`` last hidden states of the same tokens; None if not requested.
        states: of all tokens of the pass, for the watched layers; None without any. The runner's next pass may
            overwrite numpy's states too.
        vocabulary: the ids of the columns; None where column i is id i, and N is V, the pair's shared vocabulary.
        certain: the predicted tokens, where the columns are the distribution of the first token that the draft itself
            wrote; else None.
        signals: entropy in nats and top probability of each row, ``(2, keep)`` as two arrays, if the pass computed them
            (`Slot.wants_signals`); the next pass may overwrite them.
    """

    __slots__ = ("certain", "columns", "hidden", "signals", "states", "vocabulary")

    def __init__(
        self,
        columns: Numbers,
        hidden: "torch.Tensor | None" = None,
        states: States | None = None,
        vocabulary: DraftVocabulary | None = None,
        certain: Certain | None = None,
        signals: Signals | None = None,
    ) -> None:
        self.columns = columns
        self.hidden = hidden
        self.states = states
        self.vocabulary = vocabulary
        self.certain = certain
        self.signals = signals

    def part(self, rows: Sequence[int]) -> "Forward":
        """A slice of the rows, without states."""
        certain = self.certain and Certain([self.certain.tokens[row] for row in rows], self.certain.whole)
        hidden = None if self.hidden is None else self.hidden[rows]
        return Forward(self.columns[rows], hidden, None, self.vocabulary, certain)

    @property
    def rows(self) -> Numbers:
        """The logits ``(keep, V)``, with -inf for ids without a column and for all ids other than a certain token."""
        if self.certain is not None:
            found = np.full((len(self.columns), self.certain.whole), -np.inf, np.float32)
            found[np.arange(len(found)), [*self.certain.tokens]] = 0
            return found
        return self.columns if self.vocabulary is None else self.vocabulary.widened(self.columns, -np.inf)

    @property
    def logits(self) -> "torch.Tensor":
        """The rows as a tensor, copied where the next pass may overwrite them."""
        rows = self.rows
        if isinstance(rows, np.ndarray):
            import torch

            return torch.from_numpy(rows.copy() if rows is self.columns else rows)
        return rows


def joined(parts: Sequence[Forward]) -> Forward:
    """The rows of several passes as one."""
    states = joined_states([part.states for part in parts])
    columns, vocabulary = joined_numbers([part.columns for part in parts]), parts[0].vocabulary
    hidden = [part.hidden for part in parts if part.hidden is not None]
    if not hidden:
        return Forward(columns, None, states, vocabulary)
    import torch

    return Forward(columns, torch.cat(hidden), states, vocabulary)


def joined_numbers(parts: Sequence[Numbers]) -> Numbers:
    """Rows ``(R, V)`` concatenated; numpy's if all of them are."""
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) == len(parts):
        return np.concatenate(arrays)
    import torch

    return torch.cat([torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in parts])


Foresee = Callable[["torch.Tensor"], "torch.Tensor"]
"""For a token ``()`` drawn from the last pass's logits, the predicted probability ``()`` float32 that the token drafted
after it is accepted if all before it are; 0 where no token can follow."""

Token: TypeAlias = "int | torch.Tensor"
"""An id, or ``()`` of any dtype on the device of the model that reads it, as a `TokenReader` gives it."""


class PassReader(Protocol):
    """Reads the passes of several texts at once. Hashable: texts with equal readers share one.

    Attributes:
        takes_pass_signals: whether it reads `Forward.signals` where a pass has them, in place of computing them.
    """

    @property
    def takes_pass_signals(self) -> bool: ...

    def read_rows(self, forwards: "Sequence[Forward]", about: Sequence[Any]) -> Sequence[Any]:
        """The answer for each text, with all numbers on the host. An exception is the answer of that text alone.

        Repeated calls return the same. The answers do not share memory with the passes, except for the passes
        themselves.

        Args:
            forwards: passes of one model, which its next pass may overwrite.
            about: for each text, see `Request`.
        """


class TokenReader(PassReader, Protocol):
    """Reads numbers from one token's forward pass. Pure and hashable, so that it can become part of the pass.

    Attributes:
        hidden: whether it reads the token's last hidden state.
    """

    @property
    def hidden(self) -> bool: ...

    def __call__(
        self,
        logits: "torch.Tensor",
        uniform: "torch.Tensor | None",
        hidden: "torch.Tensor | None" = None,
        previous: "torch.Tensor | None" = None,
        foresee: Foresee | None = None,
    ) -> "tuple[torch.Tensor, torch.Tensor | None]":
        """The numbers ``(F,)`` float64, starting with the drawn id, and the distribution ``(V,)`` if it is needed
        later.

        Args:
            logits: ``(V,)``.
            uniform: ``()`` float64, a draw's randomness.
            hidden: ``(D,)``.
            previous: ``(S,)``, numbers from an earlier call.
            foresee: `Slot.foresee` of a draft head that predicts acceptance.
        """

    def read_rows(
        self, forwards: "Sequence[Forward]", about: "Sequence[float | None]"
    ) -> "list[tuple[list[float], Numbers | None]]":
        """The result of a call for the single row of each pass; not available with `hidden`.

        Args:
            forwards: see `PassReader`.
            about: for each text the draw's randomness, or None.
        """
