"""Replays policies on traces, of one text or several at once: the rounds of a live run without a model or torch."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from specctl.decoding.chained import Chaining, with_copy
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.running.lookup import LookupPasses
from specctl.models.running.slot import Slot
from specctl.policies import Setting, Signal, StoppingPolicy, TextRead, collect_phase, draft_phase
from specctl.records import DraftStep, ExtraToken, Round, StopReason
from specctl.replay.costs import Clock, CostTable, Replay, columns
from specctl.replay.traces import Recorded, Trace, with_agreement
from specctl.text_engine.hub import Decisions, Hub


class Block(NamedTuple):
    """A drafted block: steps, stop reason, the policy's threshold, inner rounds, and the number of copied tokens."""

    steps: list[DraftStep]
    stop: StopReason
    threshold: float | None
    inner: list[Round]
    copied: int = 0


Before = Callable[[], list[int]]
"""Returns the ids of the sequence before a block, those of the prompt included."""


class ChainedReplay:
    """The rounds of a draft in a chain with a lookup; replays `specctl.decoding.chained`.

    Args:
        chaining: its state carries over to the next text, like the policy's.
        policy: the model's policy.
        drafting: drafts with the model; see `_Drafting.draft`.
        trace: the trace, with its prompt.
        eos: ids that end the sequence.

    Raises:
        UsageError: the trace lacks the prompt.
    """

    def __init__(
        self,
        chaining: Chaining,
        policy: StoppingPolicy,
        drafting: Callable[[Recorded, int, int, "Before"], Block],
        trace: Trace,
        eos: Set[int],
    ) -> None:
        trace.require_prompt()
        self._chaining, self._policy, self._drafting, self._eos = chaining, policy, drafting, eos
        self._text = [*trace.prompt_ids, *trace.tokens]
        self._prompt_tokens = trace.prompt_tokens
        self._asked = False
        chaining.rollback(0)
        chaining.read_prompt(trace.prompt_ids[:-1])
        chaining.begin()

    def draft(self, draft: Recorded, start: int, budget: int, before: "Before") -> Block:
        """A block of at most ``budget`` tokens that starts at a position; see `_Drafting.draft`."""
        chaining, policy = self._chaining, self._policy
        written = self._text[chaining.length : self._prompt_tokens + start]
        room = draft.room(start, 1)
        copied = chaining.instead(written, budget, model=lambda: policy.draft_limit() > 0 and room > 0)
        self._asked = not copied
        block = Block([], StopReason.POLICY, policy.current_threshold, [])
        if self._asked:
            block = self._drafting(draft, start, budget, before)
            copied = chaining.behind([step.token for step in block.steps], block.stop, budget)
        if not copied:
            return block
        steps, stop = with_copy(block.steps, copied, budget, self._eos)
        return block._replace(steps=list(steps), stop=stop, copied=len(steps) - len(block.steps))

    def observe(self, round_: Round) -> None:
        """Learn from a round; the policy learns only if the model drafted in it."""
        self._chaining.observe(round_)
        if self._asked:
            self._policy.observe(self._chaining.of_model(round_))


class Player(NamedTuple):
    """One draft in a replay."""

    policy: StoppingPolicy  # stops the draft
    once: bool = False  # of a middle draft, whether its block is verified after one inner round
    # times of the rounds in which its blocks are verified; None for rounds that take no time
    clock: Clock | None = None
    chaining: Chaining | None = None  # of a first draft in a chain with a lookup
    # of a draft alone whose passes several texts share, called before each draft token. It receives the number of
    # tokens before the token and how many the draft reads first. ``clock`` then returns the shares of all passes since
    # it was last called.
    wait: Callable[[int, int], None] | None = None


def players_of(setting: Setting, clocks: Iterable[Clock | None]) -> list[Player]:
    """A player with a fresh policy for each level of a setting, from the top down, each with its clock."""
    return [
        Player(level.build(), level.once, clock, chaining=Chaining(level.earlier) if level.lookup else None)
        for level, clock in zip(setting.levels, clocks, strict=True)
    ]


