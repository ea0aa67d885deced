"""Plays policies on traces: the same rounds as a live run, without a model. No torch here."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from specctl.policies import Setting, StoppingPolicy, collect_phase, draft_phase
from specctl.records import DraftStep, ExtraToken, Round, RoundSummary, StopReason
from specctl.replay.traces import DraftAlong, Trace

Clock = Callable[[int, int], tuple[float, float]]
"""Seconds of a round's drafting and verifying, from the tokens before it (the prompt's too) and the tokens it drafts.

For a draft that collects its block from inner rounds, the first is its overhead without these rounds."""


class Player(NamedTuple):
    """One draft's part in a replay.

    Attributes:
        once: whether its block, if a draft below writes it, goes up after one inner round.
        clock: of the rounds in which its blocks are judged; without one all takes no time.
    """

    policy: StoppingPolicy
    once: bool = False
    clock: Clock | None = None


def players_of(setting: Setting, clocks: Iterable[Clock | None]) -> list[Player]:
    """A player with a fresh policy for each level of a setting, from the top down, each with its clock."""
    return [Player(level.build(), level.once, clock) for level, clock in zip(setting.levels, clocks, strict=True)]


@dataclass(slots=True)
class Level:
    """The rounds of one level on one sequence, as columns of equal length.

    Attributes:
        starts: generated tokens before each round; in an inner round the block's own so far count too.
        drafted, accepted: tokens of each round.
    """

    starts: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replay:
    """A sequence's rounds, as columns of equal length.

    Attributes:
        starts: tokens generated before each round.
        drafted, accepted: tokens of each round.
        inner: the levels below, from the top down.
    """

    trace: Trace
    starts: list[int]
    drafted: list[int]
    accepted: list[int]
    inner: tuple[Level, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.trace.tokens)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The rounds of every level, from the top down."""
        return (Level(self.starts, self.drafted, self.accepted), *self.inner)


class _Drafted(NamedTuple):
    steps: list[DraftStep]
    stop: StopReason
    threshold: float | None
    inner: list[Round]


class _Drafting:
    """One draft, with those below it, on a trace."""

    def __init__(self, players: Sequence[Player], prompt_tokens: int, eos: Set[int]) -> None:
        self.policy, self._once, self._clock = players[0]
        self._prompt_tokens, self._eos = prompt_tokens, eos
        self._below = _Drafting(players[1:], prompt_tokens, eos) if len(players) > 1 else None
        self.policy.reset()

    def draft(self, draft: DraftAlong, start: int, budget: int) -> _Drafted:
        """A block of at most ``budget`` tokens from a position of its line on."""
        threshold = self.policy.current_threshold
        if (below := self._below) is None:
            steps, stop = draft_phase(self.policy, budget, self._eos, partial(draft.step, start))
            return _Drafted(steps, stop, threshold, [])
        text = draft.under(start)

        def pre_verify(index: int, first: int, room: int) -> tuple[Round, list[DraftStep]]:
            position = start + first - 1
            drafted = below.draft(text, position, room)
            round_ = below.judge(drafted, index, text, position, lambda kept: draft.step(start, first + kept).token)
            below.policy.observe(round_)
            return round_, [draft.step(start, first + n) for n in range(len(round_.emitted))]

        steps, stop, inner = collect_phase(self.policy, self._once, budget, self._eos, pre_verify)
        return _Drafted(steps, stop, threshold, inner)

    def judge(
        self,
        drafted: _Drafted,
        index: int,
        draft: DraftAlong,
        start: int,
        written: Callable[[int], int],
        chances: Sequence[float] | None = None,
    ) -> Round:
        """The round that a block ends in.

        Args:
            drafted: the block.
            index: of the round.
            draft: the draft along its verifier's text.
            start: the block's first position there.
            written: gives the verifier's own token after a number of accepted ones.
            chances: by position, the probability that the draft token is accepted.
        """
        steps = drafted.steps
        accepted = min(len(steps), draft.accepted_runs[start])
        full = accepted == len(steps)
        ended = full and bool(steps) and steps[-1].token in self._eos
        kind = None if ended else ExtraToken.BONUS if full else ExtraToken.CORRECTION
        drafting, verifying = self._clock(self._prompt_tokens + start, len(steps)) if self._clock else (0.0, 0.0)
        drafting += sum(round_.total_seconds for round_ in drafted.inner)
        return Round(
            index=index,
            steps=tuple(steps),
            accepted=accepted,
            extra=None if ended else written(accepted),
            extra_kind=kind,
            stop=drafted.stop if self.policy.drafts else None,
            threshold=drafted.threshold,
            draft_seconds=drafting,
            verify_seconds=verifying,
            total_seconds=drafting + verifying,
            inner=tuple(drafted.inner),
            chances=None if chances is None else tuple(chances[start : start + accepted + (not full)]),
        )


