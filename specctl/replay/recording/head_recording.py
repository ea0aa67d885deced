"""Reads a finished text with a draft head, and records its drafts in the rounds that begin at each position."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from specctl.decoding.draft_tokens import CHUNK, token_columns
from specctl.decoding.draws import sibling
from specctl.decoding.logits.device import draw
from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlockRounds
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.chain_runner import ChainRounds
from specctl.models.draft_heads.head import DraftHeadPasses
from specctl.models.passes.forward import Forward
from specctl.models.passes.watching import States, kept_states
from specctl.models.predictors.predictor_checkpoint import state_predictors
from specctl.models.running.slot import Slot
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.replay.recording.coupling import HELD, Detours, Tail, TextReading, draw_draft_tokens, draw_in_blocks
from specctl.replay.traces import BlockChances, DraftSteps, Recorded, draft_steps, recorded_by_start

TOKENS = 128  # Tokens in one pass over blocks, which bounds the memory of their logits


class OneByOne:
    """Runs any draft from one start after another, with the calls of a live run.

    Attributes:
        at_once: the number of starts in a pass.
    """

    at_once = 1

    def __init__(
        self, draft: Slot, verifier: "ReadText", sequence: Sequence[int], before: int, *, hidden: bool
    ) -> None:
        self._draft, self._verifier, self._sequence = draft, verifier, sequence
        self._before, self._hidden = before, hidden
        self._foresee = draft.foresee
        draft.rollback(0)

    def first(self, starts: Sequence[int]) -> Forward:
        """The pass over the newest token of a round at each of B consecutive starts: logits ``(B, V)``.

        The starts continue those of the last call, or are the same again.
        """
        draft, length = self._draft, self._before + starts[0]
        read = length - 1  # the verifier has not read the newest token when a round begins
        draft.rollback(read)
        if draft.reads_states:
            for place, states in self._verifier.states(read):
                draft.observe_states(place, states)
        return draft.extend(self._sequence[draft.length : length], keep=1)

    def further(self, going: Sequence[int], tokens: Sequence[int]) -> Forward:  # noqa: ARG002 - there is only one
        """The pass over the next token of each round that continues.

        Args:
            going: the numbers of these rounds among those of the pass before.
            tokens: their newest tokens.
        """
        return self._draft.extend(tokens, keep=1, hidden=self._hidden)

    def foresee(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """The draft's predictions ``(B,)`` about the token after each token ``(B,)`` drawn from the pass before.

        See `specctl.models.passes.forward.Foresee`; None if the draft does not predict it.
        """
        return None if self._foresee is None else self._foresee(tokens[0])[None]


class ManyAtOnce:
    """`OneByOne` of many starts in one pass, for a draft head."""

    def __init__(
        self,
        draft: Slot,
        verifier: "ReadText",
        sequence: Sequence[int],
        before: int,
        *,
        hidden: bool,
    ) -> None:
        self._rounds: ChainRounds | BlockRounds
        passes = draft.passes
        assert isinstance(passes, DraftHeadPasses), "see `starts_of`"
        head, vocabulary = passes.head, passes.vocabulary
        if isinstance(head, BlockHead):
            self._rounds = BlockRounds(head, vocabulary, sequence)
            self.at_once = max(1, TOKENS // head.block_size)
        else:
            assert isinstance(head, ChainHead), "there are no others"
            self._rounds = ChainRounds(head, vocabulary, sequence)
            self.at_once = CHUNK
        self._verifier, self._before, self._hidden = verifier, before, hidden

    def first(self, starts: Sequence[int]) -> Forward:
        lengths = [self._before + start for start in starts]
        for _, states in self._verifier.states(lengths[-1] - 1):
            self._rounds.observe_states(states)
        return self._rounds.first(lengths)

    def further(self, going: Sequence[int], tokens: Sequence[int]) -> Forward:
        return self._rounds.further(going, tokens, hidden=self._hidden)

    def foresee(self, tokens: torch.Tensor) -> torch.Tensor | None:
        return self._rounds.foresee(tokens) if isinstance(self._rounds, BlockRounds) else None


class ReadText:
    """Reads a prompt and a text in few passes; holds states until they are observed, and distributions for a while.

    Args:
        runner: the verifier.
        layers: whose states are wanted.
        prompt: at least one id.
        text: ids that follow it.
        sampling: as in decoding.
    """

    def __init__(
        self, runner: Slot, layers: Sequence[int], prompt: Sequence[int], text: Sequence[int], sampling: Sampling
    ) -> None:
        runner.watch(layers)
        runner.rollback(0)
        self._runner, self._prompt, self._text, self._sampling = runner, prompt, text, sampling
        self._passes = self._read()
        self._known = 0  # number of positions whose states were read
        self._observed = 0
        self._pending: list[tuple[int, States]] = []
        self._first = 0  # position of the first distribution that is held
        self._probs: torch.Tensor | None = None  # (W, V)
        self._detours = Detours(runner, [*prompt, *text])

    def states(self, end: int) -> Iterator[tuple[int, States]]:
        """The states of all places before ``end`` that were not asked for yet, in parts, each with its first place."""
        while self._known < end:
            next(self._passes)
        for place, states in self._pending:
            count = len(next(iter(states.values())))
            begin, stop = max(0, self._observed - place), min(count, end - place)
            if begin < stop:
                yield place + begin, {layer: rows[begin:stop] for layer, rows in states.items()}
        self._observed = max(self._observed, end)
        self._pending = [
            (place, states)
            for place, states in self._pending
            if place + len(next(iter(states.values()))) > self._observed
        ]

    def probs(self, positions: Sequence[int]) -> torch.Tensor:
        """The distributions ``(B, V)`` at some positions of the text, none of them forgotten."""
        while self._probs is None or self._first + len(self._probs) <= max(positions):
            next(self._passes)
        return self._probs[[position - self._first for position in positions]]

    def probs_after(self, position: int, tokens: Sequence[int], count: int) -> torch.Tensor:
        """The distributions ``(count, V)`` after the last of some tokens that follow the text up to a position."""
        return self._sampling.probs(self._detours.after(len(self._prompt) + position, tokens, count))

    def forget(self, position: int) -> None:
        """Forget the distributions before a position."""
        if self._probs is not None:
            gone = min(position - self._first, len(self._probs))
            self._probs = self._probs[gone:]
            self._first += gone

    def _read(self) -> Iterator[None]:
        before = self._prompt[:-1]
        if before and not self._runner.whole_prompts:
            self._store_states(self._runner.extend(before, keep=0), len(before))
            yield
        read = [self._prompt[-1], *self._text[:-1]]
        for start in range(0, len(read), CHUNK):
            part = read[start : start + CHUNK]
            if start or not self._runner.whole_prompts:
                self._detours.come_back(len(self._prompt) - 1 + start)
                forward = self._runner.extend(part, keep=0 if self._sampling.greedy else len(part))
                self._store_states(forward, len(part))
            else:
                forward = self._runner.extend([*before, *part], keep=len(part))
                self._store_states(forward, len(before) + len(part))
            if not self._sampling.greedy:
                probs = self._sampling.probs(forward.logits)
                self._probs = probs if self._probs is None else torch.cat([self._probs, probs])
            yield

    def _store_states(self, forward: Forward, count: int) -> None:
        states = kept_states(forward.states)
        assert states is not None
        self._pending.append((self._known, states))
        self._known += count


Starts = OneByOne | ManyAtOnce


def starts_of(draft: Slot, verifier: ReadText, sequence: Sequence[int], before: int, *, hidden: bool) -> Starts:
    """The fastest runner of a draft head from the positions of a text.

    Args:
        draft: the head.
        verifier: gives the states of the text.
        sequence: prompt and text.
        before: length of the prompt.
        hidden: whether further passes give hidden states.
    """
    if isinstance(getattr(draft, "passes", None), DraftHeadPasses):  # a wrapped head must run one by one
        return ManyAtOnce(draft, verifier, sequence, before, hidden=hidden)
    return OneByOne(draft, verifier, sequence, before, hidden=hidden)


@dataclass(slots=True, eq=False)
class Row:
    """The tokens of the round that begins at one position, as they are drawn."""

    start: int  # position in the text
    room: int  # the most tokens that it may have
    eos: frozenset[int]  # ids that no token can follow
    tokens: list[int] = field(default_factory=list)  # the draft tokens so far
    # of each token `DISTRIBUTION_SIGNALS`, then each head's prediction, then what DISCO heads read
    values: list[list[float]] = field(default_factory=list)
    accepted: int = 0  # number of tokens accepted before the first rejected one
    # when sampling, the acceptance probability of each judged token; in block verification, w
    chances: list[float] = field(default_factory=list)
    passing: list[float] = field(default_factory=list)  # in block verification, h before each token
    rejected: bool = False  # whether a token is rejected
    tail: Tail | None = None  # in block verification, the rejected token and those after it
    # what the draft predicts, after each token, for the next; empty if it does not
    foreseen: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens) + (0 if self.tail is None else len(self.tail.tokens) + len(self.tail.drafted))

    def __getitem__(self, place: int) -> int:
        if place < len(self.tokens) or self.tail is None:
            return self.tokens[place]
        return [*self.tail.tokens, *self.tail.drafted][place - len(self.tokens)]

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.start + len(self)

    @property
    def full(self) -> bool:
        """Whether no further token may follow."""
        if self.tail is not None:
            return self.tail.full
        return len(self.tokens) == self.room or (bool(self.tokens) and self.tokens[-1] in self.eos)

    @property
    def newest(self) -> list[float]:
        """The values of the newest token."""
        if self.tail is None:
            return self.values[-1]
        return (self.tail.drafted_values or self.tail.values)[-1]

    def draft(self, token: int, values: list[float], logits: torch.Tensor) -> None:
        """Add the next token, which the draft drew from these logits ``(V,)``."""
        if self.tail is not None:
            self.tail.draft(token, values, logits)
        else:
            self.tokens.append(token)
            self.values.append(values)

    def end_block(self) -> None:
        """Begin the tail with the newest token, which block verification rejects."""
        token, values, weight, passing = self.tokens.pop(), self.values.pop(), self.chances.pop(), self.passing.pop()
        room = self.room - len(self.tokens)
        self.tail = Tail(self.position, room, self.eos, [token], [values], [weight], [passing])

    def finish(self) -> None:
        """Append the tail."""
        if self.tail is not None:
            self.tokens += self.tail.tokens
            self.values += self.tail.values
            self.chances += self.tail.weights
            self.passing += self.tail.passing
            self.tail = None

    def steps(self, predictors: Iterable[str]) -> DraftSteps:
        """The tokens with their signals and the predictions of heads of these names."""
        names = list(predictors)
        columns = list(map(list, zip(*self.values, strict=True))) or [[] for _ in (*DISTRIBUTION_SIGNALS, *names)]
        return replace(draft_steps(self.tokens, columns, names), next_accept_prob=self.foreseen or None)


@dataclass(slots=True)
class GridReading(TextReading):
    """Reads a text with a draft head, and records its drafts in the round that begins at each position.

    At each start the draft has observed the same states as in a live round: those of all but the newest token. See
    `specctl.replay.play.play` for the joint distribution when sampling. One coin decides the verdict at a position for
    all starts, so that starts differ only in their drafts.
    """

    _verifier: ReadText = field(init=False)
    _coins: torch.Tensor | None = field(init=False)

    def read(self) -> Recorded:
        """The rows of the rounds that begin at each position."""
        draft, block, sampled = self.draft, self.sampling.in_blocks, not self.sampling.greedy
        names = state_predictors(self.predictors)
        self._verifier = ReadText(self.target, draft.layers, self.prompt, self.text, self.sampling)
        rounds = starts_of(draft, self._verifier, [*self.prompt, *self.text], len(self.prompt), hidden=bool(names))
        coins = torch.rand(len(self.text), generator=self.generator, device=self.target.device) if sampled else None
        self._coins = coins
        depth = self.depth if draft.longest is None else min(self.depth, draft.longest)
        # The last position under the limit is left to the verifier.
        reach = draft.room(len(self.prompt))
        rooms = [max(0, min(depth, self.limit - start - 1, reach - start)) for start in range(len(self.text))]
        rows = [Row(start, room, self.eos) for start, room in enumerate(rooms)]
        starting = [row for row in rows if row.room]
        at_once = min(rounds.at_once, max(1, HELD // max(rooms, default=1))) if block else rounds.at_once
        for begin in range(0, len(starting), at_once):
            group = starting[begin : begin + at_once]
            self._verifier.forget(group[0].start)
            unfinished = group
            while unfinished:
                self._run(rounds, group, unfinished)
                for row in unfinished:
                    self._settle(row)
                unfinished = [row for row in unfinished if not self._finished(row)]
            for row in group:
                row.finish()
        found = recorded_by_start(
            [row.steps(names) for row in rows],
            [row.accepted for row in rows],
            draft.longest,
            [row.chances for row in rows] if sampled and not block else None,
            blocks=[BlockChances(row.chances, row.passing) for row in rows] if block else None,
        )
        return replace(found, reach=reach if reach < self.limit else None)

    def _run(self, rounds: Starts, group: Sequence[Row], unfinished: Sequence[Row]) -> None:
        """Run rounds of a group to their ends; tokens that they already have are fed again, not drawn again."""
        alive, place = list(group), 0
        forward = rounds.first([row.start for row in group])
        while True:
            self._draw(alive, place, forward, rounds)
            place += 1
            going = [
                number
                for number, row in enumerate(alive)
                if row in unfinished and (place < len(row) or not self._over(row))
            ]
            if not going:
                return
            alive = [alive[number] for number in going]
            forward = rounds.further(going, [row[place - 1] for row in alive])

    def _over(self, row: Row) -> bool:
        """Whether no token can follow yet."""
        return row.full or (not row.rejected and row.position >= len(self.text))

    def _finished(self, row: Row) -> bool:
        return self._over(row) and (not row.foreseen or len(row.foreseen) == len(row))

    def _draw(self, rows: Sequence[Row], place: int, forward: Forward, rounds: Starts) -> None:
        """The token of each row at a place, drawn where the row has none yet.

        Args:
            rows: B rows.
            place: number of the token in its round, from 0.
            forward: logits ``(B, V)`` after the token, and the hidden states of the token before it.
            rounds: which ran the pass.
        """
        numbers = [number for number, row in enumerate(rows) if len(row) == place]
        if numbers:
            hidden = None if forward.hidden is None else forward.hidden[numbers]
            self._extend([rows[number] for number in numbers], Forward(forward.logits[numbers], hidden))
        tokens = torch.tensor([row[place] for row in rows], device=forward.logits.device)
        if (foreseen := rounds.foresee(tokens)) is not None:
            for row, value in zip(rows, foreseen.tolist(), strict=True):
                if len(row.foreseen) == place:
                    row.foreseen.append(value)

    def _extend(self, rows: Sequence[Row], forward: Forward) -> None:
        """Draw the next token of B rows of equal length."""
        judged = [number for number, row in enumerate(rows) if not row.rejected]
        logits = forward.logits
        if self.sampling.greedy:
            chosen = logits.argmax(-1)  # (B,)
            drawn = chosen.tolist()
            verdicts = [drawn[number] == self.text[rows[number].position] for number in judged]
        else:
            chosen, verdicts = self._sampled(rows, logits, judged)
        previous = [row.newest[: len(DISTRIBUTION_SIGNALS)] for row in rows] if len(rows[0]) else None
        columns = token_columns(forward, chosen, previous, self.predictors).tolist()
        for row, token, values, own in zip(rows, chosen.tolist(), columns, logits, strict=True):
            row.draft(token, values, own)
        for row, fine in zip((rows[number] for number in judged), verdicts, strict=True):
            row.accepted += fine
            row.rejected = not fine
            if row.rejected and self.sampling.in_blocks:
                row.end_block()

    def _sampled(
        self, rows: Sequence[Row], logits: torch.Tensor, judged: Sequence[int]
    ) -> tuple[torch.Tensor, list[bool]]:
        """Drawn tokens ``(B,)``, and the verdicts in the rows that have no rejected token."""
        assert self._coins is not None
        probs = self.sampling.probs(logits)
        chosen = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        verdicts: list[bool] = []
        if judged:
            positions = [rows[number].position for number in judged]
            above = self._verifier.probs(positions)
            written = torch.tensor([self.text[position] for position in positions], device=above.device)
            generator, coins = sibling(self.generator, above.device), self._coins[positions].to(above.device)
            own = probs[judged].to(above.device)
            if self.sampling.in_blocks:
                weights = [rows[number].chances[-1] if rows[number].chances else 1.0 for number in judged]
                found = draw_in_blocks(written, own, above, weights, generator, coins)
                tokens, verdicts, chances = torch.tensor(found.tokens), found.accepted, found.weights
                for number, passing in zip(judged, found.passing, strict=True):
                    rows[number].passing.append(passing)
            else:
                tokens, fine, chances_ = draw_draft_tokens(written, own, above, generator, coins)
                verdicts, chances = fine.tolist(), chances_.tolist()
            chosen[judged] = tokens.to(chosen.device)
            for number, chance in zip(judged, chances, strict=True):
                rows[number].chances.append(chance)
        if others := [number for number, row in enumerate(rows) if row.rejected]:
            chosen[others] = draw(probs[others], sibling(self.generator, logits.device))
        return chosen, verdicts

    def _settle(self, row: Row) -> None:
        """Let the verifier read the draft's own continuation after a rejected token of a block."""
        if row.tail is None or not row.tail.drafted:
            return
        above = self._verifier.probs_after(row.tail.position, row.tail.to_read, len(row.tail.drafted))
        row.tail.settle(above, self.sampling, self.generator)
        del row.foreseen[len(row) - 1 :]  # the newest token may differ from the drafted one
