"""A draft that reads its target's text in tokens of its own."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from specctl.models.running.around import Around
from specctl.models.running.context import ENDLESS
from specctl.models.running.runner import Forward, Runner
from specctl.models.translation.draft_text import DraftText
from specctl.models.translation.token_map import TokenMap


class OwnTextRunner(Around):
    """A `Runner` that is told its target's ids, and whose draft reads what they spell in its own (`DraftText`).

    The draft's cache goes back to where that text changes, and of a text that is longer than its context it reads the
    end.

    Args:
        runner: the draft, of its own ids.
        tokens: which are shared.
    """

    AHEAD = 0
    """How many ids behind the text the draft may write."""

    def __init__(self, runner: Runner, tokens: TokenMap) -> None:
        super().__init__(runner)
        self.no_trees = "its draft has another tokenizer"
        self.context = ENDLESS
        self.translates = tokens.told
        self._map = tokens
        self._text = DraftText(tokens)
        self._room = max(1, runner.context - self.AHEAD)
        self._read = 0  # of the draft's ids, those that are cached, with the first left out
        self._left_out = 0

    @property
    def length(self) -> int:
        return len(self._text.tokens)

    def same_around(self, bare: Runner) -> Self:
        return type(self)(super().same_around(bare), self._map)

    @abstractmethod
    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward: ...

    def begin(self, prompt: int) -> None:  # noqa: ARG002 - which the draft has in ids of its own
        self.runner.begin(0)

    def rollback(self, length: int) -> None:
        if not length:
            self.runner.rollback(0)
            self._read = self._left_out = 0
        self._moved(self._text.truncate(length))

    def _outside(self, length: int) -> int:
        """How many ids at the start of a text of some length the draft does not read: halves of its context.

        Of the length alone, though rounds that draft across the border read twice: else what is drafted, and with it
        the text of a seed and a replay, would depend on the rounds before.
        """
        half = max(1, self._room // 2)
        return max(0, -((self._room - length) // half)) * half

    def _moved(self, kept: int) -> None:
        """The text has changed, but for the first ``kept`` of its ids in the draft's."""
        self._forget(kept)

    def _forget(self, kept: int) -> None:
        self._read = min(self._read, kept)

    def _pass(self, ids: Sequence[int], length: int, end: int, keep: int, hidden: bool) -> Forward | None:
        """Read what is not cached of the first ``end`` of the draft's ids.

        Args:
            ids: the text's, in the draft's ids.
            length: of the text that is gone on from, which says what is left out.
            end: how many of them are read.
            keep: predictions behind the last so many of them are wanted.
            hidden: whether hidden states are wanted.

        Returns:
            The draft's own pass; None where all is cached already.
        """
        runner, outside = self.runner, self._outside(length)
        if outside != self._left_out:
            runner.rollback(0)
            self._left_out = outside
        runner.rollback(max(0, self._read - outside))
        cached = outside + runner.length
        fed = ids[cached:end]
        self._read = end
        if not fed:
            assert not keep, "the last id is read for its logits"
            return None
        return runner.extend(fed, keep=keep, hidden=hidden)