def play(players: Sequence[Player], trace: Trace, eos: Set[int]) -> Iterator[Round]:
    """Yield every round that `specctl.decoding.loop.decode` would have played, with the times that clocks give them.

    In greedy decoding they are the very same: the target's text is fixed, so a round depends only on where it starts
    and when the policy stops. When sampling they have the distribution of a live run. At every position the target's
    token x, the draft token y and its verdict are drawn jointly, x first: with probability min(1, q(x) / p(x)) y = x
    and is accepted, else y is drawn from max(q - p, 0) and rejected. This is the joint distribution of drafting y,
    accepting it with probability min(1, p(y) / q(y)) and drawing x from max(p - q, 0) after a rejection. So the rounds
    are distributed as in a live run whichever positions a policy drafts at, and a position it leaves to the target has
    the distribution p.

    In a hierarchy the same holds between each draft and the one below it, along all that the upper one may write: given
    y, the lower draft's token at that position is independent of x, as in a live run. `replayable` is False where
    replayed rounds would be distributed otherwise.

    Args:
        players: of the drafts from the top down, no more of them than the trace has.
        trace: a sequence.
        eos: ids that end it.
    """
    top = _Drafting(_at_work(players), trace.prompt_tokens, eos)
    draft, tokens, start, index = trace.draft, trace.tokens, 0, 0
    while start < len(tokens):
        drafted = top.draft(draft, start, trace.limit - start - 1)
        round_ = top.judge(drafted, index, draft, start, partial(_nth, tokens, start), trace.chances)
        top.policy.observe(round_)
        yield round_
        start += len(round_.emitted)
        index += 1


def _nth(tokens: Sequence[int], start: int, count: int) -> int:
    return tokens[start + count]


def _at_work(players: Sequence[Player]) -> Sequence[Player]:
    """Without the levels at and below a policy that never drafts, as they are left out live; the first stays."""
    idle = (level for level, player in enumerate(players) if level and not player.policy.drafts)
    return players[: next(idle, len(players))]


def replayable(setting: Setting, *, sampled: bool) -> bool:
    """Whether replayed rounds have the law of live ones.

    When sampling, a middle draft's policy that drops its trigger (``keep_trigger = false``) drops what the lower draft
    has written behind it too, and a live run draws that text anew; a trace has it once.
    """
    return not sampled or all(level.all_values.get("keep_trigger", True) for level in setting.levels[:-1])


def rounds(policy: StoppingPolicy, trace: Trace, eos: Set[int], clock: Clock | None = None) -> Iterator[Round]:
    """`play` of a draft alone."""
    return play([Player(policy, clock=clock)], trace, eos)


def replay(policy: StoppingPolicy, traces: Iterable[Trace], eos: Set[int], clock: Clock | None = None) -> list[Replay]:
    """`replay_levels` of a draft alone."""
    return replay_levels([Player(policy, clock=clock)], traces, eos)


def replay_levels(players: Sequence[Player], traces: Iterable[Trace], eos: Set[int]) -> list[Replay]:
    """Play policies on each sequence in turn; what they carry over goes from one to the next, as it does live."""
    replays = []
    for trace in traces:
        top, *inner = columns(play(players, trace, eos), len(_at_work(players)))
        replays.append(Replay(trace, top.starts, top.drafted, top.accepted, tuple(inner)))
    return replays


def columns(rounds: Iterable[Round | RoundSummary], least: int = 1) -> list[Level]:
    """The rounds of a sequence by level, from the top down; no fewer than ``least`` levels, even without rounds."""
    levels = [Level() for _ in range(least)]
    _note(rounds, 0, 0, levels)
    return levels


def _note(rounds: Iterable[Round | RoundSummary], start: int, depth: int, levels: list[Level]) -> None:
    if depth == len(levels):
        levels.append(Level())
    level = levels[depth]
    for round_ in rounds:
        level.starts.append(start)
        level.drafted.append(round_.drafted)
        level.accepted.append(round_.accepted)
        if round_.inner:
            _note(round_.inner, start, depth + 1, levels)
        start += round_.accepted + 1  # only the last round may lack the verifier's own token


def oracle(trace: Trace, levels: int = 1) -> Replay:
    """The rounds of a policy that knows where the target will disagree (SpecDec++, arXiv 2405.19715, Theorem 4.1).

    It drafts exactly up to each disagreement: nothing is discarded, and the target passes are the fewest possible. In
    a hierarchy of ``levels`` drafts, every draft below knows where the one above will disagree.
    """
    top, *inner = (Level() for _ in range(levels))
    start = 0
    while start < len(trace.tokens):
        # The last position is the verifier's own, unless the draft ends the sequence there.
        length = min(trace.draft.accepted_runs[start], max(0, trace.limit - start - 1))
        top.starts.append(start)
        top.drafted.append(length)
        _foreseen(trace.draft, start, length, inner)
        start += length + 1
    for level in (top, *inner):
        level.accepted.extend(level.drafted)
    return Replay(trace, top.starts, top.drafted, top.accepted, tuple(inner))


def _foreseen(draft: DraftAlong, start: int, length: int, inner: Sequence[Level]) -> None:
    """The inner rounds in which a block of a length is collected with nothing discarded."""
    if not inner:
        return
    text, position, end = draft.under(start), start, start + length
    while position < end:
        drafted = min(text.accepted_runs[position], end - position - 1)
        inner[0].starts.append(position)
        inner[0].drafted.append(drafted)
        _foreseen(text, position, drafted, inner[1:])
        position += drafted + 1
