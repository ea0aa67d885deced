"""A rest that several texts of a batch have together."""

from collections.abc import Iterable
from typing import Generic, TypeVar

from specctl.policies.draft_allowance import DraftAllowance

Row = TypeVar("Row")


class JointRest(Generic[Row]):
    """Rounds in which rows neither ask nor tell, since none of them drafts: all begin and end in the same rounds.

    Args:
        allowance: says how many these rounds are, and is told of each once.
    """

    def __init__(self, allowance: DraftAllowance) -> None:
        self._allowance = allowance
        self._may: set[Row] = set()
        self._rows: set[Row] = set()
        self._told = 0  # rounds of the rest

    def __bool__(self) -> bool:
        """Whether any row rests."""
        return bool(self._rows)

    def offer(self, rows: Iterable[Row]) -> None:
        """These rows, about which something was decided, may rest after the round that begins, and no others."""
        self._may = {*rows}

    def begin(self, row: Row) -> int:
        """For how many rounds a row rests from now on; 0 where it may not."""
        if row not in self._may:
            return 0
        self._may.remove(row)
        if not self._rows:
            self._told = 0
        self._rows.add(row)
        return self._allowance.asleep

    def end(self, row: Row, rounds: int) -> None:
        """So many rounds of a row's rest are over: all of them, as are the others', or its text has ended."""
        if row not in self._rows:
            return
        self._rows.remove(row)
        if rounds > self._told:
            self._allowance.doze(rounds - self._told)
            self._told = rounds
        if not self._allowance.asleep:
            self._rows.clear()

    def leave(self, row: Row) -> None:
        """Another text begins in a row."""
        self._may.discard(row)
        self._rows.discard(row)
