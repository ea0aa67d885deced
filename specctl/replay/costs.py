"""Predicts how long replayed rounds would take on this machine, from measured times. No torch here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter

from specctl.observing.results import PassTimes
from specctl.policies import Signal, TextRead
from specctl.records import Round, RoundSummary
from specctl.replay.traces import Trace
from specctl.statistics import Floats


@dataclass(slots=True)
class Level:
    """The rounds of one draft on one sequence, in columns of equal length."""

    # generated tokens before each round; tokens collected in the block count for an inner round
    starts: list[int] = field(default_factory=list)
    # drafted, accepted: tokens of each round
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    # number of drafted tokens that a lookup copied; empty if no round has any
    copied: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replay:
    """The replayed rounds of a sequence; ``levels`` go from the first draft down."""

    trace: Trace
    levels: tuple[Level, ...]

    @property
    def tokens(self) -> int:
        return len(self.trace.tokens)

    @property
    def top(self) -> Level:
        """The rounds that the target verified."""
        return self.levels[0]


def columns(rounds: Iterable[Round | RoundSummary], least: int = 1) -> list[Level]:
    """The rounds of a sequence by level, from the top down: at least ``least`` levels, some possibly empty."""
    levels = [Level() for _ in range(least)]
    rounds = list(rounds)
    _add_rounds(rounds, 0, 0, levels)
    if any(round_.copied for round_ in rounds):
        levels[0].copied.extend(round_.copied for round_ in rounds)
    return levels


def _add_rounds(rounds: Iterable[Round | RoundSummary], start: int, depth: int, levels: list[Level]) -> None:
    if depth == len(levels):
        levels.append(Level())
    level = levels[depth]
    for round_ in rounds:
        level.starts.append(start)
        level.drafted.append(round_.drafted)
        level.accepted.append(round_.accepted)
        if round_.inner:
            _add_rounds(round_.inner, start, depth + 1, levels)
        start += round_.accepted + 1  # only the last round may lack the verifier's own token


class Clock(Protocol):
    """Returns the time of a round."""

    def __call__(self, context: int, drafted: int, unread: int, verified: int | None = None, /) -> tuple[float, float]:
        """Seconds of drafting and of verifying; a middle draft's drafting time excludes its inner rounds.

        Args:
            context: tokens before the round, those of the prompt included.
            drafted: tokens that the draft generates itself.
            unread: tokens that the draft reads before its first step (`TextRead`).
            verified: tokens that are verified; None where these are ``drafted``.
        """


DIGITS = 4  # Decimal places of milliseconds in output
EVERY = 32  # Batched passes whose contexts differ by less are priced alike, in tokens
_Array = PlainValidator(lambda values: np.array(values, dtype=np.float64))
Times = Annotated[Floats, _Array, PlainSerializer(lambda times: times.tolist())]
Counts = Annotated[Floats, _Array, PlainSerializer(lambda counts: counts.astype(int).tolist())]


def signal_key(signals: Iterable[Signal]) -> str:
    """The key of a set of signals in cost tables."""
    return "+".join(sorted(signals)) or "none"


@dataclass(frozen=True, eq=False)
class CostTable:
    """Milliseconds of a round's two phases, by tokens in the caches and by draft length.

    In a hierarchy there is one table for each draft, timed with its verifier.
    """

    contexts: Counts  # ``(C,)`` tokens in the caches, ascending
    lengths: Annotated[Counts, Field(alias="draft_lengths")]  # ``(K,)`` draft lengths, ascending from 0
    draft_ms: Times  # ``(C, K)`` time of drafting without reading signals; in a hierarchy without the drafts below
    verify_ms: Times  # ``(C, K)`` time of verification: a pass one token wider than the draft, and the verdict
    signal_ms: dict[str, float]  # by `signal_key`, the time that reading these signals adds for each drafted token
    overhead_ms: float  # time of a round outside its two phases
    below: "CostTable | None" = None  # in a hierarchy, the table of the next draft with this one as its verifier
    # in a hierarchy, by `signal_key`, the time that reading this draft's signals adds to each pass in which it verifies
    # the next draft
    reading_ms: dict[str, float] = field(default_factory=dict)
    # by name, the time that each of several heads of the draft adds for each drafted token; ``signal_ms`` contains the
    # first head's time
    head_ms: dict[str, float] = field(default_factory=dict)
    # by number of tokens, the time that a draft takes to read them before its first step. It missed them while no draft
    # was wanted. Interpolated, and in proportion beyond.
    catch_up_ms: dict[int, float] = field(default_factory=dict)
    # by the number of texts, the table of rounds in which they draft and are verified together: ``draft_ms`` is the
    # time of all draft passes, ``verify_ms`` that of one pass over all drafts. Interpolated between the numbers, and in
    # proportion beyond.
    batches: "dict[int, CostTable]" = field(default_factory=dict)

    @classmethod
    def flat(
        cls, draft_ms: float, verify_ms: float, longest: int, per_token_ms: float = 0.0, alone_ms: float | None = None
    ) -> "CostTable":
        """A table without overhead, with one time for every drafted token and one for every verifying pass.

        Args:
            draft_ms, verify_ms: milliseconds of a drafted token, and of a verifier pass over one token, extrapolated
                from wider passes.
            longest: the longest draft that has to be priced.
            per_token_ms: milliseconds of each further token in a pass of the verifier.
            alone_ms: of a pass over one token where nothing was drafted; None for ``verify_ms``.
        """
        lengths = np.arange(longest + 1, dtype=np.float64)
        verifying = verify_ms + per_token_ms * lengths
        if alone_ms is not None:
            verifying[0] = alone_ms
        return cls(np.zeros(1), lengths, draft_ms * lengths[None], verifying[None], {}, 0.0)

    @classmethod
    def of_passes(cls, times: PassTimes, drafts: Sequence[int], longest: int) -> "CostTable":
        """A table without overhead, from bare passes at one context; wider passes take as long as the widest measured.

        Args:
            times: of the loaded models.
            drafts: indices of the loaded drafts that take part, from the draft that the target verifies down.
            longest: the longest draft that has to be priced.
        """
        return cls._of_verifier(times, times.target, drafts, longest)

    @classmethod
    def _of_verifier(
        cls, times: PassTimes, verifier: Mapping[int, float], drafts: Sequence[int], longest: int
    ) -> "CostTable":
        draft, *below = drafts
        widths = np.array(sorted({*verifier, longest + 1}), dtype=np.float64)
        known = sorted(verifier)
        verify_ms = np.interp(widths, known, [verifier[width] for width in known])
        return cls(
            np.zeros(1),
            widths - 1,
            times.step_ms(draft) * (widths - 1)[None],
            verify_ms[None],
            {},
            0.0,
            cls._of_verifier(times, times.drafts[draft], below, longest) if below else None,
        )

    def of_predictor(self, name: str | None) -> "CostTable":
        """This table with the time of another head of the draft; unchanged for None or an unknown name."""
        if name is None or name not in self.head_ms:
            return self
        if name not in self._by_predictor:
            more = self.head_ms[name] - self.signal_ms.get("accept_prob", 0.0)
            with_predictor = {key: ms + more * ("accept_prob" in key.split("+")) for key, ms in self.signal_ms.items()}
            self._by_predictor[name] = replace(
                self, signal_ms={key: max(0.0, ms) for key, ms in with_predictor.items()}
            )
        return self._by_predictor[name]

    @property
    def levels(self) -> "tuple[CostTable, ...]":
        """This table and all tables below it, from the top down."""
        return (self, *(self.below.levels if self.below is not None else ()))

    def milliseconds(self, replays: Iterable[Replay], *signals: Iterable[Signal]) -> float:
        """Predicted time of the rounds of all replays, without the prompts.

        Args:
            replays: with one level for each set of signals.
            signals: the signals read at each level, from the top down.
        """
        return sum(self.rounds_ms(replay.levels, signals, replay.trace.prompt_tokens) for replay in replays)

    def together(self, rows: int, context: int, drafted: int) -> tuple[float, float, float]:
        """Milliseconds of rounds of several texts, from `batches`.

        Args:
            rows: the batch size.
            context: mean number of tokens in their caches.
            drafted: tokens drafted by all texts together.

        Returns:
            The times of a draft pass, of a verification, and outside of passes.
        """
        place = rows, context // EVERY, drafted
        if place not in self._passes:
            middle = (context // EVERY + 0.5) * EVERY
            tables = sorted({1: self, **self.batches}.items())
            counts, beyond = [count for count, _ in tables], max(1.0, rows / tables[-1][0])
            steps = [table.at(middle)[0] for _, table in tables]
            passes = [table.verifying(middle, drafted / rows) for _, table in tables]
            rest = [table.overhead_ms for _, table in tables]
            draft, verify, outside = (beyond * float(np.interp(rows, counts, ms)) for ms in (steps, passes, rest))
            self._passes[place] = draft, verify, outside
        return self._passes[place]

    def reading_together(self, rows: int, signals: Iterable[Signal]) -> float:
        """Milliseconds that reading signals adds to a draft pass over several texts."""
        key = signal_key(signals)
        known = {1: self.signal_ms.get(key, 0.0)}
        known |= {count: table.signal_ms[key] for count, table in self.batches.items() if key in table.signal_ms}
        return rows * float(np.interp(rows, sorted(known), [known[count] for count in sorted(known)]))

    def rounds_ms(
        self, levels: Sequence[Level], signals: Sequence[Iterable[Signal]] = (), prompt_tokens: int = 0
    ) -> float:
        """Predicted milliseconds of the rounds of one sequence.

        Times are interpolated between the measured contexts and lengths, and constant beyond them.

        Args:
            levels: the rounds of each level, from the top down.
            signals: the signals read at each level; empty where no level reads any.
            prompt_tokens: length of the prompt.
        """
        starts, drafted = np.array(levels[0].starts, dtype=np.int64), np.array(levels[0].drafted, dtype=np.int64)
        key = signal_key(signals[0]) if signals else "none"
        verified = drafted
        if levels[0].copied:
            drafted = drafted - np.array(levels[0].copied, dtype=np.int64)
        phases = self._both_ms if len(levels) == 1 else self.verify_ms
        total = float(self._at(phases, prompt_tokens + starts, drafted).sum()) + self.overhead_ms * len(starts)
        if verified is not drafted:
            wider = (self._at(self.verify_ms, prompt_tokens + starts, count) for count in (verified, drafted))
            total += float(np.subtract(*wider).sum())
        if self.catch_up_ms and (levels[0].copied or 0 in drafted):
            total += self._catching_up(levels[0], drafted.tolist(), prompt_tokens)
        if len(levels) == 1:
            return total + self.signal_ms.get(key, 0.0) * float(drafted.sum())
        assert self.below is not None
        reading = self.reading_ms.get(key, 0.0) * len(levels[1].starts)
        return total + reading + self.below.rounds_ms(levels[1:], signals[1:], prompt_tokens)

    def clocks(self, signals: Sequence[Iterable[Signal]]) -> list[Clock]:
        """A clock for each level, without the overhead of a round; ``signals`` are read at each level, from the top."""
        if len(signals) == 1:
            return [self.clock(signals[0])]
        assert self.below is not None
        reading = self.reading_ms.get(signal_key(signals[0]), 0.0) / 1e3
        own, (next_, *further) = self.clock(()), self.below.clocks(signals[1:])

        def collecting(context: int, drafted: int, unread: int, verified: int | None = None, /) -> tuple[float, float]:
            return self.catching_up(unread) / 1e3, own(context, drafted, 0, verified)[1]

        def with_reading(
            context: int, drafted: int, unread: int, verified: int | None = None, /
        ) -> tuple[float, float]:
            draft, verify = next_(context, drafted, unread, verified)
            return draft, verify + reading

        return [collecting, with_reading, *further]

    def clock(self, signals: Iterable[Signal]) -> Clock:
        """The clock of a draft without drafts below it; ``signals`` are read for each drafted token."""
        each = self.signal_ms.get(signal_key(signals), 0.0)

        def point(context: int, length: int) -> tuple[float, float]:
            if (context, length) not in self._points:
                row, column = np.array([context]), np.array([length])
                self._points[context, length] = (
                    float(self._at(self.draft_ms, row, column)[0]),
                    float(self._at(self.verify_ms, row, column)[0]),
                )
            return self._points[context, length]

        def seconds(context: int, drafted: int, unread: int, verified: int | None = None, /) -> tuple[float, float]:
            draft, verify = point(context, drafted)
            if verified is not None and verified != drafted:
                verify = point(context, verified)[1]
            if unread:
                draft += self.catching_up(unread)
            return (draft + each * drafted) / 1e3, verify / 1e3

        return seconds

    def catching_up(self, unread: int) -> float:
        """Milliseconds that a draft takes to read ``unread`` tokens of the text before its first step."""
        if not self.catch_up_ms or not unread:
            return 0.0
        known = sorted(self.catch_up_ms)
        if unread > known[-1]:
            return self.catch_up_ms[known[-1]] * unread / known[-1]
        return float(np.interp(unread, [0, *known], [0.0, *(self.catch_up_ms[count] for count in known)]))

    def _catching_up(self, level: Level, by_model: Sequence[int], prompt_tokens: int) -> float:
        """Milliseconds of `catching_up` in all rounds, of whose tokens the model drafted ``by_model``."""
        read, total = TextRead(), 0.0
        for start, drafted, own, accepted in zip(level.starts, level.drafted, by_model, level.accepted, strict=True):
            # If a copy replaces the model's tokens in the first round, the model counts as used.
            if unread := read.replayed(prompt_tokens + start, own, accepted, wanted=drafted > 0):
                total += self.catching_up(unread)
        return total

    def at(self, context: float) -> tuple[float, float]:
        """Milliseconds of one draft step and of the narrowest verifying pass with ``context`` tokens in the caches."""
        row_draft = [np.interp(context, self.contexts, column) for column in self.draft_ms.T]
        row_verify = [np.interp(context, self.contexts, column) for column in self.verify_ms.T]
        if len(self.lengths) > 2:
            slope = np.polyfit(self.lengths[1:], row_draft[1:], 1)[0]
        else:
            slope = row_draft[-1] / self.lengths[-1]
        return float(slope), float(row_verify[0])

    def as_record(self) -> dict[str, Any]:
        """The table as plain rounded numbers, to be shown as JSON or TOML."""
        record: dict[str, Any] = _rounded(_table().dump_python(self, mode="json", by_alias=True, exclude_defaults=True))
        return record

    def verifying(self, context: float, drafted: float) -> float:
        """Milliseconds of a pass that verifies a draft, interpolated between measured lengths."""
        return float(self._at(self.verify_ms, np.array([context]), np.array([drafted]))[0])

    def _at(self, table: Floats, context: Any, length: Any) -> Floats:
        """Bilinear interpolation of ``table (C, K)`` at N points, constant beyond its edges."""
        at_length = np.stack([np.interp(length, self.lengths, row) for row in table])  # (C, N)
        if len(at_length) == 1:
            only: Floats = at_length[0]
            return only
        row = np.interp(context, self.contexts, np.arange(len(self.contexts)))  # (N,)
        low = np.minimum(row.astype(np.intp), len(self.contexts) - 2)
        points = np.arange(len(row))
        times: Floats = at_length[low, points] * (1 - (row - low)) + at_length[low + 1, points] * (row - low)
        return times

    @cached_property
    def _both_ms(self) -> Floats:
        return self.draft_ms + self.verify_ms

    @cached_property
    def _by_predictor(self) -> "dict[str, CostTable]":
        return {}

    @cached_property
    def _points(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Interpolated times, cached because thousands of settings share rounds."""
        return {}

    @cached_property
    def _passes(self) -> dict[tuple[int, int, int], tuple[float, float, float]]:
        """The results of `together`."""
        return {}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, DIGITS) if isinstance(value, float) else value


@cache
def _table() -> TypeAdapter[CostTable]:
    return TypeAdapter(CostTable)