class _Drafting:
    """A draft on a trace, with those below it.

    Args:
        players: this draft and those below it.
        recorded: this draft's recording along the text.
        prompt_tokens: length of the prompt.
        eos: ids that end the sequence.
    """

    def __init__(self, players: Sequence[Player], recorded: Recorded, prompt_tokens: int, eos: Set[int]) -> None:
        self.policy, self._once, self._clock, _, self._wait = players[0]
        self._prompt_tokens, self._eos = prompt_tokens, eos
        self._below: _Drafting | None = None
        if len(players) > 1:
            # Nothing is recorded below a draft whose context the prompt fills.
            self._below = _Drafting(players[1:], recorded.below or recorded, prompt_tokens, eos)
        self._read = TextRead()
        self._lookup = LookupDrafter(Slot(LookupPasses(1)), self.policy) if recorded.copies else None
        # Whether this draft or one below it is a lookup.
        self.copies: bool = recorded.copies or (self._below is not None and self._below.copies)
        if self._lookup is not None:
            self._lookup.begin(Sampling(), eos, None)
        self.policy.reset()

    def draft(self, draft: Recorded, start: int, budget: int, before: Before) -> Block:
        """A block of at most ``budget`` tokens that starts at a position.

        Args:
            draft: this draft's recording along its verifier's text.
            start: position of the block's first token.
            budget: most tokens of the block.
            before: called where a lookup copies from these tokens.
        """
        if self._lookup is not None:
            return self._copy(self._lookup, before(), budget)
        threshold = self.policy.current_threshold
        budget = draft.room(start, budget)
        if (below := self._below) is None:
            step = partial(draft.step if self._wait is None else partial(self._step_in_turn, draft), start)
            steps, stop = draft_phase(self.policy, budget, self._eos, step, draft.longest)
            return Block(steps, stop, threshold, [])
        text = draft.under(start) if budget else draft

        def pre_verify(index: int, first: int, room: int) -> tuple[Round, list[DraftStep]]:
            position = start + first - 1
            block = range(1, first)
            drafted = below.draft(
                text, position, room, lambda: [*before(), *(draft.step(start, place).token for place in block)]
            )
            round_ = below.verify(drafted, index, text, position, lambda count: draft.step(start, first + count).token)
            below.observe(round_)
            return round_, [draft.step(start, first + n) for n in range(len(round_.emitted))]

        steps, stop, inner = collect_phase(self.policy, self._once, budget, self._eos, pre_verify)
        return Block(steps, stop, threshold, inner)

    @staticmethod
    def _copy(lookup: LookupDrafter, sequence: list[int], budget: int) -> Block:
        """A block that the lookup itself copies; it first forgets what is not in the sequence."""
        known = lookup.runner.index.tokens if lookup.runner.index is not None else ()
        if sequence[: len(known)] != known:
            pairs = zip(known, sequence, strict=False)
            lookup.rollback(next((place for place, (old, new) in enumerate(pairs) if old != new), len(sequence)))
        found = lookup.draft(sequence, budget)
        return Block(list(found.steps), found.stop or StopReason.POLICY, found.threshold, [])

    def observe(self, round_: Round) -> None:
        """Learn from a round."""
        (self._lookup or self.policy).observe(round_)

    def _step_in_turn(self, draft: Recorded, start: int, index: int) -> DraftStep:
        assert self._wait is not None
        before = self._prompt_tokens + start
        self._wait(before + index - 1, self._read.missing(before) if index == 1 else 0)
        return draft.step(start, index)

    def verify(
        self,
        drafted: Block,
        index: int,
        draft: Recorded,
        start: int,
        written: Callable[[int], int],
    ) -> Round:
        """Verify a block and return its round.

        Args:
            drafted: the block.
            index: of the round.
            draft: this draft's recording along its verifier's text.
            start: position of the block's first token.
            written: returns the verifier's own token after a number of accepted draft tokens.
        """
        steps, own = drafted.steps, len(drafted.steps) - drafted.copied
        recorded = 0 if draft.copies else own
        accepted = min(recorded, draft.run(start))
        while recorded <= accepted < len(steps) and steps[accepted].token == written(accepted):
            accepted += 1  # a copied token is accepted if it equals the target's: see `play`
        judged = min(own, accepted + 1)
        full = accepted == len(steps)
        ended = full and bool(steps) and steps[-1].token in self._eos
        kind = None if ended else ExtraToken.BONUS if full else ExtraToken.CORRECTION
        context = self._prompt_tokens + start
        wanted = drafted.copied > 0 and self.policy.draft_limit() > 0 and draft.room(start, 1) > 0
        unread = 0 if draft.copies else self._read.replayed(context, own, accepted, wanted=wanted)
        drafting, verifying = (0.0, 0.0) if self._clock is None else self._clock(context, own, unread, len(steps))
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
            chances=draft.verified_chances(start, own, judged),
            context=context,
            copied=drafted.copied,
        )


