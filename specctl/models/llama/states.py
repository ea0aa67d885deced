"""How sequences of models with recurrent layers go back on llama.cpp.

A recurrent state holds all tokens that it has read, so it cannot be cut. llama.cpp keeps the states after the last few
tokens of a call for some architectures, which serves one rollback before the next call. Otherwise a saved state is set
back, and the tokens after it are read again. Keeping states makes every call slower, so it begins with the first
rollback that it would have served.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specctl.models.llama.context import Context
from specctl.models.llama.library import PARTIAL
from specctl.models.llama.model import LlamaModel

KEPT = 8  # How many states before the last one llama.cpp is to keep of each sequence, if they are small
SMALL, SHARE = 1 << 26, 8  # Bytes of all kept states: the first number, or the model's bytes over the second
AGAIN = 8  # The most tokens that are read again in one call with new ones; more are read before, and the state is saved
SHORT = 32  # A state is saved before calls of at most this many tokens: longer ones are prompts, which stay
SAVED = 3  # How many states of a sequence are saved
FOREIGN = 1 << 62  # The number of tokens of a sequence whose memory holds anything but its text


def states_kept(model: LlamaModel, slots: int, most: int) -> int:
    """How many states llama.cpp is to keep of each of ``slots`` sequences, with ``most`` tokens in a call."""
    room = max(SMALL, model.bytes // SHARE) // max(1, slots * model.state_bytes)
    return max(0, min(KEPT, most - 2, room))


class Saved(NamedTuple):
    """The recurrent states of a sequence."""

    length: int  # the number of tokens they have read
    content: npt.NDArray[np.int8]


class Recurrent:
    """The recurrent states of a context's sequences.

    llama.cpp moves states between places of its memory when a sequence has none yet, without those that it keeps. So
    each sequence gets its place in the order of their numbers, and the place is free only right before a call that
    takes it again.

    Attributes:
        kept: how many states before the last one llama.cpp keeps; 0 where it keeps none.
        placed: whether each sequence has its place.
    """

    def __init__(self, context: Context, slots: int) -> None:
        self._slots = slots
        self._far = [False] * slots  # whether the sequence ever went back further than kept states reach
        self._saved: list[list[Saved]] = [[] for _ in range(slots)]
        self.open(context)

    def clear(self) -> None:
        """All sequences are empty."""
        self._widths = [0] * self._slots  # how many tokens its last call read; 0 where their states are not kept
        self._saved = [[] for _ in range(self._slots)]
        self.placed = self._slots == 1 or not self.kept

    def open(self, context: Context) -> None:
        """Continue in a context; the caller sets the sequences' whole states."""
        self._context = context
        self.kept: int = context.library.llama_n_rs_seq(context.handle)
        self._widths = [-1] * self._slots  # their last calls were in another context
        self.placed = self._slots == 1 or not self.kept

    def was_read(self, slot: int, width: int) -> None:
        """A call has read this many tokens of a sequence."""
        self._widths[slot] = width

    def would_keep(self, slot: int, cells: int, length: int) -> bool:
        """Whether going back from ``cells`` tokens to ``length`` is as far as kept states reach."""
        return 0 < length < cells < FOREIGN and cells - length < min(self._widths[slot], KEPT + 1)

    def back(self, slot: int, cells: int, length: int) -> int:
        """Go back to the first ``length`` tokens of a sequence that holds ``cells``, or to fewer; returns how many."""
        if cells <= length:
            return cells
        library, memory, saved = self._context.library, self._context.memory, self._saved[slot]
        while saved and (saved[-1].length > length or cells == FOREIGN):
            saved.pop()
        near = self.would_keep(slot, cells, length) and cells - length <= self.kept
        self._far[slot] |= length > 0 and not near and self._widths[slot] >= 0
        self._widths[slot] = 0
        if near and library.llama_memory_seq_rm(memory, slot, length, -1):
            return length
        if not saved:
            library.llama_memory_seq_rm(memory, slot, -1, -1)
            return 0
        found, content = saved[-1]
        self._context.set_state(slot, content, PARTIAL)
        library.llama_memory_seq_rm(memory, slot, found, -1)
        return found

    def before(self, slot: int, length: int, width: int) -> None:
        """Save a sequence's state after ``length`` tokens, if the ``width`` tokens to be read may be dropped later."""
        saved = self._saved[slot]
        since = length - (saved[-1].length if saved else 0)
        if since < AGAIN or width > SHORT or (saved and not self._far[slot]):
            return
        if len(saved) == SAVED:
            del saved[1]  # the first is usually the end of a prompt, where a next text may differ
        saved.append(Saved(length, self._context.state(slot, PARTIAL)))

    def copy(self, source: int, slot: int, cells: int) -> int:
        """Copy a whole sequence, if it has read any of its text; returns how many tokens the other one then holds."""
        self._widths[slot] = 0
        if cells in (0, FOREIGN):
            self._saved[slot] = []
            return FOREIGN
        self._context.set_state(slot, self._context.state(source))
        self._saved[slot] = list(self._saved[source])
        return cells
