"""Whether a GGUF model on llama.cpp computes a token alike whatever is read with it: tried once, and kept."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np
import numpy.typing as npt

from specctl.errors import ModelError
from specctl.models.files.cache import cache_home, processor, write_small
from specctl.models.files.gguf_header import parts_of, read_header
from specctl.models.llama.library import TILED, library
from specctl.models.llama.model import LlamaModel, cards_for
from specctl.models.llama.passes import LlamaPasses
from specctl.models.llama.rounding import Rounding, roundings
from specctl.models.running.passes import Request
from specctl.processes import usable_cores

SCHEMA_VERSION = 1  # Of kept trials; others are made again
SECONDS = 2.0  # After this long no further step of a trial begins; a large model's ends with the first ones
CONTEXT = 384  # Tokens of a sequence in a trial: more than 256, from where attention takes another path
THREADS = 4  # The most threads of a trial
HINT = "Choose another quantisation of the model, or another device."


def rounding_of(path: Path, *, threads: int | Literal["auto"] = "auto", device: str = "auto") -> Rounding:
    """How to load and read a target so that drafting cannot change its text.

    The first of `roundings` that a trial confirms. The trial is made when a file is first loaded on a machine, with a
    version of llama.cpp, for one thread or for more; its result is kept in ``widths`` in `cache_home`.

    Args:
        path: of the file, or of a split file's first part.
        threads: as in the profile.
        device: as in the profile.

    Raises:
        ModelError: the file cannot be read; or no way of reading it computes all tokens alike.
    """
    place, cards = _place(path, threads, device)
    known, found = _read(place)
    if not known:
        ways = roundings(read_header(path), one_thread=threads == 1, accelerated=bool(cards))
        found = next((way for way in ways if _holds(path, device, way, threads)), None)
        write_small(place, json.dumps({"schema_version": SCHEMA_VERSION, "rounding": found}))
    return exact(path, found)


def kept_rounding(
    path: Path, *, threads: int | Literal["auto"] = "auto", device: str = "auto"
) -> tuple[bool, Rounding | None]:
    """Whether a trial was made, and the result: None if no way of reading the file computes all tokens alike.

    For the arguments see `rounding_of`.
    """
    return _read(_place(path, threads, device)[0])


def exact(path: Path, found: Rounding | None) -> Rounding:
    """The result of a trial; raises ModelError where there is no exact way of reading a file."""
    if found is None:
        raise ModelError(
            f"{path} cannot be a target: what llama.cpp computes for a token depends on how many are read with it, so "
            "drafting would change its text.",
            HINT,
        )
    return found


def _holds(path: Path, device: str, way: Rounding, threads: int | Literal["auto"]) -> bool:
    model = LlamaModel.open(path, device=device, repack=way.repack)
    number = min(THREADS, usable_cores()) if threads == "auto" else threads
    return alike(LlamaPasses(model, model.vocabulary, min(CONTEXT, model.context), way, number, slots=2))


def alike(passes: LlamaPasses, clock: Callable[[], float] = perf_counter) -> bool:
    """Whether passes of several widths, over one sequence and over two, give the same logits bit for bit.

    Args:
        passes: over two sequences, both empty.
        clock: returns seconds.
    """
    began = clock()
    for equal in _Trial(passes).steps():
        if not equal:
            return False
        if clock() - began > SECONDS:
            break
    return True


class _Trial:
    """Reads one text again and again; each row of logits must be the first one of its position."""

    def __init__(self, passes: LlamaPasses) -> None:
        self.passes = passes
        count = passes.context - 1
        self.text: list[int] = np.random.default_rng(58).integers(0, passes.model.vocabulary, count).tolist()
        self.known: dict[int, npt.NDArray[np.uint32]] = {}  # logits (V,) by position
        self.lengths = [0] * passes.slots

    def steps(self) -> Iterator[bool]:
        """Whether the rows of a step are the known ones; few and telling ones first."""
        yield self.read(0, 9)
        yield self.read(0, 1, 8)
        yield self.read(0, 2, 3, 4)
        yield self.read(0, 5, 4, keep=1)
        yield self.together((1, 1), (3, 2), (1, 4), (4, 2))
        if (threads := self.passes.threads or 1) > 1:
            self.passes.use_threads(1)
            yield self.read(0, 1, 8)
            self.passes.use_threads(threads)
        yield self.read(9, 33)
        yield self.read(9, 1, 2, 3, 4, 5, 7, 11)
        yield self.read(9, 8, 6, 1, 17, 1)
        yield self.read(0, 42)
        if (long := len(self.text)) < 160:
            return
        before = long - 40
        yield self.read(0, before, 40, keep=40)
        yield self.read(before, 1, 2, 4, 33)
        if threads > 1:
            self.passes.use_threads(1)
            yield self.read(before, 1, 2)
            self.passes.use_threads(threads)
        yield self.read(0, *[29] * (before // 29), before % 29 + 40, keep=40)

    def read(self, start: int, *widths: int, keep: int | None = None) -> bool:
        """Read the first sequence from ``start`` on in passes of these widths; whether the last ``keep`` rows of each
        are the known ones. None for all rows.
        """
        self._back(0, start)
        stop = start
        for width in widths:
            stop += width
            if not self._pass([(0, stop)], width if keep is None else min(keep, width)):
                return False
        return True

    def together(self, *widths: tuple[int, int]) -> bool:
        """The same for both sequences, from their beginning, in joint passes of these widths."""
        stops = [0, 0]
        for slot in (0, 1):
            self._back(slot, 0)
        for pair in widths:
            stops = [stop + width for stop, width in zip(stops, pair, strict=True)]
            if not self._pass(list(enumerate(stops)), min(pair)):
                return False
        return True

    def _back(self, slot: int, length: int) -> None:
        self.lengths[slot] = self.passes.rollback(slot, min(length, self.lengths[slot]))

    def _pass(self, ends: Sequence[tuple[int, int]], keep: int) -> bool:
        """Read each sequence up to an end; a sequence that could not go back exactly is read again from where it is."""
        requests = [
            Request(slot, self.lengths[slot], self.text[self.lengths[slot] : stop], keep) for slot, stop in ends
        ]
        same = True
        for (slot, stop), found in zip(ends, self.passes.forward(requests), strict=True):
            self.lengths[slot] = stop
            for place, row in enumerate(np.asarray(found.columns, np.float32).view(np.uint32), start=stop - keep):
                if (known := self.known.get(place)) is None:
                    self.known[place] = row.copy()
                else:
                    same &= np.array_equal(row, known)
        return same


def _place(path: Path, threads: int | Literal["auto"], device: str) -> tuple[Path, list[str]]:
    """The file of a trial's result, and the accelerators that hold the model."""
    files = [(os.path.realpath(part), (state := part.stat()).st_size, state.st_mtime_ns) for part in parts_of(path)]
    cards = [card.name for card in cards_for(library(), device, sum(size for _, size, _ in files))]
    made_for = [files, *library().package[:2], processor(), cards, threads == 1, os.environ.get(TILED)]
    name = hashlib.sha256(json.dumps(made_for).encode()).hexdigest()[:32]
    return cache_home() / "widths" / f"{name}.json", cards


def _read(place: Path) -> tuple[bool, Rounding | None]:
    """Whether a trial's result is known, and the result."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        found = json.loads(place.read_text(encoding="utf-8"))
        if found["schema_version"] == SCHEMA_VERSION:
            if (numbers := found["rounding"]) is None:
                return True, None
            least, most, cache, repack = numbers
            if (
                all(type(each) is int for each in (least, most, cache))
                and type(repack) is bool
                and 0 < 2 * least <= most
            ):
                return True, Rounding(least, most, cache, repack)
    return False, None
