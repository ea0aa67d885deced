"""Replays policies on traces: the rounds of a live run, without running a model. No torch here."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from specctl.errors import UsageError
from specctl.policies import Setting, StoppingPolicy, TextRead, collect_phase, draft_phase
from specctl.records import DraftStep, ExtraToken, Round, RoundSummary, StopReason
from specctl.replay.recorded import Recorded
from specctl.replay.traces import Trace

Clock = Callable[[int, int, int], tuple[float, float]]
"""Seconds of a round's drafting and of its verifying, from the number of tokens before the round (prompt included), the
number of tokens it drafts, and how many the draft has to read first (`TextRead`). For a middle draft, the first value
is its overhead excluding inner rounds."""


class Passes(Protocol):
    """Passes that other texts share, and so have to be waited for; each gives the seconds of this text's share."""

    def draft(self, context: int, unread: int) -> float:
        """One draft token behind ``context`` tokens, of which ``unread`` are read first."""

    def verify(self, context: int, drafted: int) -> float: ...


class Player(NamedTuple):
    """One draft in a replay.

    Attributes:
        policy: when the draft stops.
        once: for a middle draft, whether its block is verified after one inner round.
        clock: times of the rounds in which its blocks are verified; None for rounds that take no time.
        passes: of a draft alone, what its rounds wait for, in the place of a clock.
    """

    policy: StoppingPolicy
    once: bool = False
    clock: Clock | None = None
    passes: Passes | None = None


def players_of(setting: Setting, clocks: Iterable[Clock | None]) -> list[Player]:
    """A player with a fresh policy for each level of a setting, from the top down, each with its clock."""
    return [Player(level.build(), level.once, clock) for level, clock in zip(setting.levels, clocks, strict=True)]


