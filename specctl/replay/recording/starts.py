"""Runs a draft head from the positions of a text at which a round may begin."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from specctl.decoding.along import CHUNK
from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.block_runner import BlocksSideBySide
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.chain_runner import SideBySide
from specctl.models.draft_heads.head import DraftHeadRunner
from specctl.models.passes.forward import Forward
from specctl.models.passes.watching import States, kept_states
from specctl.models.running.slot import Slot
from specctl.replay.recording.detours import Detours

TOKENS = 128
"""Tokens of the blocks in one pass, whose logits are held at once."""


class Starts(Protocol):
    """Runs the draft from some starts at once.

    Attributes:
        at_once: how many.
    """

    at_once: int

    def first(self, starts: Sequence[int]) -> Forward:
        """The pass over the newest token of a round at each of B consecutive starts: logits ``(B, V)``.

        They go on where those of the last call ended, or are the same once more.
        """

    def further(self, going: Sequence[int], tokens: Sequence[int]) -> Forward:
        """The pass over the next token of each round that goes on.

        Args:
            going: their numbers among the rounds of the pass before.
            tokens: their newest tokens.
        """

    def foresee(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """What the draft predicts of the token after each of those ``(B,)`` drawn from the pass before.

        See `specctl.models.passes.token_reader.Foresee`; ``(B,)``, or None if the draft does not predict it.
        """


class OneByOne:
    """Runs any draft from one start after another, by the calls of a live run."""

    at_once = 1

    def __init__(
        self, draft: Slot, verifier: "ReadText", sequence: Sequence[int], before: int, *, hidden: bool
    ) -> None:
        self._draft, self._verifier, self._sequence = draft, verifier, sequence
        self._before, self._hidden = before, hidden
        self._foresee = draft.foresee
        draft.rollback(0)

    def first(self, starts: Sequence[int]) -> Forward:
        draft, length = self._draft, self._before + starts[0]
        read = length - 1  # the verifier has not read the newest token when a round begins
        draft.rollback(read)
        if draft.reads_states:
            for place, states in self._verifier.states(read):
                draft.observe_states(place, states)
        return draft.extend(self._sequence[draft.length : length], keep=1)

    def further(self, going: Sequence[int], tokens: Sequence[int]) -> Forward:  # noqa: ARG002 - there is only one
        return self._draft.extend(tokens, keep=1, hidden=self._hidden)

    def foresee(self, tokens: torch.Tensor) -> torch.Tensor | None:
        return None if self._foresee is None else self._foresee(tokens[0])[None]


class ManyAtOnce:
    """Runs a draft head from many starts in one pass."""

    def __init__(
        self,
        draft: DraftHeadRunner,
        verifier: "ReadText",
        sequence: Sequence[int],
        before: int,
        *,
        hidden: bool,
    ) -> None:
        self._rounds: SideBySide | BlocksSideBySide
        head = draft.head
        if isinstance(head, BlockHead):
            self._rounds = BlocksSideBySide(head, draft.vocabulary, sequence)
            self.at_once = max(1, TOKENS // head.block_size)
        else:
            assert isinstance(head, ChainHead), "there are no others"
            self._rounds = SideBySide(head, draft.vocabulary, sequence)
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
        return self._rounds.foresee(tokens) if isinstance(self._rounds, BlocksSideBySide) else None


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
        self._known = 0  # places whose states were read
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

    def probs_behind(self, position: int, tokens: Sequence[int], count: int) -> torch.Tensor:
        """The distributions ``(count, V)`` behind the last of some tokens that follow the text up to a position."""
        return self._sampling.probs(self._detours.behind(len(self._prompt) + position, tokens, count))

    def forget(self, position: int) -> None:
        """Forget the distributions before a position."""
        if self._probs is not None:
            gone = min(position - self._first, len(self._probs))
            self._probs = self._probs[gone:]
            self._first += gone

    def _read(self) -> Iterator[None]:
        before = self._prompt[:-1]
        if before and not self._runner.whole_prompts:
            self._note(self._runner.extend(before, keep=0), len(before))
            yield
        read = [self._prompt[-1], *self._text[:-1]]
        for start in range(0, len(read), CHUNK):
            part = read[start : start + CHUNK]
            if start or not self._runner.whole_prompts:
                self._detours.come_back(len(self._prompt) - 1 + start)
                forward = self._runner.extend(part, keep=0 if self._sampling.greedy else len(part))
                self._note(forward, len(part))
            else:
                forward = self._runner.extend([*before, *part], keep=len(part))
                self._note(forward, len(before) + len(part))
            if not self._sampling.greedy:
                probs = self._sampling.probs(forward.logits)
                self._probs = probs if self._probs is None else torch.cat([self._probs, probs])
            yield

    def _note(self, forward: Forward, count: int) -> None:
        states = kept_states(forward.states)
        assert states is not None
        self._pending.append((self._known, states))
        self._known += count


def starts_of(
    draft: Slot,
    verifier: ReadText,
    sequence: Sequence[int],
    before: int,
    *,
    hidden: bool,
) -> Starts:
    """Runs a draft head as well as it can be run.

    Args:
        draft: the head.
        verifier: gives the states of the text.
        sequence: prompt and text.
        before: length of the prompt.
        hidden: whether `Starts.further` shall give hidden states.
    """
    if isinstance(draft, DraftHeadRunner):
        return ManyAtOnce(draft, verifier, sequence, before, hidden=hidden)
    return OneByOne(draft, verifier, sequence, before, hidden=hidden)
