"""Rows of a draft that writes text: a token behind each, certain, with the signals of what it was written by."""

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from specctl.decoding.rows.host_laws import Floats
from specctl.decoding.rows.host_rows import HostRows
from specctl.decoding.rows.reading import Reader
from specctl.decoding.rows.rows import Rows, array
from specctl.decoding.sampling import Sampling
from specctl.models.passes.token_reader import Foresee
from specctl.policies import Signal

if TYPE_CHECKING:
    import torch


class CertainRows(HostRows):
    """`Rows` of which each has one token, whatever is drawn: signals are of the draft's own token, where it began.

    Args:
        numbers: ``(R, V)``, 0 at each row's token and else -inf.
        own: the logits ``(R, N)`` that the draft began to write the tokens by.
    """

    __slots__ = ("_own",)

    def __init__(self, numbers: Floats, own: Rows) -> None:
        super().__init__(numbers)
        self._own = own

    def part(self, rows: slice) -> "CertainRows":
        return CertainRows(self.numbers[rows], self._own.part(rows))

    def read(
        self,
        reader: Reader,
        uniform: float | None,  # noqa: ARG002 - signature of the interface
        hidden: "torch.Tensor | None" = None,  # noqa: ARG002
        previous: "Sequence[float] | torch.Tensor | None" = None,  # noqa: ARG002
        foresee: Foresee | None = None,  # noqa: ARG002
    ) -> tuple[list[float], None]:
        found, _ = self._own.read(Reader(Sampling(), reader.wanted, tops=reader.tops), None)
        _, *signals = found if isinstance(found, list) else found.tolist()
        return [int(self.numbers[0].argmax()), *signals], None

    def signals(self, tokens: "Sequence[int] | torch.Tensor", wanted: Set[Signal]) -> dict[Signal, Floats]:  # noqa: ARG002
        found = self._own.signals(self._own.best()[0], wanted)
        return {name: array(column) for name, column in found.items()}

    def top_probs(self) -> Floats:
        return array(self._own.top_probs())