@dataclass(slots=True)
class Level:
    """The rounds of one level on one sequence, as columns of equal length.

    Attributes:
        starts: generated tokens before each round; for an inner round, the tokens collected in the block so far count
            too.
        drafted, accepted: tokens of each round.
        nodes: tokens that each round verified, if there were leaves in any; else empty.
    """

    starts: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Replay:
    """The replayed rounds of a sequence, as columns of equal length.

    Attributes:
        trace: the sequence.
        starts: tokens generated before each round.
        drafted, accepted: tokens of each round.
        inner: the levels below the first, from the top down.
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


class _Block(NamedTuple):
    steps: list[DraftStep]
    stop: StopReason
    threshold: float | None
    inner: list[Round]


class _Drafting:
    """A draft on a trace, with those below it."""

    def __init__(self, players: Sequence[Player], prompt_tokens: int, eos: Set[int]) -> None:
        self.policy, self._once, self._clock, self._passes = players[0]
        self._waited = 0.0
        self._prompt_tokens, self._eos = prompt_tokens, eos
        self._below = _Drafting(players[1:], prompt_tokens, eos) if len(players) > 1 else None
        self._read = TextRead()
        self.policy.reset()

    def draft(self, draft: Recorded, start: int, budget: int) -> _Block:
        """A block of at most ``budget`` tokens that starts at a position.

        Args:
            draft: what this draft drafts along its verifier's text.
            start: position of the block's first token.
            budget: most tokens of the block.
        """
        threshold = self.policy.current_threshold
        if (below := self._below) is None:
            step = partial(draft.step, start) if self._passes is None else partial(self._waited_for, draft, start)
            steps, stop = draft_phase(self.policy, budget, self._eos, step, draft.longest)
            return _Block(steps, stop, threshold, [])
        text = draft.under(start)

        def pre_verify(index: int, first: int, room: int) -> tuple[Round, list[DraftStep]]:
            position = start + first - 1
            drafted = below.draft(text, position, room)
            round_ = below.verify(drafted, index, text, position, lambda count: draft.step(start, first + count).token)
            below.policy.observe(round_)
            return round_, [draft.step(start, first + n) for n in range(len(round_.emitted))]

        steps, stop, inner = collect_phase(self.policy, self._once, budget, self._eos, pre_verify)
        return _Block(steps, stop, threshold, inner)

    def _waited_for(self, draft: Recorded, start: int, index: int) -> DraftStep:
        assert self._passes is not None
        before = self._prompt_tokens + start
        self._waited += self._passes.draft(before + index - 1, self._read.missing(before) if index == 1 else 0)
        return draft.step(start, index)

    def verify(
        self,
        drafted: _Block,
        index: int,
        draft: Recorded,
        start: int,
        written: Callable[[int], int],
    ) -> Round:
        """Verify a block: the round that it was drafted in.

        Args:
            drafted: the block.
            index: of the round.
            draft: what this draft drafts along its verifier's text.
            start: position of the block's first token.
            written: returns the verifier's own token after a number of accepted draft tokens.
        """
        steps = drafted.steps
        accepted = min(len(steps), draft.accepted_runs[start])
        full = accepted == len(steps)
        ended = full and bool(steps) and steps[-1].token in self._eos
        kind = None if ended else ExtraToken.BONUS if full else ExtraToken.CORRECTION
        context = self._prompt_tokens + start
        unread = self._read.round(context, bool(steps), accepted + (not ended))
        if self._passes is not None:
            drafting, verifying, self._waited = self._waited, self._passes.verify(context, len(steps)), 0.0
        else:
            drafting, verifying = self._clock(context, len(steps), unread) if self._clock is not None else (0.0, 0.0)
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
            chances=draft.verified_chances(start, len(steps), accepted + (not full)),
            context=context,
        )


def play(players: Sequence[Player], trace: Trace, eos: Set[int]) -> Iterator[Round]:
    """Yield every round that `specctl.decoding.loop.decode` would run, with the times of the players' clocks.

    In greedy decoding the rounds are identical to live ones: the target's text is fixed, so a round depends only on
    where it starts and when the policy stops. When sampling, the rounds have the distribution of a live run; for drafts
    verified as blocks `specctl.replay.recording.block_coupling` says why. Where tokens are verified one by one, at
    every position the target's token x, the draft token y and its verdict were drawn jointly, x first: with probability
    min(1, q(x) / p(x)), y = x and y is accepted; otherwise y is drawn from max(q - p, 0) and rejected. This is the
    joint distribution of drafting y, accepting it with probability min(1, p(y) / q(y)) and drawing x from max(p - q, 0)
    after a rejection. So the rounds are distributed as in a live run at whichever positions a policy drafts, and a
    token that the target writes without a draft token has the distribution p.

    A draft head's q at a position depends on where the round began. A trace contains, for each start, y and its
    verdict at every position up to the first rejected y, drawn in the same way with that start's q, and then how the
    draft goes on; the token that is fed next is x as long as y is accepted, as in a live run. Given the text, the rows
    of different starts share nothing but the coin that decides the verdict at a position. The rounds of a replay cover
    disjoint positions, each with one row, so their coins are independent, as in a live run.

    In a hierarchy this holds for each draft and its verifier, along everything that the verifier may write: given y,
    the lower draft's token at that position is independent of x, as in a live run.
    `replayable` is False for settings whose replayed rounds would be distributed differently.

    Args:
        players: one for each draft that takes part, from the top down; at most as many as the trace has drafts.
        trace: a sequence.
        eos: ids that end the sequence.
    """
    top = _Drafting(_active(players), trace.prompt_tokens, eos)
    draft, tokens, start, index = trace.draft, trace.tokens, 0, 0
    while start < len(tokens):
        drafted = top.draft(draft, start, trace.limit - start - 1)
        round_ = top.verify(drafted, index, draft, start, partial(_nth, tokens, start))
        top.policy.observe(round_)
        yield round_
        start += len(round_.emitted)
        index += 1


def _nth(tokens: Sequence[int], start: int, count: int) -> int:
    return tokens[start + count]


def _active(players: Sequence[Player]) -> Sequence[Player]:
    """The players that take part: the first, and those below it until a policy never drafts, as in a live run."""
    idle = (level for level, player in enumerate(players) if level and not player.policy.drafts)
    return players[: next(idle, len(players))]


def require_recordable(drafts: int, has_draft_head: bool) -> None:
    """Raise UsageError for a draft head below another draft.

    Its round depends on the states that this draft had read when the round began, and so on the rounds before.
    """
    if drafts > 1 and has_draft_head:
        raise UsageError(
            "a draft head below another draft cannot be replayed: what it drafts depends on what that draft had read "
            "when the round began, which a trace does not hold",
            "leave one of the two out, or compare settings live with `specctl bench`",
        )


def replayable(setting: Setting, *, sampled: bool) -> bool:
    """Whether replayed rounds have the distribution of live ones.

    They do not when sampling with a middle draft that drops the token at which its policy stops (``keep_trigger =
    false``): a live run then draws the lower draft's tokens behind it a second time, and a trace contains one draw.
    """
    return not sampled or all(level.all_values.get("keep_trigger", True) for level in setting.levels[:-1])


def rounds(policy: StoppingPolicy, trace: Trace, eos: Set[int], clock: Clock | None = None) -> Iterator[Round]:
    """`play` of a draft alone."""
    return play([Player(policy, clock=clock)], trace, eos)


def replay(policy: StoppingPolicy, traces: Iterable[Trace], eos: Set[int], clock: Clock | None = None) -> list[Replay]:
    """`replay_levels` of a draft alone."""
    return replay_levels([Player(policy, clock=clock)], traces, eos)


def replay_levels(players: Sequence[Player], traces: Iterable[Trace], eos: Set[int]) -> list[Replay]:
    """Play policies on each sequence in turn; as in a live run, a policy keeps for the next what it carries over."""
    replays = []
    for trace in traces:
        top, *inner = columns(play(players, trace, eos), len(_active(players)))
        replays.append(Replay(trace, top.starts, top.drafted, top.accepted, tuple(inner)))
    return replays


def columns(rounds: Iterable[Round | RoundSummary], least: int = 1) -> list[Level]:
    """The rounds of a sequence by level, from the top down; at least ``least`` levels, some of them perhaps empty."""
    levels = [Level() for _ in range(least)]
    rounds = list(rounds)
    _note(rounds, 0, 0, levels)
    if any(round_.nodes > round_.drafted for round_ in rounds):
        levels[0].nodes.extend(round_.nodes for round_ in rounds)
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
        start += (
            round_.accepted + (round_.leaf is not None) + 1
        )  # only the last round may lack the verifier's own token
