"""What several sequences ask of one model, and what makes their passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specctl.models.passes.forward import Forward

if TYPE_CHECKING:
    from specctl.models.passes.token_reader import PassReader


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What one sequence asks of a model.

    Attributes:
        row: the sequence's number, from 0.
        after: how many of its cached tokens the new ones follow; later ones are overwritten.
        tokens: T ids, at least one.
        keep: logits of the last so many are wanted.
        hidden: whether hidden states are wanted of these, too.
        rotated_as: as of `Runner.rotate_as`; 0 for most models.
        reader: what reads the pass, told ``about``, whose reading is the answer then, without hidden states; or None.
    """

    row: int
    after: int
    tokens: Sequence[int]
    keep: int
    hidden: bool = False
    rotated_as: int = 0
    reader: "PassReader | None" = None
    about: Any = None

    @property
    def size(self) -> float:
        return len(self.tokens)


class RowPasses(Protocol):
    """One model over several sequences, each of its own length.

    Attributes:
        rows: how many sequences.
    """

    @property
    def rows(self) -> int: ...

    def run(self, requests: Sequence[RowRequest]) -> Sequence[Forward]:
        """One pass for sequences that are different from one another; nothing is read by their readers.

        What a sequence is given does not depend on the others, and is overwritten by the next pass. A pass can be made
        again: it writes the same places.
        """

    def copy(self, source: int, row: int, start: int, stop: int) -> None:
        """Let a sequence hold what another one has cached of its tokens from ``start`` to ``stop``, and no more behind.

        Both have the same tokens up to there.
        """