def play(players: Sequence[Player], trace: Trace, eos: Set[int]) -> Iterator[Round]:
    """Yield every round that `specctl.decoding.loop.decode` would run, with the times of the players' clocks.

    In greedy decoding the rounds are identical to live ones: the target's text is fixed, so a round depends only on
    where it starts and when the policy stops. When sampling, the rounds have the distribution of a live run. For drafts
    verified as blocks, `specctl.replay.recording.coupling` gives the reason. Where tokens are verified one by one, the
    target's token x, the draft token y and its verdict were drawn jointly at every position, x first. With probability
    min(1, q(x) / p(x)), y = x and y is accepted; otherwise y is drawn from max(q - p, 0) and rejected. This is the
    joint distribution of drafting y, accepting it with probability min(1, p(y) / q(y)) and drawing x from max(p - q, 0)
    after a rejection. So the rounds are distributed as in a live run wherever a policy drafts, and a token that the
    target writes without a draft token has the distribution p.

    A draft head's q at a position depends on where the round began. For each start, a trace has y and its verdict at
    every position up to the first rejected y, drawn in the same way with the q of that start, and then how the draft
    continues. The token that is fed next is x as long as y is accepted, as in a live run. Given the text, different
    starts share only the coin that decides the verdict at a position. The rounds of a replay cover disjoint positions,
    so their coins are independent, as in a live run.

    A token that a lookup copies after accepted ones has q = 1. So it is accepted with the probability that p gives it,
    and after a rejection the target draws from the rest of p: it is accepted where it is the text's own. The same holds
    in block verification. There i or more of the model's k tokens are accepted with the same probability, whatever
    follows them. All of them and j copied ones are accepted with w_k times the product of the copied tokens' p, as if
    the copy began a block of its own.

    In a hierarchy this holds for each draft and its verifier, along everything that the verifier may write: given y,
    the lower draft's token at that position is independent of x, as in a live run.
    `replayable` is False for settings whose replayed rounds would be distributed differently.

    Args:
        players: one for each draft that takes part, from the top down; at most as many as the trace has drafts.
        trace: a sequence.
        eos: ids that end the sequence.
    """
    top = _Drafting(_active(players), trace.draft, trace.prompt_tokens, eos)
    chained = (
        None if players[0].chaining is None else ChainedReplay(players[0].chaining, top.policy, top.draft, trace, eos)
    )
    if top.copies:
        trace.require_prompt()
    tokens, start, index = trace.tokens, 0, 0
    draft = with_agreement(trace) if "agreement" in players[0].policy.signals else trace.draft
    while start < len(tokens):
        before = partial(_before, trace, start)
        drafted = (chained or top).draft(draft, start, trace.limit - start - 1, before)
        round_ = top.verify(drafted, index, draft, start, partial(_nth, tokens, start))
        (chained or top).observe(round_)
        yield round_
        start += len(round_.emitted)
        index += 1


def _before(trace: Trace, start: int) -> list[int]:
    return [*trace.prompt_ids, *trace.tokens[:start]]


def _nth(tokens: Sequence[int], start: int, count: int) -> int:
    return tokens[start + count]


def _active(players: Sequence[Player]) -> Sequence[Player]:
    """The first player and those below it, up to a policy that never drafts, as in a live run."""
    idle = (level for level, player in enumerate(players) if level and not player.policy.drafts)
    return players[: next(idle, len(players))]


def require_recordable(drafts: int, has_draft_head: bool) -> None:
    """Raise UsageError for a draft head below another draft.

    Its drafts depend on the states that the draft above had read when the round began, and so on earlier rounds.
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
    false``): a live run then draws the lower draft's tokens after it a second time, and a trace contains one draw.
    """
    return not sampled or all(level.all_values.get("keep_trigger", True) for level in setting.levels[:-1])


def rounds(policy: StoppingPolicy, trace: Trace, eos: Set[int], clock: Clock | None = None) -> Iterator[Round]:
    """`play` of a draft alone."""
    return play([Player(policy, clock=clock)], trace, eos)


def replay(policy: StoppingPolicy, traces: Iterable[Trace], eos: Set[int], clock: Clock | None = None) -> list[Replay]:
    """`replay_levels` of a draft alone."""
    return replay_levels([Player(policy, clock=clock)], traces, eos)


def replay_levels(players: Sequence[Player], traces: Iterable[Trace], eos: Set[int]) -> list[Replay]:
    """Play policies on each sequence in turn; as in a live run, their state may carry over."""
    least = len(_active(players))
    return [Replay(trace, tuple(columns(play(players, trace, eos), least))) for trace in traces]


@dataclass(frozen=True, slots=True)
class PassShare:
    """A text's part in a pass."""

    context: int  # tokens that are cached before it
    drafted: int = 0  # in a verification, how many draft tokens are read besides the newest token
    unread: int = 0  # in a draft's pass, how many tokens of the text are read first

    @property
    def size(self) -> float:
        return self.drafted + 1


