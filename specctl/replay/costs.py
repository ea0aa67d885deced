"""What drafting and verifying cost on this machine, and what replayed rounds would therefore take."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.round import judge
from specctl.decoding.sampling import Sampling
from specctl.models.loading.pair import Pair
from specctl.policies import Signal
from specctl.policies.constant import Constant
from specctl.replay.play import Clock, Level, Replay
from specctl.statistics.intervals import Floats

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 15, 23, 40)
IN_A_ROW = 3
"""Rounds of one length after each other; the first is not counted."""
WARM_UPS = 1
PASSES = WARM_UPS + 4
TYPICAL = 4
"""The draft length at which signals are priced."""

SignalSet = frozenset[Signal]


def signal_key(signals: Iterable[Signal]) -> str:
    """A set of signals as text, as cost tables name it."""
    return "+".join(sorted(signals)) or "none"


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a round's two phases, measured as the loop runs them: one after the other, on the same caches.

    In a hierarchy each level has one: ``draft`` is then of its draft without those below.

    Attributes:
        contexts: tokens in the caches, ascending.
        lengths: draft lengths, ascending from 0.
        draft: ``(contexts, lengths)`` of drafting without any signal.
        verify: ``(contexts, lengths)`` of the target's pass and verdict, one token wider than the draft.
        signals: by `signal_key`, what reading them adds to each drafted token.
        rest: what a round takes beside its two phases.
        below: of the next draft with this one as its verifier, in a hierarchy.
        reading: there, by `signal_key`, what reading its signals adds to each of this draft's verifying passes.
        heads: where the draft has several, what listening to each adds to a drafted token; ``signals`` has the first's.
    """

    contexts: Floats
    lengths: Floats
    draft: Floats
    verify: Floats
    signals: dict[str, float]
    rest: float
    below: "CostTable | None" = None
    reading: dict[str, float] = field(default_factory=dict)
    heads: dict[str, float] = field(default_factory=dict)

    def of_head(self, name: str | None) -> "CostTable":
        """The same with another head's price; itself for None."""
        if name is None or name not in self.heads:
            return self
        if name not in self._by_head:
            more = self.heads[name] - self.signals.get("accept_prob", 0.0)
            signals = {key: ms + more * ("accept_prob" in key.split("+")) for key, ms in self.signals.items()}
            self._by_head[name] = replace(self, signals={key: max(0.0, ms) for key, ms in signals.items()})
        return self._by_head[name]

    @property
    def levels(self) -> "tuple[CostTable, ...]":
        """This one, the one below it, and so on down."""
        return (self, *(self.below.levels if self.below is not None else ()))

    def milliseconds(self, replays: Iterable[Replay], *signals: Iterable[Signal]) -> float:
        """What the rounds would take, the prompt left out.

        Between measured contexts and lengths the costs are interpolated, beyond them held.

        Args:
            replays: of as many levels as there are sets of signals.
            signals: what is read at each level, from the top down.
        """
        return sum(
            self._level_ms(
                replay.trace.prompt_tokens,
                [Level(replay.starts, replay.drafted, replay.accepted), *replay.inner],
                signals,
            )
            for replay in replays
        )

    def _level_ms(self, prompt_tokens: int, levels: Sequence[Level], signals: Sequence[Iterable[Signal]]) -> float:
        starts, drafted = np.array(levels[0].starts, dtype=np.int64), np.array(levels[0].drafted, dtype=np.int64)
        phases = self._whole if len(levels) == 1 else self.verify
        total = float(_interpolated(phases, self.contexts, self.lengths, prompt_tokens + starts, drafted).sum())
        total += self.rest * len(starts)
        if len(levels) == 1:
            return total + self.signals.get(signal_key(signals[0]), 0.0) * float(drafted.sum())
        assert self.below is not None
        reading = self.reading.get(signal_key(signals[0]), 0.0) * len(levels[1].starts)
        return total + reading + self.below._level_ms(prompt_tokens, levels[1:], signals[1:])

    def clocks(self, signals: Sequence[Iterable[Signal]]) -> list[Clock]:
        """The same costs round by round, for policies that learn from times: a clock for each level, from the top down.

        A round's rest is in neither phase.
        """
        if len(signals) == 1:
            return [self.clock(signals[0])]
        assert self.below is not None
        reading = self.reading.get(signal_key(signals[0]), 0.0) / 1e3
        own, (next_, *further) = self.clock(()), self.below.clocks(signals[1:])

        def collecting(context: int, drafted: int) -> tuple[float, float]:
            return 0.0, own(context, drafted)[1]

        def with_reading(context: int, drafted: int) -> tuple[float, float]:
            draft, verify = next_(context, drafted)
            return draft, verify + reading

        return [collecting, with_reading, *further]

    def clock(self, signals: Iterable[Signal]) -> Clock:
        """That of a draft alone."""
        each = self.signals.get(signal_key(signals), 0.0)

        def seconds(context: int, drafted: int) -> tuple[float, float]:
            if (context, drafted) not in self._points:
                row, column = np.array([context]), np.array([drafted])
                self._points[context, drafted] = (
                    float(_interpolated(self.draft, self.contexts, self.lengths, row, column)[0]),
                    float(_interpolated(self.verify, self.contexts, self.lengths, row, column)[0]),
                )
            draft, verify = self._points[context, drafted]
            return (draft + each * drafted) / 1e3, verify / 1e3

        return seconds

    @cached_property
    def _by_head(self) -> "dict[str, CostTable]":
        return {}

    @cached_property
    def _points(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Interpolated once for all policies: a thousand of them ask for the same."""
        return {}

    @cached_property
    def _whole(self) -> Floats:
        return self.draft + self.verify

    def at(self, context: float) -> tuple[float, float]:
        """One draft step and the narrowest target pass with that many tokens in the caches."""
        row_draft = [np.interp(context, self.contexts, column) for column in self.draft.T]
        row_verify = [np.interp(context, self.contexts, column) for column in self.verify.T]
        slope = np.polyfit(self.lengths[1:], row_draft[1:], 1)[0] if len(self.lengths) > 2 else row_draft[-1]
        return float(slope), float(row_verify[0])

    def as_record(self) -> dict[str, Any]:
        """Plain numbers, to be written down."""
        return {
            "contexts": [int(context) for context in self.contexts],
            "draft_lengths": [int(length) for length in self.lengths],
            "draft_ms": np.round(self.draft, 4).tolist(),
            "verify_ms": np.round(self.verify, 4).tolist(),
            "signal_ms": _rounded(self.signals),
            "rest_ms": round(self.rest, 4),
            **({"head_ms": _rounded(self.heads)} if self.heads else {}),
            **({} if self.below is None else {"reading_ms": _rounded(self.reading), "below": self.below.as_record()}),
        }

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> "CostTable":
        return cls(
            np.array(record["contexts"], dtype=np.float64),
            np.array(record["draft_lengths"], dtype=np.float64),
            np.array(record["draft_ms"]),
            np.array(record["verify_ms"]),
            dict(record["signal_ms"]),
            float(record["rest_ms"]),
            cls.of_record(record["below"]) if "below" in record else None,
            dict(record.get("reading_ms", {})),
            dict(record.get("head_ms", {})),
        )


def _rounded(costs: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in costs.items()}


def measure(
    pair: Pair,
    contexts: Sequence[int],
    longest: int,
    signal_sets: Iterable[SignalSet],
    sampling: Sampling,
    rests: Sequence[float],
    advance: Callable[[], None] = lambda: None,
) -> CostTable:
    """Time rounds of fixed lengths over caches of each context; medians of interleaved repeats.

    In a hierarchy, each draft with its verifier by itself.

    Args:
        pair: with a draft.
        contexts: tokens in the caches.
        longest: the longest draft that has to be priced.
        signal_sets: what policies read; of what a head says only where there is one.
        sampling: as it will run.
        rests: for each draft, milliseconds of a round beside its phases, as a live run showed them.
        advance: called after each of `PASSES` over all lengths, for every draft.
    """
    sets = [signals for signals in dict.fromkeys(signal_sets) if signals]
    own = [signals for signals in sets if pair.head is not None or "accept_prob" not in signals]
    table = _measure_top(pair, contexts, longest, own, sampling, rests[0], advance)
    if len(pair.drafts) == 1:
        return table
    below = measure(pair.lower, contexts, longest, sets, sampling, rests[1:], advance)
    return replace(table, below=below, reading=_measure_reading(pair, int(table.contexts[0]), own, sampling))


def _measure_top(
    pair: Pair,
    contexts: Sequence[int],
    longest: int,
    sets: Sequence[SignalSet],
    sampling: Sampling,
    rest: float,
    advance: Callable[[], None],
) -> CostTable:
    """The first draft's, verified by the target."""
    lengths = sorted({length for length in LENGTHS if length < longest} | {longest})
    contexts = sorted({min(context, pair.context - longest - 2) for context in contexts})
    plain: dict[tuple[int, int], tuple[list[float], list[float]]] = {
        (c, k): ([], []) for c in contexts for k in lengths
    }
    read: dict[SignalSet, list[float]] = {signals: [] for signals in sets}
    several = pair.named_heads[0] if pair.named_heads and len(pair.named_heads[0]) > 1 else {}
    # Heads of one shape cost the same, and measured one by one would not.
    shapes = {
        name: (sum(weight.numel() for weight in head.parameters()), head.reads_signals)
        for name, head in several.items()
    }
    listening: dict[tuple[int, bool], list[float]] = {shape: [] for shape in shapes.values()}
    typical = min(TYPICAL, longest)
    with torch.inference_mode():
        for number in range(PASSES):
            for context in contexts:
                sequence = _ordinary(pair, context)
                _fill(pair, sequence)
                for length in lengths:
                    for again in range(IN_A_ROW):
                        times = _round(pair, sequence, length, frozenset(), sampling)
                        # What ran before leaves its weights in the processor's cache: here, as in a run, its like.
                        if number >= WARM_UPS and again:
                            for kept, time in zip(plain[context, length], times, strict=True):
                                kept.append(time)
            for signals in sets:
                reading = _reading_ms(pair, sequence, typical, signals, sampling)
                if number >= WARM_UPS:
                    read[signals].append(reading)
            for name, shape in shapes.items():
                told = replace(pair, heads=(several[name], *pair.heads[1:]))
                reading = _reading_ms(told, sequence, typical, frozenset({"accept_prob"}), sampling)
                if number >= WARM_UPS:
                    listening[shape].append(reading)
            advance()
    table = np.array([[[median(times) for times in plain[c, k]] for k in lengths] for c in contexts])  # (C, K, 2)
    return CostTable(
        np.array(contexts, dtype=np.float64),
        np.array(lengths, dtype=np.float64),
        table[..., 0],
        table[..., 1],
        {signal_key(signals): max(0.0, median(times)) for signals, times in read.items()},
        rest,
        heads={name: max(0.0, median(listening[shape])) for name, shape in shapes.items()},
    )


def _reading_ms(pair: Pair, sequence: list[int], length: int, signals: SignalSet, sampling: Sampling) -> float:
    """What reading signals adds to each token of a round, between two rounds of its like."""
    _round(pair, sequence, length, signals, sampling)
    bare = _round(pair, sequence, length, frozenset(), sampling)[0]
    return (_round(pair, sequence, length, signals, sampling)[0] - bare) / length


def _measure_reading(pair: Pair, context: int, sets: Sequence[SignalSet], sampling: Sampling) -> dict[str, float]:
    """What reading signals adds to a pass in which the first draft verifies the second."""
    typical = Constant(draft_length=TYPICAL)
    sequence = _ordinary(pair, context)
    found: dict[SignalSet, list[float]] = {signals: [] for signals in sets}

    def verifying(signals: SignalSet) -> float:
        inner = ModelDrafter(pair.drafts[1], typical)
        block = Constant(draft_length=TYPICAL + 1)
        drafter = PreVerifiedDrafter(inner, pair.drafts[0], block, once=True, record=signals, head=pair.head)
        drafter.begin(sampling, frozenset(), None)
        (round_,) = drafter.draft(sequence, TYPICAL + 1).inner
        _wait(pair.drafts[0].device)
        drafter.rollback(len(sequence) - 1)
        return round_.verify_seconds * 1e3

    with torch.inference_mode():
        _fill(pair, sequence)
        for number in range(PASSES):
            for signals in sets:
                bare, reading = verifying(frozenset()), verifying(signals)
                if number >= WARM_UPS:
                    found[signals].append(reading - bare)
    return {signal_key(signals): max(0.0, median(times)) for signals, times in found.items()}


def _round(pair: Pair, sequence: list[int], length: int, signals: SignalSet, sampling: Sampling) -> tuple[float, float]:
    """Milliseconds of drafting and of verifying one round of a fixed length."""
    drafter = ModelDrafter(pair.drafts[0], Constant(draft_length=max(1, length)), signals, pair.head)
    drafter.begin(sampling, frozenset(), None)
    draft_device, target_device = pair.drafts[0].device, pair.target.device
    _wait(draft_device)
    began = perf_counter()
    draft = drafter.draft(sequence, length)
    _wait(draft_device)
    drafted = perf_counter()
    logits = pair.target.extend([sequence[-1], *draft.tokens], keep=length + 1).logits
    judge(draft, logits, sampling, None)
    _wait(target_device)
    verified = perf_counter()
    for runner in (pair.target, pair.drafts[0]):
        runner.rollback(len(sequence) - 1)
    return (drafted - began) * 1e3, (verified - drafted) * 1e3


def _fill(pair: Pair, sequence: list[int]) -> None:
    for runner in (pair.target, *pair.drafts):
        runner.rollback(0)
        if len(sequence) > 1:
            runner.extend(sequence[:-1], keep=0)


def _ordinary(pair: Pair, count: int) -> list[int]:
    tokens: Iterator[int] = (10 + place % 100 for place in range(count + len(pair.eos) * count))
    return [token for token in tokens if token not in pair.eos][:count]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _interpolated(
    table: Floats, rows: Floats, columns: Floats, row: npt.NDArray[Any], column: npt.NDArray[Any]
) -> Floats:
    """Bilinear interpolation of ``table (R, C)`` at points, held at its edges."""
    left, across = _between(columns, column)
    if len(rows) == 1:
        low: Floats = table[0, left] * (1 - across) + table[0, np.minimum(left + 1, len(columns) - 1)] * across
        return low
    top, down = _between(rows, row)
    right, below = np.minimum(left + 1, len(columns) - 1), np.minimum(top + 1, len(rows) - 1)
    upper = table[top, left] * (1 - across) + table[top, right] * across
    lower = table[below, left] * (1 - across) + table[below, right] * across
    found: Floats = upper * (1 - down) + lower * down
    return found


def _between(grid: Floats, values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.intp], Floats]:
    """Each value's place in an ascending grid: the index at or below it, and how far it is to the next."""
    held = np.clip(values, grid[0], grid[-1]).astype(np.float64)
    index = np.clip(np.searchsorted(grid, held, side="right") - 1, 0, max(0, len(grid) - 2))
    if len(grid) == 1:
        return index, np.zeros_like(held)
    return index, (held - grid[index]) / (grid[index + 1] - grid[index])
