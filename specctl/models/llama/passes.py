"""Passes of a GGUF model on llama.cpp over one sequence or several."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from specctl.errors import ModelError, RecordError
from specctl.models.llama.context import Context
from specctl.models.llama.library import Batch
from specctl.models.llama.model import LlamaModel
from specctl.models.llama.rounding import Rounding
from specctl.models.llama.states import AGAIN, FOREIGN, Recurrent, states_kept
from specctl.models.passes.forward import Forward, joined
from specctl.models.passes.inference import HOST
from specctl.models.passes.ordinary_tokens import ordinary_tokens
from specctl.models.passes.watching import LAST, kept_states
from specctl.models.running.passes import Passes, Request
from specctl.models.running.slot import Slot
from specctl.models.running.threads import ONE_THREAD, fastest, timed
from specctl.printable import gib

if TYPE_CHECKING:
    import torch

CAPACITY = 256  # Initial number of tokens of a sequence that fit; it doubles when full. llama.cpp takes multiples of it
ROWS, MORE_ROWS = 64, 16
"""The most tokens with logits in one pass: memory for their logits is reserved. For more sequences, at least the second
number for each of them."""
PIECE = 64  # `Facts.piece` on a CPU, which takes about as long for each token of a pass however many there are
LARGE = 1 << 26  # Bytes of a cache from which free memory is looked up first
NO_MEMORY = (1, -2)  # Codes of llama.cpp's calls for which there was no room
MOST_VIEWS = 256  # How many views of logits are kept


class LlamaPasses(Passes):
    """`Passes` of a GGUF model: one context of llama.cpp, and one call of it for all sequences.

    Every token's logits are the same bit for bit, whatever is read with it, as far as `Rounding` holds.

    Args:
        model: with its weights.
        vocabulary: V, the pair's shared vocabulary; logits beyond it are cut off.
        context: the most tokens of a sequence.
        rounding: how the model is read.
        threads: of a pass on the CPU.
        slots: the number of sequences.

    Raises:
        ModelError: there is no memory for a context.
    """

    no_rows = None
    even = True

    def __init__(
        self, model: LlamaModel, vocabulary: int, context: int, rounding: Rounding, threads: int, slots: int = 1
    ) -> None:
        self.model, self.rounding, self.threads, self.slots = model, rounding, threads, slots
        self.context, self.device = context, HOST
        self._engine = " on ".join(filter(None, ["llama.cpp", ", ".join(model.cards)]))
        self.token_bytes = 2 * model.cached_values
        self._vocabulary = vocabulary
        self._rows = min(rounding.most, max(ROWS, MORE_ROWS * slots))
        self._texts: list[list[int]] = [[] for _ in range(slots)]  # the tokens that each sequence has read
        self._cells = [0] * slots  # how many tokens llama.cpp's memory holds of each, from its text's beginning
        self._keeps = False  # whether llama.cpp keeps recurrent states, as far as it can
        self._again = min(AGAIN, rounding.most // 4) if model.stateful else 0  # see `AGAIN`
        # up to how many tokens a lone sequence is read as they are; 0 where some are read again, or states are shown
        self._plain = rounding.most if rounding.least == 1 and not model.stateful else 0
        if not model.cards:
            self.piece = min(PIECE, rounding.most - rounding.least + 1 - self._again)
        self._copied: set[int] = set()  # sequences that llama.cpp copies before its next call
        self._hidden = False  # whether calls return states
        self._watched = False  # whether they return the states that the model's own MTP layers read
        self._views: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
        most, numbers = rounding.most, np.int32
        self._tokens, self._positions, self._ones = (
            np.zeros(most, numbers),
            np.zeros(most, numbers),
            np.ones(most, numbers),
        )
        self._numbers = np.arange(slots, dtype=numbers)
        self._places = [self._numbers.ctypes.data + self._numbers.itemsize * slot for slot in range(slots)]
        self._sequences = np.full(most, self._places[0], np.uint64)  # pointers to their numbers
        self._wanted = np.zeros(most, np.int8)
        arrays = self._tokens, None, self._positions, self._ones, self._sequences, self._wanted
        self._batch = Batch(0, *(None if each is None else each.ctypes.data for each in arrays))
        try:
            self._context = self._new(min(CAPACITY, context))
        except MemoryError as error:
            raise ModelError(f"{error}.") from error
        self._recurrent = Recurrent(self._context, slots) if model.stateful else None

    def _new(self, capacity: int) -> Context:
        capacity = -(-capacity // CAPACITY) * CAPACITY
        needed = self.token_bytes * capacity * self.slots
        if needed > LARGE and not self.model.cards:
            import psutil  # type: ignore[import-untyped]

            if needed > (free := psutil.virtual_memory().available):
                tokens = (
                    f"{capacity:,} tokens of each of {self.slots} texts" if self.slots > 1 else f"{capacity:,} tokens"
                )
                raise MemoryError(f"{tokens} take {gib(needed)} of memory, and {gib(free)} is free")
        kept = states_kept(self.model, self.slots, self.rounding.most) if self._keeps else 0
        made = Context(self.model, self.slots, capacity, self._rows, self.rounding, self.threads or 1, kept=kept)
        if self._watched:
            made.show_states()
        return made

    @property
    def capacity(self) -> int:
        """The number of tokens of a sequence that fit."""
        return self._context.capacity

    def over(self, slots: int, width: int | None = None) -> "LlamaPasses":  # noqa: ARG002 - results depend on neither
        made = LlamaPasses(self.model, self._vocabulary, self.context, self.rounding, self.threads or 1, slots)
        made.watch((LAST,) if self._watched else ())
        return made

    def fresh(self) -> "LlamaPasses":
        return self.over(1)

    def use_threads(self, threads: int) -> None:
        """Compute later passes with this number of threads."""
        self.threads = threads
        self.model.library.llama_set_n_threads(self._context.handle, threads, threads)

    def try_threads(self, numbers: Collection[int]) -> None:
        """Use the fastest of some numbers of threads; a small model gets one, and so does one on accelerators.

        The cache is emptied.

        Args:
            numbers: the numbers to choose from, at least one.
        """
        choices = [1] if self.model.bytes <= ONE_THREAD or self.model.cards else sorted(numbers)
        if len(choices) > 1:
            slot, tokens = Slot(self), ordinary_tokens(2, self._vocabulary)

            def work(threads: int) -> None:  # short, since every start waits for it
                self.use_threads(threads)
                for width in (1, 2):
                    slot.rollback(0)
                    slot.extend(tokens[:width], keep=width)

            seconds = timed(work, choices)
            self.tried = {threads: median(found) * 1e3 for threads, found in seconds.items()}
            choices = [fastest(seconds)]
        self.use_threads(choices[0])

    def watch(self, layers: Iterable[int]) -> None:
        """See `Slot.watch`; only the states that the file's own MTP layers read can be watched, as layer -1."""
        wanted = {*layers}
        super().watch(wanted - {LAST} if self.model.ahead else wanted)
        if wanted:
            self._watched, self._plain = True, 0
            self._context.show_states()

    def begin(self, prompt: int) -> None:
        self._reserve(min(self.context, prompt + 1))

    def copy(self, source: int, slot: int, start: int, stop: int) -> None:  # noqa: ARG002 - all of it is copied
        self._texts[slot] = self._texts[source][:stop]
        if self._recurrent is not None:
            self._cells[slot] = self._recurrent.copy(source, slot, self._cells[source])
            return
        self._remove(slot, 0)
        if self._cells[source]:
            self.model.library.llama_memory_seq_cp(self._context.memory, source, slot, -1, -1)
            self._copied.add(slot)
        self._cells[slot] = self._cells[source]

    def answer(self, request: Request) -> Any:
        return self._one(request) if request.reader is None else super().answer(request)

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        if len(requests) == 1:
            return [self._one(requests[0])]
        hidden = any(request.hidden for request in requests)
        groups: list[list[Request]] = []
        tokens = rows = 0
        for request in requests:
            width, kept = self._size(len(request.tokens), request.keep, hidden=hidden)
            tokens, rows = tokens + width, rows + kept
            begins = self._recurrent is not None and not request.after
            if groups and tokens <= self.rounding.most and rows <= self._rows and not begins:
                groups[-1].append(request)
            else:
                groups.append([request])
                tokens, rows = width, kept
        if len(groups) == 1:
            return self._call(groups[0])
        return [
            _copied(found)
            for group in groups
            for found in (self._call(group) if len(group) > 1 else [self._one(group[0])])
        ]

    def _size(self, width: int, keep: int, *, hidden: bool) -> tuple[int, int]:
        """The most tokens that a part of a call may have with its padding, and the most of them with logits."""
        least = self.rounding.least
        padded = width + least - 1 + self._again
        return padded, padded if hidden else keep + least - 1

    def _one(self, request: Request) -> Forward:
        """A pass over one sequence, in several calls where it is long."""
        slot, after, tokens, keep, hidden, _, _, _, _, _, _ = request
        width = len(tokens)
        if width <= self._plain and 0 < keep <= self._rows and not hidden and not self._hidden:
            stop = after + width
            if stop <= self._context.capacity and stop <= self.context:
                return self._quick(slot, after, tokens, keep, width, stop)
        padded, kept = self._size(width, keep, hidden=hidden)
        if padded <= self.rounding.most and kept <= self._rows:
            return self._call((request,))[0]
        least = self.rounding.least
        longest, rows = self.rounding.most - (padded - width), self._rows - least + 1
        parts: list[Forward] = []
        start, first = 0, width - keep
        while start < width:
            end = min(start + longest, width)
            if 0 < width - end < least:
                end = max(width - least, start + 1)
            if end > first:
                end = min(end, start + rows if hidden else max(start, first) + rows)
            kept = max(0, end - max(start, first))
            piece = request._replace(
                after=request.after + start, tokens=request.tokens[start:end], keep=kept, hidden=hidden and kept > 0
            )
            found = self._call((piece,))[0]
            if kept or self._watched:
                parts.append(found if end == width and not parts else _copied(found))
            start = end
        return parts[0] if len(parts) == 1 else joined(parts) if parts else found

    def _quick(self, slot: int, after: int, tokens: Sequence[int], keep: int, width: int, stop: int) -> Forward:
        """`_call` for one sequence without padding: after a pass over a model's weights no code is in the processor's
        caches, so each line costs.
        """
        if self._cells[slot] != after:
            self._go_to(slot, after)
        if width == 1:
            self._tokens[0], self._positions[0], self._wanted[0] = tokens[0], after, 1
        else:
            self._tokens[:width], self._positions[:width] = tokens, np.arange(after, stop)
            self._wanted[: width - keep], self._wanted[width - keep : width] = 0, 1
        if self.slots > 1:
            self._sequences[:width] = self._places[slot]
        self._cells[slot] = stop  # before the call, since an interrupt is raised right after it
        self._decode(width, hidden=False)
        self._texts[slot][after:] = tokens
        return Forward(self._logits(width - keep, keep))

    def _call(self, requests: Sequence[Request]) -> list[Forward]:
        """One call of llama.cpp for requests that it has room for."""
        least = self.rounding.least
        stops = [request.after + len(request.tokens) for request in requests]
        if (longest := max(stops)) > self.context:
            raise RecordError("prompt_too_long", f"the text has {longest} tokens; the model holds {self.context}")
        starts = [request.after for request in requests]
        if self._recurrent is not None:
            self._reserve(longest + least)
            starts = [self._reach(request) for request in requests]
        widths = [stop - start for start, stop in zip(starts, stops, strict=True)]
        if least > 1:
            widths = self.rounding.padded(widths)
            if self._recurrent is None:
                starts = [max(0, stop - width) for stop, width in zip(stops, widths, strict=True)]
        end = max(start + width for start, width in zip(starts, widths, strict=True))
        if end > self._context.capacity:
            self._reserve(end)
        given: list[Sequence[int]] = []
        for request, start in zip(requests, starts, strict=True):
            before = self._texts[request.slot][start : request.after]
            given.append([*before, *request.tokens] if before else request.tokens)
            if self._cells[request.slot] != start:
                self._go_to(request.slot, start)
        count, firsts = 0, []
        for request, width, start, tokens in zip(requests, widths, starts, given, strict=True):
            padding = width - len(tokens)
            wanted = max(request.keep + padding, least) if least > 1 else request.keep
            stop = count + width
            last = stop - padding
            if width == 1:
                self._tokens[count], self._positions[count], self._wanted[count] = tokens[0], start, wanted
            else:
                self._tokens[count:last], self._tokens[last:stop] = tokens, tokens[-1]
                self._positions[count:stop] = np.arange(start, start + width)
                self._wanted[count : stop - wanted], self._wanted[stop - wanted : stop] = 0, 1
            if self.slots > 1:
                self._sequences[count:stop] = self._places[request.slot]
            firsts.append(last - request.keep)
            count = stop
            self._cells[request.slot] = start + width  # before the call, since an interrupt is raised right after it
            if self._recurrent is not None:
                self._recurrent.was_read(request.slot, width)
        hidden = any(request.hidden for request in requests)
        self._decode(count, hidden=hidden)
        found = []
        for request, start, tokens, first in zip(requests, starts, given, firsts, strict=True):
            self._texts[request.slot][start:] = tokens
            columns = self._logits(first, request.keep)
            states = self._states(first, request.keep) if request.hidden else None
            width = len(request.tokens)
            seen = {LAST: self._context.seen(first + request.keep - width, width)} if self._watched else None
            found.append(Forward(columns, states, seen))
        return found

    def _decode(self, count: int, *, hidden: bool) -> None:
        """Read the first ``count`` tokens of the arrays.

        Raises:
            MemoryError, RuntimeError: all sequences are empty then for llama.cpp, and are read again when needed.
        """
        lib, context = self.model.library, self._context
        if hidden != self._hidden:
            lib.llama_set_embeddings(context.handle, hidden)
            self._hidden = hidden
        self._batch.n_tokens = count
        code = lib.llama_decode(context.handle, self._batch)
        if self._copied:
            self._copied.clear()
        if code:
            lib.llama_memory_clear(context.memory, False)
            self._cells = [0] * self.slots
            if self._recurrent is not None:
                self._recurrent.clear()
            why = f"llama.cpp could not read {count} tokens (code {code}): {lib.last_line}"
            raise MemoryError(why) if code in NO_MEMORY else RuntimeError(why)

    def _reach(self, request: Request) -> int:
        """Bring a sequence with recurrent states to the tokens before a request, or to a few less.

        Returns:
            How many tokens llama.cpp's memory then holds; the request's call reads those after them again.
        """
        assert self._recurrent is not None, "the model has states"
        states, slot, length = self._recurrent, request.slot, request.after
        if not self._keeps and states.would_keep(slot, self._cells[slot], length):
            self._keeps = True
            with suppress(MemoryError):  # saved states do without
                self._renew(self._new(self._context.capacity))
        if not states.placed:
            self._place()
        at = states.back(slot, self._cells[slot], length)
        self._cells[slot] = at
        if length - at > self._again or (length and not at):  # an empty sequence takes its place with its first call
            self._one(Request(slot, at, self._texts[slot][at:length], 0))
            at = self._cells[slot] = states.back(slot, self._cells[slot], length)
        if at == length:
            states.before(slot, length, len(request.tokens))
        return at

    def _renew(self, new: Context) -> None:
        """Go on in another context, which takes over the sequences with their recurrent states."""
        assert self._recurrent is not None, "the model has states"
        old = self._context
        held, self._cells = self._cells, [FOREIGN] * self.slots  # before the rest, which may be interrupted
        self._context, self._hidden = new, False
        self._views.clear()
        self._recurrent.open(new)
        if not self._recurrent.placed:
            self._place()
        for slot, count in enumerate(held):
            carried = 0 < count < FOREIGN and _carried(old, new, slot)
            self._cells[slot] = count if carried else FOREIGN

    def _place(self) -> None:
        """Read a token of each sequence in the order of their numbers; see `Recurrent`."""
        assert self._recurrent is not None, "the model has states"
        self.model.library.llama_memory_clear(self._context.memory, False)
        for first in range(0, self.slots, self.rounding.most):
            count = min(self.slots - first, self.rounding.most)
            self._tokens[:count] = self._positions[:count] = self._wanted[:count] = 0
            self._sequences[:count] = self._places[first : first + count]
            self._decode(count, hidden=self._hidden)
        self._cells = [FOREIGN] * self.slots
        self._recurrent.placed = True

    def _go_to(self, slot: int, length: int) -> None:
        """Make llama.cpp's memory hold exactly the first tokens of a text that was read up to there before."""
        self._remove(slot, length)
        if (cells := self._cells[slot]) < length:
            self._one(Request(slot, cells, self._texts[slot][cells:length], 0))
            self._remove(slot, length)

    def _remove(self, slot: int, length: int) -> None:
        """Remove cells after the first ``length``; all cells where what would remain is not what it was."""
        if self._cells[slot] <= length:
            return
        lib, memory, window = self.model.library, self._context.memory, self.model.window
        if window and lib.llama_memory_seq_pos_min(memory, slot) > max(0, length - window + 1):
            length = 0
        if not lib.llama_memory_seq_rm(memory, slot, length, -1):
            lib.llama_memory_seq_rm(memory, slot, -1, -1)
            length = 0
        self._cells[slot] = length

    def _reserve(self, tokens: int) -> None:
        """Make room for this many tokens of each sequence.

        Raises:
            MemoryError: nothing has changed.
        """
        if tokens <= self._context.capacity:
            return
        old, new = self._context, self._new(max(tokens, min(2 * self._context.capacity, self.context)))
        if self._recurrent is not None:
            self._renew(new)
            return
        for slot, cells in enumerate(self._cells):
            # A window's state would leave out what the window has left, and a pending copy has not been made.
            if cells and (self.model.window or slot in self._copied or not _carried(old, new, slot)):
                self._cells[slot] = 0
        self._context, self._hidden = new, False
        self._copied.clear()
        self._views.clear()

    def _logits(self, first: int, keep: int) -> npt.NDArray[np.float32]:
        """The last call's logits ``(keep, V)`` of tokens from its ``first`` on, where llama.cpp has them."""
        if not keep:
            return np.zeros((0, self._vocabulary), np.float32)
        address = self.model.library.llama_get_logits_ith(self._context.handle, first)
        if (found := self._views.get((address, keep))) is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            if address is None:
                raise ModelError(f"llama.cpp computes no logits for {self.model.path}.")
            whole = self._context.floats(address, keep, self.model.vocabulary)
            found = self._views[address, keep] = whole[:, : self._vocabulary]
        return found

    def _states(self, first: int, keep: int) -> "torch.Tensor":
        """The last call's states after the final norm ``(keep, D)`` of tokens from its ``first`` on."""
        import torch

        address = self.model.library.llama_get_embeddings_ith(self._context.handle, first)
        return torch.from_numpy(self._context.floats(address, keep, self.model.width).copy())


def _carried(old: Context, new: Context, slot: int) -> bool:
    """Whether a sequence's cells could be copied to a new context."""
    state = old.state(slot)
    return len(state) > 0 and new.set_state(slot, state)


def _copied(found: Forward) -> Forward:
    """A copy that the next pass does not overwrite."""
    assert isinstance(found.columns, np.ndarray), "logits are on the host"
    return Forward(found.columns.copy(), found.hidden, kept_states(found.states))
