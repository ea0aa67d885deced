"""Reads a finished text with a draft head: what it would draft in the round that begins at each position."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from specctl.decoding.sampling import Sampling, draw, read_signals, read_top_probs, sibling
from specctl.models.running.runner import Forward, Runner, StateReader
from specctl.models.running.trained_heads import TrainedHead, disco_heads, state_heads
from specctl.policies import DISTRIBUTION_SIGNALS
from specctl.replay.coupling import draw_draft_tokens
from specctl.replay.grid import DraftGrid
from specctl.replay.starts import ReadText, Starts, starts_of
from specctl.replay.steps import DraftSteps, draft_steps


def read_grid(
    target: Runner,
    draft: StateReader,
    heads: Mapping[str, TrainedHead],
    prompt: Sequence[int],
    text: Sequence[int],
    limit: int,
    depth: int,
    sampling: Sampling,
    generator: torch.Generator,
    eos: frozenset[int],
) -> DraftGrid:
    """The grid of a text. At each start the draft has witnessed what it has in a live round: all but the newest token.

    See `specctl.replay.play.play` for the joint distribution when sampling. One coin decides the verdict at a position
    for all starts, so that starts differ by what they draft and not by luck.

    Args:
        target: the verifier; its cache is read anew.
        draft: what drafts from its states.
        heads: the draft's trained heads by name, the one that it usually uses first.
        prompt: at least one id.
        text: N ids, at least one.
        limit: the token limit under which the text was generated.
        depth: the longest draft that shall be replayed.
        sampling: as the text was generated.
        generator: on the target's device; draws draft tokens and verdicts when sampling.
        eos: ids that end a sequence.
    """
    verifier = ReadText(target, draft.layers, prompt, text, sampling)
    rounds = starts_of(draft, verifier, [*prompt, *text], len(prompt), hidden=bool(state_heads(heads)))
    depth = depth if draft.longest is None else min(depth, draft.longest)
    coins = None if sampling.greedy else torch.rand(len(text), generator=generator, device=target.device)
    # The last position under the limit is left to the verifier.
    rooms = [max(0, min(depth, limit - start - 1)) for start in range(len(text))]
    reading = GridReading(verifier, text, sampling, generator, coins, heads, eos)
    return reading.grid(rounds, rooms, draft.longest)


@dataclass(slots=True)
class _Row:
    """The row of one start, as it grows.

    Attributes:
        start: position in the text.
        room: the most tokens that it may have.
        tokens: the draft tokens so far.
        values: of each token `DISTRIBUTION_SIGNALS`, then each head's prediction, then what DISCO heads read.
        accepted: how many tokens are accepted before the first that is rejected.
        chances: when sampling, the probability of accepting each judged token.
        rejected: whether a token is rejected.
        ended: whether no further token can follow.
        foreseen: what the draft predicts, after each token, for the next; empty if it does not.
    """

    start: int
    room: int
    tokens: list[int] = field(default_factory=list)
    values: list[list[float]] = field(default_factory=list)
    accepted: int = 0
    chances: list[float] = field(default_factory=list)
    rejected: bool = False
    ended: bool = False
    foreseen: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the next token."""
        return self.start + len(self.tokens)

    def steps(self, heads: Iterable[str]) -> DraftSteps:
        """The tokens with their signals and the predictions of heads of these names."""
        names = list(heads)
        columns = list(map(list, zip(*self.values, strict=True))) or [[] for _ in (*DISTRIBUTION_SIGNALS, *names)]
        return replace(draft_steps(self.tokens, columns, names), next_accept_prob=self.foreseen or None)


