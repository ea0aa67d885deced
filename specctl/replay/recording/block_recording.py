"""Reads a finished text with a draft model whose rounds are verified as blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specctl.decoding.along import read_along
from specctl.decoding.rows.device_laws import draw
from specctl.decoding.rows.draws import sibling
from specctl.decoding.rows.token_columns import NOTHING, token_columns, token_row
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor, state_predictors
from specctl.models.running.branches import continue_branches
from specctl.models.running.slot import Slot
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.replay.chances import BlockChances, RoundChances
from specctl.replay.recorded import Recorded
from specctl.replay.recording.block_coupling import draw_in_blocks
from specctl.replay.recording.detours import Detours
from specctl.replay.recording.tails import HELD, Tail
from specctl.replay.steps import DraftSteps, draft_steps


@dataclass(slots=True)
class _Rounds:
    """The rounds that keep all their tokens so far with the same w.

    Attributes:
        weight: w.
        starts: where they began.
    """

    weight: float
    starts: list[int]


@dataclass(slots=True)
class BlockReading:
    """Reads one text.

    Attributes:
        target, draft: the models.
        predictors: the draft's heads by name, the one that it usually uses first.
        prompt: at least one id.
        text: N ids that the target wrote.
        limit: the token limit under which they were written.
        depth: the longest draft that shall be replayed.
        sampling: as the text was generated.
        generator: on the target's device; draws draft tokens and verdicts.
        eos: ids that end a sequence.
    """

    target: Slot
    draft: Slot
    predictors: Mapping[str, TrainedPredictor]
    prompt: Sequence[int]
    text: Sequence[int]
    limit: int
    depth: int
    sampling: Sampling
    generator: torch.Generator
    eos: frozenset[int]
    _going: list[_Rounds] = field(default_factory=list)
    _runs: list[int] = field(default_factory=list)
    _chances: list[BlockChances] = field(default_factory=list)
    _tails: list[int | None] = field(default_factory=list)
    _branches: list[Tail] = field(default_factory=list)

    def read(self) -> Recorded:
        """What the draft drafts in the rounds that may begin at each position."""
        along = self._read_text()
        target = Detours(self.target, [*self.prompt, *self.text])
        while growing := [branch for branch in self._branches if not branch.full]:
            at_once = max(1, HELD // max(branch.room for branch in growing))
            for begin in range(0, len(growing), at_once):
                group = growing[begin : begin + at_once]
                self._go_on(group)
                for branch in group:
                    length = len(self.prompt) + branch.position
                    found = target.behind(length, branch.to_read, len(branch.drafted))
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
        """The text's tokens as draft tokens; on the way, where each round leaves the text."""
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
        """Draw the next token of all rounds that have come to a position.

        Args:
            position: in the text.
            draft_probs, target_probs: q and p, ``(1, V)``.
            coin: ``(1,)``, which all the rounds share.
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

    def _go_on(self, branches: Sequence[Tail]) -> None:
        """Have the draft alone go on with some branches to their ends; the tokens that stand are fed again."""
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
        """The next token of some branches, at their rows of a pass; noted in ``chosen`` ``(B,)`` too."""
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
