"""Reads a finished text with a draft head: what it would draft in the round that begins at each position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from specctl.decoding.rows.device_laws import draw
from specctl.decoding.rows.draws import sibling
from specctl.decoding.rows.token_columns import token_columns
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor, state_predictors
from specctl.models.running.slot import Slot
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.replay.chances import BlockChances
from specctl.replay.recorded import Recorded, recorded_by_start
from specctl.replay.recording.block_coupling import draw_in_blocks
from specctl.replay.recording.coupling import draw_draft_tokens
from specctl.replay.recording.grid_rows import Row
from specctl.replay.recording.starts import ReadText, Starts, starts_of
from specctl.replay.recording.tails import HELD


def read_grid(
    target: Slot,
    draft: Slot,
    predictors: Mapping[str, TrainedPredictor],
    prompt: Sequence[int],
    text: Sequence[int],
    limit: int,
    depth: int,
    sampling: Sampling,
    generator: torch.Generator,
    eos: frozenset[int],
) -> Recorded:
    """The rounds along a text. At each start the draft has observed what it has in a live round: all but the newest.

    See `specctl.replay.play.play` for the joint distribution when sampling. One coin decides the verdict at a position
    for all starts, so that starts differ by what they draft and not by luck.

    Args:
        target: the verifier; its cache is read anew.
        draft: what drafts from its states.
        predictors: the draft's trained heads by name, the one that it usually uses first.
        prompt: at least one id.
        text: N ids, at least one.
        limit: the token limit under which the text was generated.
        depth: the longest draft that shall be replayed.
        sampling: as the text was generated.
        generator: on the target's device; draws draft tokens and verdicts when sampling.
        eos: ids that end a sequence.
    """
    verifier = ReadText(target, draft.layers, prompt, text, sampling)
    rounds = starts_of(draft, verifier, [*prompt, *text], len(prompt), hidden=bool(state_predictors(predictors)))
    depth = depth if draft.longest is None else min(depth, draft.longest)
    coins = None if sampling.greedy else torch.rand(len(text), generator=generator, device=target.device)
    # The last position under the limit is left to the verifier.
    reach = draft.room(len(prompt))
    rooms = [max(0, min(depth, limit - start - 1, reach - start)) for start in range(len(text))]
    reading = GridReading(verifier, text, sampling, generator, coins, predictors, eos)
    return replace(reading.grid(rounds, rooms, draft.longest), reach=reach if reach < limit else None)


@dataclass(frozen=True, slots=True)
class GridReading:
    """Draws tokens and verdicts from the draft's logits and notes them in rows.

    Attributes:
        verifier: reads the text.
        text: N ids that the verifier wrote.
        sampling: as in decoding.
        generator: draws draft tokens, and tosses coins.
        coins: ``(N,)`` uniform in [0, 1), which decide the verdict at each position; None when greedy.
        predictors: the draft's trained heads by name.
        eos: ids that end a sequence.
    """

    verifier: ReadText
    text: Sequence[int]
    sampling: Sampling
    generator: torch.Generator
    coins: torch.Tensor | None
    predictors: Mapping[str, TrainedPredictor]
    eos: frozenset[int]

    def grid(self, rounds: Starts, rooms: Sequence[int], longest: int | None) -> Recorded:
        """The rows of rounds that begin at each position.

        Args:
            rounds: run the draft.
            rooms: for the first positions, the most tokens of each row; those that are not 0 stand in a row.
            longest: of `Recorded`.
        """
        rows = [Row(start, room, self.eos) for start, room in enumerate(rooms)]
        starting = [row for row in rows if row.room]
        block = self.sampling.in_blocks
        at_once = min(rounds.at_once, max(1, HELD // max(rooms, default=1))) if block else rounds.at_once
        for begin in range(0, len(starting), at_once):
            group = starting[begin : begin + at_once]
            self.verifier.forget(group[0].start)
            unfinished = group
            while unfinished:
                self._run(rounds, group, unfinished)
                for row in unfinished:
                    self._settle(row)
                unfinished = [row for row in unfinished if not self._finished(row)]
            for row in group:
                row.finish()
        sampled = not self.sampling.greedy
        return recorded_by_start(
            [row.steps(state_predictors(self.predictors)) for row in rows],
            [row.accepted for row in rows],
            longest,
            [row.chances for row in rows] if sampled and not block else None,
            blocks=[BlockChances(row.chances, row.passing) for row in rows] if block else None,
        )

    def _run(self, rounds: Starts, group: Sequence[Row], unfinished: Sequence[Row]) -> None:
        """Run rounds of a group to their ends; tokens that they have are drafted once more, not drawn."""
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
        """Whether no token can follow, for now."""
        return row.full or (not row.rejected and row.position >= len(self.text))

    def _finished(self, row: Row) -> bool:
        return self._over(row) and (not row.foreseen or len(row.foreseen) == len(row))

    def _draw(self, rows: Sequence[Row], place: int, forward: Forward, rounds: Starts) -> None:
        """The token of each row at a place, drawn where the row has none yet.

        Args:
            rows: B rows.
            place: number of the token in its round, from 0.
            forward: logits ``(B, V)`` behind the token, and the hidden states of the token before it.
            rounds: gave the pass.
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
        """Draw the next token of B rows, which have equally many."""
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
        """Drawn tokens ``(B,)``, and the verdicts on those of the rows without a rejected token."""
        assert self.coins is not None
        probs = self.sampling.probs(logits)
        chosen = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        verdicts: list[bool] = []
        if judged:
            positions = [rows[number].position for number in judged]
            above = self.verifier.probs(positions)
            written = torch.tensor([self.text[position] for position in positions], device=above.device)
            generator, coins = sibling(self.generator, above.device), self.coins[positions].to(above.device)
            own = probs[judged].to(above.device)
            if self.sampling.in_blocks:
                weights = [rows[number].chances[-1] if rows[number].chances else 1.0 for number in judged]
                found = draw_in_blocks(written, own, above, weights, generator, coins)
                tokens, verdicts, chances = torch.tensor(found.tokens), found.kept, found.weights
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
        """Have the verifier read what the draft alone drafted behind a token that a block does not keep."""
        if row.tail is None or not row.tail.drafted:
            return
        above = self.verifier.probs_behind(row.tail.position, row.tail.to_read, len(row.tail.drafted))
        row.tail.settle(above, self.sampling, self.generator)
        del row.foreseen[len(row) - 1 :]  # the newest may be another token than the one drafted
