"""Reads a finished text with every model once, and records every signal that a policy could have seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from specctl.decoding.draft_tokens import NOTHING, read_along, token_columns, token_row
from specctl.decoding.draws import sibling
from specctl.decoding.logits.device import draw
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor, state_predictors
from specctl.models.running.branches import continue_branches
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.profile.schema import Verification
from specctl.replay.play import require_recordable
from specctl.replay.recording.copy_recording import read_copies
from specctl.replay.recording.coupling import HELD, Detours, Tail, TextReading, draw_draft_tokens, draw_in_blocks
from specctl.replay.recording.head_recording import GridReading
from specctl.replay.traces import (
    COPIES,
    BlockChances,
    DraftSteps,
    Recorded,
    RoundChances,
    TokenChances,
    draft_steps,
    nothing_recorded,
    recorded_by_place,
)


@dataclass(slots=True)
class _Rounds:
    """The rounds whose tokens are all accepted so far, with the same w."""

    weight: float  # w
    starts: list[int]  # their start positions


@dataclass(slots=True)
class BlockReading(TextReading):
    """Reads a text with a draft model whose rounds are verified as blocks."""

    _going: list[_Rounds] = field(default_factory=list)
    _runs: list[int] = field(default_factory=list)
    _chances: list[BlockChances] = field(default_factory=list)
    _tails: list[int | None] = field(default_factory=list)
    _branches: list[Tail] = field(default_factory=list)

    def read(self) -> Recorded:
        """Record the drafts of the rounds that may begin at each position."""
        along = self._read_text()
        target = Detours(self.target, [*self.prompt, *self.text])
        while growing := [branch for branch in self._branches if not branch.full]:
            at_once = max(1, HELD // max(branch.room for branch in growing))
            for begin in range(0, len(growing), at_once):
                group = growing[begin : begin + at_once]
                self._continue(group)
                for branch in group:
                    length = len(self.prompt) + branch.position
                    found = target.after(length, branch.to_read, len(branch.drafted))
                    branch.settle(self.sampling.probs(found), self.sampling, self.generator)
        runs, branches = [*self._runs, 0], self._branches
        return Recorded(
            runs,
            runs,
            [*self._tails, None],
            [self._steps(branch.tokens, branch.values) for branch in branches],
            along,
            RoundChances(self._chances, [BlockChances(branch.weights, branch.passing) for branch in branches]),
        )

    def _read_text(self) -> DraftSteps:
        """Record the text's tokens as draft tokens, and find where each round leaves the text."""
        values: list[list[float]] = []
        readers = [self.draft, self.target]
        for part, (drafting, verifying) in read_along(
            readers, self.prompt, self.text, hidden=bool(state_predictors(self.predictors)), cached=True
        ):
            logits = drafting.logits  # (C, V)
            written = torch.tensor(self.text[part], device=logits.device)
            last = values[-1][: len(DISTRIBUTION_SIGNALS)] if values else NOTHING
            values += token_columns(drafting, written, last, self.predictors).tolist()
            above = self.sampling.probs(verifying.logits)  # (C, V)
            own_probs = self.sampling.probs(logits).to(above.device)
            coins = torch.rand(len(above), generator=self.generator, device=self.generator.device).to(above.device)
            for row, position in enumerate(range(part.start, part.stop)):
                one = slice(row, row + 1)
                laws = own_probs[one], above[one]
                self._pass_position(position, *laws, coins[one], drafting.part([row]), values[position])
        return self._steps(list(self.text), values)

    def _pass_position(
        self,
        position: int,
        draft_probs: torch.Tensor,
        target_probs: torch.Tensor,
        coin: torch.Tensor,
        drafting: Forward,
        values: Sequence[float],
    ) -> None:
        """Draw the next token of all rounds that have reached a position.

        Args:
            position: in the text.
            draft_probs, target_probs: q and p, ``(1, V)``.
            coin: ``(1,)``, shared by all the rounds.
            drafting: the draft's pass, one row.
            values: the signals and predictions of the text's own token.
        """
        self._begin(position)
        if not self._going:
            return
        count, vocabulary = len(self._going), target_probs.shape[-1]
        found = draw_in_blocks(
            torch.full((count,), self.text[position], device=target_probs.device),
            draft_probs.expand(count, vocabulary),
            target_probs.expand(count, vocabulary),
            [rounds.weight for rounds in self._going],
            sibling(self.generator, target_probs.device),
            coin.expand(count),
        )
        going: dict[float, _Rounds] = {}
        for rounds, token, kept, weight, passing in zip(self._going, *found, strict=True):
            if kept:
                for start in rounds.starts:
                    self._runs[start] += 1
                    self._chances[start].weights.append(weight)
                    self._chances[start].passing.append(passing)
                going.setdefault(weight, _Rounds(weight, [])).starts.extend(rounds.starts)
            else:
                for start in rounds.starts:
                    self._tails[start] = len(self._branches)
                room = max(self._room(start) - (position - start) for start in rounds.starts)
                own = [*token_row(drafting, token), *values[len(DISTRIBUTION_SIGNALS) :]]
                self._branches.append(Tail(position, room, self.eos, [token], [own], [weight], [passing]))
        self._going = list(going.values())

    def _begin(self, position: int) -> None:
        """Let a round begin at a position, and end those that have no room there."""
        self._runs.append(0)
        self._chances.append(BlockChances([], []))
        self._tails.append(None)
        if self._room(position):
            fresh = next((rounds for rounds in self._going if rounds.weight == 1), None)
            if fresh is None:
                self._going.append(fresh := _Rounds(1.0, []))
            fresh.starts.append(position)
        for rounds in self._going:
            rounds.starts = [start for start in rounds.starts if position - start < self._room(start)]
        self._going = [rounds for rounds in self._going if rounds.starts]

    def _room(self, start: int) -> int:
        """The most tokens of a round; the last position under the limit is left to the target."""
        return max(0, min(self.depth, self.limit - start - 1))

    def _continue(self, branches: Sequence[Tail]) -> None:
        """Let the draft alone continue some branches to their ends; their final tokens are fed again."""
        places = [0] * len(branches)  # of each branch's newest token

        def choose(which: Sequence[int], forward: Forward) -> list[int]:
            logits = forward.logits  # (B, V)
            chosen = torch.zeros(len(which), dtype=torch.int64, device=logits.device)
            fresh: list[int] = []
            for row, number in enumerate(which):
                places[number] += 1
                if places[number] < len(branches[number].tokens):
                    chosen[row] = branches[number].tokens[places[number]]
                elif not branches[number].full:
                    fresh.append(row)
            if fresh:
                self._draw([branches[which[row]] for row in fresh], forward, fresh, chosen)
            return chosen.tolist()

        starts = [len(self.prompt) + branch.position for branch in branches]
        first = [branch.tokens[0] for branch in branches]
        length = max(branch.room for branch in branches) - 1
        sequence = [*self.prompt, *self.text]
        continue_branches(
            self.draft, sequence, starts, first, length, choose, hidden=bool(state_predictors(self.predictors))
        )

    def _draw(self, branches: Sequence[Tail], forward: Forward, rows: Sequence[int], chosen: torch.Tensor) -> None:
        """Draw the next token of some branches, at their rows of a pass, and write it to ``chosen`` ``(B,)`` too."""
        logits = forward.logits[rows]  # (R, V)
        drawn = draw(self.sampling.probs(logits), sibling(self.generator, logits.device))  # (R,)
        chosen[rows] = drawn
        previous = [(branch.drafted_values or branch.values)[-1][: len(DISTRIBUTION_SIGNALS)] for branch in branches]
        values = token_columns(forward.part(rows), drawn, previous, self.predictors).tolist()
        for branch, token, own, row in zip(branches, drawn.tolist(), values, logits, strict=True):
            branch.draft(token, own, row)

    def _steps(self, tokens: list[int], values: Sequence[Sequence[float]]) -> DraftSteps:
        return draft_steps(
            tokens, [list(column) for column in zip(*values, strict=True)], state_predictors(self.predictors)
        )


