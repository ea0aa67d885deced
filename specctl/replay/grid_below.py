"""Reads what a draft head would draft below a middle draft, which writes the text that it drafts for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from specctl.decoding.sampling import Sampling
from specctl.models.running.runner import Runner, StateReader
from specctl.models.running.trained_heads import TrainedHead, state_heads
from specctl.models.running.watching import States
from specctl.replay.grid import DraftGrid
from specctl.replay.grid_recording import GridReading
from specctl.replay.starts import ReadText, starts_of
from specctl.replay.steps import DraftSteps
from specctl.replay.traces import DraftAlong


@dataclass(frozen=True, slots=True)
class ReadBelow:
    """Reads the rounds of a draft head along all that a middle draft may write.

    Attributes:
        middle: the middle draft; its cache is read anew.
        draft: what drafts from its states.
        heads: the draft head's trained heads by name, the one that it usually uses first.
        depth: the longest draft that shall be replayed, of the middle draft and of the head.
        sampling: as the text was generated.
        generator: on the middle draft's device; draws draft tokens and verdicts when sampling.
        eos: ids that end a sequence.
    """

    middle: Runner
    draft: StateReader
    heads: Mapping[str, TrainedHead]
    depth: int
    sampling: Sampling
    generator: torch.Generator
    eos: frozenset[int]

    def read(self, prompt: Sequence[int], text: Sequence[int], drafted: DraftAlong, last: int) -> DraftAlong:
        """Add the rounds of the draft head to what the middle draft drafts along a text.

        Args:
            prompt: at least one id.
            text: N ids that the target wrote.
            drafted: by the middle draft, with its branches.
            last: the last position at which the middle draft may draft. The head leaves one more to it.
        """
        # A block has at most `depth` tokens, of which the last is the middle draft's own.
        depth = self.depth - 1 if self.draft.longest is None else min(self.depth - 1, self.draft.longest)
        states = self._states(prompt, text)
        rows: list[DraftSteps] = []
        runs: list[int] = []
        late_rows: list[DraftSteps] = []
        late_runs: list[int] = []
        branches: dict[int, DraftGrid] = {}
        for first, shared, written in _blocks(drafted):
            before, end = [*prompt, *text[:first]], first + shared
            rooms = [min(depth, last - position) for position in range(first, end)]
            # A block that goes on in the branch begins before it.
            most = min(last - end, self.depth - 2)
            on_branch = [min(depth, most - place) for place in range(len(written) - shared)]
            reading = self._reading(before, written, states)
            found = self._grid(reading, before, [*rooms, *on_branch])
            rows += found.rows[:shared]
            runs += found.runs[:shared]
            if on_branch:
                branches[end - 1] = DraftGrid(found.rows[shared:], found.runs[shared:], self.draft.longest)
            if len(before) == 1:
                rooms[0] = 0  # before the second token there is no place that could lack
            found = self._grid(self._reading(before, written, states, reading.coins), before, rooms, late=True)
            late_rows += found.rows
            late_runs += found.runs
        late = DraftGrid(late_rows, late_runs, self.draft.longest)
        below = DraftGrid(rows, runs, self.draft.longest, late=late)
        return replace(drafted, below=below, branches_below=branches)

    def _states(self, prompt: Sequence[int], text: Sequence[int]) -> States:
        """The middle draft's states of all places of a prompt and a text but the last."""
        self.middle.watch(self.draft.layers)
        self.middle.rollback(0)
        parts = [self.middle.extend(part, keep=0).states for part in (prompt, text[:-1]) if part]
        return {layer: torch.cat([part[layer] for part in parts if part is not None]) for layer in self.draft.layers}

    def _reading(
        self, before: Sequence[int], written: Sequence[int], states: States, coins: torch.Tensor | None = None
    ) -> GridReading:
        """Of what the middle draft writes behind a part of the text, with coins tossed for each position."""
        verifier = ReadText(self.middle, self.draft.layers, before, written, self.sampling, states)
        if coins is None and not self.sampling.greedy:
            coins = torch.rand(len(written), generator=self.generator, device=self.generator.device)
        return GridReading(verifier, written, self.sampling, self.generator, coins, self.heads, self.eos)

    def _grid(
        self, reading: GridReading, before: Sequence[int], rooms: Sequence[int], *, late: bool = False
    ) -> DraftGrid:
        """The rounds that begin at each position; `Starts` explains ``late``."""
        sequence = [*before, *reading.text]
        rounds = starts_of(
            self.draft, reading.verifier, sequence, len(before), hidden=bool(state_heads(self.heads)), late=late
        )
        return reading.grid(rounds, [max(0, room) for room in rooms], self.draft.longest)


class _Block(NamedTuple):
    """The text behind which a middle draft's blocks begin, up to a token that the target rejects, and its branch.

    Attributes:
        first: position of the first token in the target's text.
        shared: how many tokens stand at positions of that text: the rest is the branch.
        written: all ids, as the middle draft writes them.
    """

    first: int
    shared: int
    written: list[int]


def _blocks(drafted: DraftAlong) -> Iterator[_Block]:
    """One for each token that the target rejects, and one for the text behind the last of them."""
    first = 0
    for position, fine in enumerate(drafted.accepted):
        if fine and position + 1 < len(drafted.accepted):
            continue
        branch = drafted.branches.get(position)
        written = drafted.along.tokens[first : position + 1] + (branch.tokens if branch is not None else [])
        yield _Block(first, position + 1 - first, written)
        first = position + 1