@dataclass(frozen=True, slots=True)
class GridReading:
    """Draws tokens and verdicts from the draft's logits and notes them in rows.

    Attributes:
        verifier: reads the text.
        text: N ids that the verifier wrote.
        sampling: as in decoding.
        generator: draws draft tokens, and tosses coins.
        coins: ``(N,)`` uniform in [0, 1), which decide the verdict at each position; None when greedy.
        heads: the draft's trained heads by name.
        eos: ids that end a sequence.
    """

    verifier: ReadText
    text: Sequence[int]
    sampling: Sampling
    generator: torch.Generator
    coins: torch.Tensor | None
    heads: Mapping[str, TrainedHead]
    eos: frozenset[int]

    def grid(self, rounds: Starts, rooms: Sequence[int], longest: int | None) -> DraftGrid:
        """The rows of rounds that begin at each position.

        Args:
            rounds: run the draft.
            rooms: for the first positions, the most tokens of each row; those that are not 0 stand in a row.
            longest: of `DraftGrid`.
        """
        rows = [_Row(start, room) for start, room in enumerate(rooms)]
        starting = [row for row in rows if row.room]
        for begin in range(0, len(starting), rounds.at_once):
            alive = starting[begin : begin + rounds.at_once]
            self.verifier.forget(alive[0].start)
            forward = rounds.first([row.start for row in alive])
            while True:
                self._draw(alive, forward, rounds)
                going = [number for number, row in enumerate(alive) if not row.ended]
                if not going:
                    break
                alive = [alive[number] for number in going]
                forward = rounds.further(going, [row.tokens[-1] for row in alive])
        return DraftGrid(
            [row.steps(state_heads(self.heads)) for row in rows],
            [row.accepted for row in rows],
            longest,
            None if self.sampling.greedy else [row.chances for row in rows],
        )

    def _draw(self, rows: Sequence[_Row], forward: Forward, rounds: Starts) -> None:
        """The next token of each row.

        Args:
            rows: B rows.
            forward: logits ``(B, V)`` behind the token, and the hidden states of the token before it.
            rounds: gave the pass.
        """
        judged = [number for number, row in enumerate(rows) if not row.rejected]
        logits = forward.logits
        if self.sampling.greedy:
            chosen = logits.argmax(-1)  # (B,)
            drawn = chosen.tolist()
            verdicts = [drawn[number] == self.text[rows[number].position] for number in judged]
            chances: list[float] = []
        else:
            chosen, verdicts, chances = self._sampled(rows, logits, judged)
        columns = torch.stack(self._columns(rows, forward, chosen), dim=1).tolist()  # B rows
        for row, token, values in zip(rows, chosen.tolist(), columns, strict=True):
            row.tokens.append(token)
            row.values.append(values)
        if (foreseen := rounds.foresee(chosen)) is not None:
            for row, value in zip(rows, foreseen.tolist(), strict=True):
                row.foreseen.append(value)
        for row, fine in zip((rows[number] for number in judged), verdicts, strict=True):
            row.accepted += fine
            row.rejected = not fine
        for row, chance in zip((rows[number] for number in judged), chances, strict=False):
            row.chances.append(chance)
        for row in rows:
            over = not row.rejected and row.position >= len(self.text)
            row.ended = len(row.tokens) == row.room or row.tokens[-1] in self.eos or over

    def _sampled(
        self, rows: Sequence[_Row], logits: torch.Tensor, judged: Sequence[int]
    ) -> tuple[torch.Tensor, list[bool], list[float]]:
        """Drawn tokens ``(B,)``, and of the rows without a rejected token the verdicts and their probabilities."""
        assert self.coins is not None
        probs = self.sampling.probs(logits)
        chosen = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        verdicts: list[bool] = []
        chances: list[float] = []
        if judged:
            positions = [rows[number].position for number in judged]
            above = self.verifier.probs(positions)
            written = torch.tensor([self.text[position] for position in positions], device=above.device)
            generator = sibling(self.generator, above.device)
            tokens, found, chances_ = draw_draft_tokens(
                written, probs[judged].to(above.device), above, generator, self.coins[positions].to(above.device)
            )
            chosen[judged] = tokens.to(chosen.device)
            verdicts, chances = found.tolist(), chances_.tolist()
        if others := [number for number, row in enumerate(rows) if row.rejected]:
            chosen[others] = draw(probs[others], sibling(self.generator, logits.device))
        return chosen, verdicts, chances

    def _columns(self, rows: Sequence[_Row], forward: Forward, chosen: torch.Tensor) -> list[torch.Tensor]:
        """The signals ``(B,)`` of the chosen tokens, the heads' predictions for the tokens before them, and what DISCO
        heads read."""
        columns = list(read_signals(forward.logits, chosen).values())
        tops = list(read_top_probs(forward.logits).unbind(-1)) if disco_heads(self.heads) else []
        if not (heads := state_heads(self.heads)):
            return columns + tops
        if not rows[0].tokens:  # no draft token precedes the first
            return columns + [torch.ones_like(columns[0])] * len(heads) + tops
        assert forward.hidden is not None
        count = len(DISTRIBUTION_SIGNALS)
        previous = torch.tensor([row.values[-1][:count] for row in rows], device=forward.hidden.device)  # (B, 3)
        return columns + [head.accept_prob(forward.hidden, previous) for head in heads.values()] + tops