def read_sequence(
    pair: Pair,
    prompt: Sequence[int],
    output: Sequence[int],
    limit: int,
    depth: int,
    sampling: Sampling,
    generator: torch.Generator,
    *,
    matched: bool = False,
    tops: bool = False,
    logits: bool = False,
) -> Recorded:
    """Read a finished text with every model once; records the drafts along it and the accepted tokens.

    In a hierarchy, each further draft reads everything that the draft above it would write. See
    `specctl.replay.play.play` for the joint distribution when sampling.

    Args:
        pair: with a draft.
        prompt, output: ids, at least one each.
        limit: the token limit under which the output was generated.
        depth: the longest draft that shall be replayed.
        sampling: as the output was generated.
        generator: on the target's device; draws draft tokens and verdicts when sampling.
        matched: whether a draft model's tokens are drawn independently of the text's and accepted where they are the
            same, as some engines do; ``sampling`` then says how the draft chooses them.
        tops: whether steps of a draft model get ``top_probs`` although no DISCO head reads them.
        logits: whether ``top_prob`` of a draft model is the largest logit, which some engines read.

    Raises:
        UsageError: the pair cannot be recorded, see `specctl.replay.play.require_recordable`.
    """
    require_recordable(len(pair.drafts), any(draft.drafts_by_round for draft in pair.drafts))
    sampling = replace(sampling, verification=verification_replayed(sampling, len(pair.drafts)))
    for runner in (pair.target, *pair.drafts):
        runner.begin(len(prompt))
    draft, predictors = pair.drafts[0], pair.named_predictors[0]
    models = pair.target, draft, predictors, prompt
    settings = depth, sampling, generator, pair.eos
    if draft.index is not None:
        return read_copies(pair.target, prompt, output, limit, depth, sampling, pair.eos)
    if draft.drafts_by_round:
        return GridReading(*models, output, limit, *settings).read()
    for runner in pair.drafts:
        runner.rollback(0)  # a draft that was not used in the run still caches an earlier text
    if sampling.in_blocks:
        reach = reach_of(draft, prompt, limit)
        if reach is not None:
            output, limit = output[:reach], reach + 1
        nothing = nothing_recorded(RoundChances([], []))
        found = BlockReading(*models, output, limit, *settings).read() if output else nothing
        return replace(found, reach=reach)
    reading = _Reading(pair, depth, sampling, generator, matched, tops, logits)
    return reading.read(0, prompt, output, output, limit - 2)