@dataclass(slots=True)
class PricedPasses:
    """Simulated passes over several texts: each text receives its share of the seconds that they would take."""

    costs: CostTable  # of the machine
    signals: Set[Signal]  # read of each drafted token
    verifies: bool  # whether they verify drafts; else they generate a token of each text
    # count, seconds: passes so far, and their time with the rest of their rounds
    count: int = 0
    seconds: float = 0.0

    def run(self, requests: Sequence[PassShare]) -> list[float]:
        rows = len(requests)
        context = sum(request.context for request in requests) // rows
        draft, verify, rest = self.costs.together(rows, context, sum(request.drafted for request in requests))
        if self.verifies:
            taken = verify
            self.seconds += rest / 1e3  # policies do not see this
        else:
            taken = draft + self.costs.reading_together(rows, self.signals)
            taken += self.costs.catching_up(max(request.unread for request in requests))
        self.count += 1
        self.seconds += taken / 1e3
        each = taken / 1e3 / sum(request.size for request in requests)
        return [each * request.size for request in requests]


@dataclass(slots=True)
class BatchReplay:
    """Texts that were replayed together."""

    replays: list[Replay] = field(default_factory=list)  # of the texts, in the order in which they ended
    shares: list[float] = field(default_factory=list)  # of each text, its seconds
    seconds: float = 0.0  # of all rounds
    # draft_passes, verifications: how many
    draft_passes: int = 0
    verifications: int = 0

    @property
    def tokens(self) -> int:
        return sum(replay.tokens for replay in self.replays)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


Played = tuple[Replay, float]  # A text's rounds, and the seconds of its shares of passes


class _Shares:
    """Waits for the passes of one text and adds up its shares of them."""

    def __init__(self, draft: Callable[[PassShare], float], verify: Callable[[PassShare], float]) -> None:
        self._draft, self._verify = draft, verify
        self._drafting = self.seconds = 0.0

    def wait(self, context: int, unread: int) -> None:
        """`Player.wait`."""
        self._drafting += self._draft(PassShare(context, unread=unread))

    def clock(self, context: int, drafted: int, unread: int, verified: int | None = None, /) -> tuple[float, float]:
        """`Player.clock`."""
        del unread
        drafting, self._drafting = self._drafting, 0.0
        verifying = self._verify(PassShare(context, drafted if verified is None else verified))
        self.seconds += drafting + verifying
        return drafting, verifying


def replay_together(
    setting: Setting, traces: Iterable[Trace], rows: int, costs: CostTable, eos: Set[int], *, jointly: bool = True
) -> BatchReplay:
    """Replay a setting on a batch of texts, with the rounds of `play` and the hub of a live run.

    Whenever a text ends, the next one begins. Prompts take no time, as in `CostTable.milliseconds`.

    Args:
        setting: of one draft, or of its chain with a lookup.
        traces: the texts, in the order in which they begin.
        rows: the batch size, at least 1.
        costs: with `CostTable.batches` for two texts and more.
        eos: ids that end a text.
        jointly: whether policies that support it decide for all texts together.
    """
    drafting, verifying = (PricedPasses(costs, setting.signals, verifies) for verifies in (False, True))
    decisions = Decisions()
    hub: Hub[Played] = Hub([drafting, decisions, verifying], decisions.begin)
    ask = hub.asker(decisions)
    jointly = jointly and rows > 1
    policies = [decisions.policy(setting, number, ask) if jointly else setting.build() for number in range(rows)]
    chains = [Chaining(setting.earlier) if setting.lookup else None for _ in range(rows)]
    waiting, batch = iter(traces), BatchReplay()

    def played(policy: StoppingPolicy, chaining: Chaining | None, trace: Trace) -> Played:
        text = _Shares(hub.asker(drafting), hub.asker(verifying))
        player = Player(policy, clock=text.clock, chaining=chaining, wait=text.wait)
        return replay_levels([player], [trace], eos)[0], text.seconds

    trace = next(waiting, None)
    while trace is not None or hub.busy:
        for free in range(rows) if trace is not None else ():
            if trace is not None and free not in hub.busy:
                hub.begin(free, partial(played, policies[free], chains[free], trace))
                trace = next(waiting, None)
        for _, (replay, seconds) in hub.advance():
            batch.replays.append(replay)
            batch.shares.append(seconds)
    batch.seconds = drafting.seconds + verifying.seconds
    whole = batch.seconds / (sum(batch.shares) or 1.0)  # time outside of passes is shared as they are
    batch.shares = [share * whole for share in batch.shares]
    batch.draft_passes, batch.verifications = drafting.count, verifying.count
    return batch