def reach_of(draft: Slot, prefix: Sequence[int], limit: int) -> int | None:
    """`Recorded.reach` of a draft along the tokens after a prefix, under a token limit."""
    room = draft.room(len(prefix))
    return room if room < limit else None


def verification_replayed(sampling: Sampling, drafts: int) -> Verification:
    """The verification of replayed draft tokens: as in live runs, but one by one in a hierarchy."""
    return "block" if sampling.in_blocks and drafts == 1 else "token"


@dataclass(frozen=True, slots=True)
class _Reading:
    """Reads texts with a pair's draft models; each draft's verifier is the model above it."""

    pair: Pair
    depth: int
    sampling: Sampling
    generator: torch.Generator
    matched: bool = False
    tops: bool = False
    top_logits: bool = False

    def read(
        self,
        level: int,
        prefix: Sequence[int],
        text: Sequence[int],
        verifier_tokens: Sequence[int],
        last: int,
        previous: Sequence[float] | None = None,
    ) -> Recorded:
        """Read a text with one draft, and everything that this draft would write with the drafts below it.

        On entry, the caches of this draft, of the drafts below and of its verifier hold a prefix of ``prefix[:-1]``,
        perhaps with other text after it. On return, they hold only tokens of ``prefix`` and ``text``.

        Args:
            level: which draft.
            prefix: at least one id.
            text: N ids that follow the prefix.
            verifier_tokens: N ids; ``verifier_tokens[i]`` is the verifier's token after ``text[:i]``. This is the text
                itself, unless the verifier is a draft whose rejected draft tokens are not in the text.
            last: the last position whose rejected draft token another draft token can follow, because every round
                leaves one position to the verifier.
            previous: `DISTRIBUTION_SIGNALS` of the step that drew the prefix's last token, for heads that read them.
        """
        draft, predictors, sampling = self.pair.drafts[level], self._predictors(level), self.sampling
        names = state_predictors(predictors)
        if (reach := reach_of(draft, prefix, last + 2)) is not None:
            text, verifier_tokens, last = text[:reach], verifier_tokens[:reach], reach - 1
        if not text:
            known = None if level or sampling.greedy or self.matched else TokenChances([], [])
            return replace(nothing_recorded(known), reach=reach)
        along, accepted, chances = self._along(level, prefix, text, verifier_tokens, previous)
        eos = self.pair.eos
        rejected = [
            position
            for position, fine in enumerate(accepted)
            if not fine and self.depth > 1 and position < last and along.tokens[position] not in eos
        ]
        length = min(self.depth - 1, max((last - position for position in rejected), default=0))
        tokens: list[list[int]] = [[] for _ in rejected]
        signals: list[list[list[float]]] = [[] for _ in rejected]

        def choose(which: Sequence[int], forward: Forward) -> list[int]:
            logits = forward.logits  # (B, V)
            if sampling.greedy:
                chosen = logits.argmax(-1)  # (B,)
            else:
                chosen = draw(sampling.probs(logits), sibling(self.generator, logits.device))
            rows = [signals[branch][-1] if signals[branch] else along.signals(rejected[branch]) for branch in which]
            previous = [row[: len(DISTRIBUTION_SIGNALS)] for row in rows]
            new_rows = self._columns(forward, chosen, previous, predictors).tolist()
            for branch, token, row in zip(which, chosen.tolist(), new_rows, strict=True):
                tokens[branch].append(token)
                signals[branch].append(row)
            return chosen.tolist()

        if rejected:
            first = [along.tokens[position] for position in rejected]
            starts = [len(prefix) + position for position in rejected]
            continue_branches(draft, [*prefix, *text], starts, first, length, choose, hidden=bool(names))
        branches = {}
        for position, ids, rows in zip(rejected, tokens, signals, strict=True):
            ids = ids[: last - position]  # other rows continued further
            end = next((n for n, token in enumerate(ids, start=1) if token in eos), len(ids))
            branches[position] = draft_steps(ids[:end], list(map(list, zip(*rows[:end], strict=True))), names)
        # Inner rounds have no chances in a live run either.
        chances = None if level else chances
        if level + 1 == len(self.pair.drafts):
            return replace(recorded_by_place(accepted, along, branches, chances), reach=reach)
        if self.pair.drafts[level + 1].index is not None:
            return replace(recorded_by_place(accepted, along, branches, chances, COPIES), reach=reach)
        # One position more is left to this draft, as the verifier of the next.
        below = self.read(level + 1, prefix, text, along.tokens, last - 1)
        assert below.along is not None
        read = len(below.along)  # how far the context of the next reaches
        branches_below = {}
        for position, branch in branches.items():
            shared = [*prefix, *text[:position]]
            start = [*shared, along.tokens[position]]
            room = min(last - position, self.depth) - 2
            previous = below.along.signals(position) if position < read else None
            branches_below[position] = self.read(level + 1, start, branch.tokens, branch.tokens, room, previous)
            for runner in self.pair.drafts[level:]:
                runner.rollback(min(runner.length, len(shared)))
        found = recorded_by_place(accepted, along, branches, chances, below, branches_below)
        return replace(found, reach=reach)

    def _along(
        self,
        level: int,
        prefix: Sequence[int],
        text: Sequence[int],
        verifier_tokens: Sequence[int],
        previous: Sequence[float] | None,
    ) -> tuple[DraftSteps, list[bool], list[float] | None]:
        """Draft tokens at every position of the text, whether each is accepted, and the acceptance probabilities.

        The models read the whole text in few passes.
        """
        draft, predictors, sampling = self.pair.drafts[level], self._predictors(level), self.sampling
        verifier = self.pair.drafts[level - 1] if level else self.pair.target
        apart = sampling.greedy or self.matched
        readers: list[Slot] = [draft] if apart else [draft, verifier]
        tokens: list[int] = []
        accepted: list[bool] = []
        chances: list[float] = []
        columns: list[torch.Tensor] = []
        hidden = bool(state_predictors(predictors))
        for part, (forward, *verifying) in read_along(readers, prefix, text, hidden=hidden, cached=True):
            logits = forward.logits  # (C, V)
            written = torch.tensor(verifier_tokens[part], device=logits.device)
            if apart:
                if sampling.greedy:
                    drafted = logits.argmax(-1)
                else:
                    drafted = draw(sampling.probs(logits), sibling(self.generator, logits.device))
                verdicts = drafted == written
            else:
                above = sampling.probs(verifying[0].logits)
                generator = sibling(self.generator, above.device)
                drafted, verdicts, part_chances = draw_draft_tokens(
                    written.to(above.device), sampling.probs(logits).to(above.device), above, generator
                )
                drafted, verdicts = drafted.to(logits.device), verdicts.to(logits.device)
                chances += part_chances.tolist()
            tokens += drafted.tolist()
            accepted += verdicts.tolist()
            last = columns[-1][-1, : len(DISTRIBUTION_SIGNALS)].tolist() if columns else previous or NOTHING
            columns.append(self._columns(forward, drafted, last, predictors))
        along = draft_steps(tokens, torch.cat(columns).T.tolist(), state_predictors(predictors))
        return along, accepted, None if apart else chances

    def _columns(
        self,
        forward: Forward,
        chosen: torch.Tensor,
        previous: Sequence[float] | Sequence[Sequence[float]],
        predictors: Mapping[str, TrainedPredictor],
    ) -> torch.Tensor:
        found = token_columns(forward, chosen, previous, predictors, tops=self.tops)
        if self.top_logits:
            found[:, DISTRIBUTION_SIGNALS.index("top_prob")] = forward.logits.amax(-1).float()
        return found

    def _predictors(self, level: int) -> Mapping[str, TrainedPredictor]:
        """A draft's heads by name, its default head first."""
        return self.pair.named_predictors[level]
