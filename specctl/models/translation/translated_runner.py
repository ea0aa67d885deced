"""A draft with another tokenizer, as a runner of its target's ids (TLI: Timor et al., arXiv 2502.05202)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specctl.models.running.around import Around
from specctl.models.running.context import ENDLESS
from specctl.models.running.runner import Forward, Runner, joined
from specctl.models.translation.draft_text import DraftText
from specctl.models.translation.token_map import TokenMap

if TYPE_CHECKING:
    from specctl.models.passes.forward import Numbers


class TranslatedRunner(Around):
    """A `Runner` that is told its target's ids and gives logits of those that its draft has too.

    The draft's logits of the shared tokens are what it drafts from: renormalised, they are its law there, and signals
    are of this law. What the draft has read is the text in its own ids (`DraftText`). Its cache goes back to where that
    text changes, and of a text that is longer than its context it reads the end.

    Args:
        runner: the draft, of its own ids.
        tokens: which are shared.
    """

    def __init__(self, runner: Runner, tokens: TokenMap) -> None:
        super().__init__(runner)
        self.no_trees = "its draft has another tokenizer"
        self.context = ENDLESS
        self.draft_vocabulary = tokens.vocabulary
        self.translates = f"drafts the {tokens.told}"
        self._map = tokens
        self._text = DraftText(tokens)
        self._read = 0  # of the draft's ids, those that are cached, with the first left out
        self._left_out = 0

    @property
    def length(self) -> int:
        return len(self._text.tokens)

    def same_around(self, bare: Runner) -> Runner:
        return TranslatedRunner(super().same_around(bare), self._map)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        text, behind = self._text, len(tokens) - keep
        for token in tokens[:behind]:
            self._forget(text.append(token))
        if not keep:
            return self._pass(text.ids, [len(text.ids)], 0, hidden)
        parts: list[Forward] = []
        ends: list[int] = []  # where the text ends for each row of the coming pass
        for token in tokens[behind:]:
            before = [*text.ids] if ends else []
            kept = text.append(token)
            if ends and (kept < ends[-1] or self._outside(len(text.ids)) != self._outside(ends[0])):
                parts.append(self._pass(before, ends, len(ends), hidden))
                ends = []
            if not ends:
                self._forget(min(kept, len(text.ids) - 1))
            ends.append(len(text.ids))
        parts.append(self._pass(text.ids, ends, len(ends), hidden))
        return joined(parts) if len(parts) > 1 else parts[0]

    def rollback(self, length: int) -> None:
        if not length:
            self.runner.rollback(0)
            self._left_out = 0
        self._forget(self._text.truncate(length))

    def _outside(self, length: int) -> int:
        """How many ids at the start of a text of some length the draft does not read: halves of its context.

        Of the length alone, though rounds that draft across the border read twice: else what is drafted, and with it
        the text of a seed and a replay, would depend on the rounds before.
        """
        half = max(1, self.runner.context // 2)
        return max(0, -((self.runner.context - length) // half)) * half

    def _forget(self, kept: int) -> None:
        self._read = min(self._read, kept)

    def _pass(self, ids: Sequence[int], ends: Sequence[int], keep: int, hidden: bool) -> Forward:
        """Read what is not cached of the draft's ids.

        Args:
            ids: the text's, in the draft's ids.
            ends: how many of them come before each prediction, rising; nothing is changed from the first one on.
            keep: how many predictions are wanted, all of ``ends`` or none.
            hidden: whether hidden states are wanted.
        """
        runner, outside = self.runner, self._outside(ends[0])
        if outside != self._left_out:
            runner.rollback(0)
            self._left_out = outside
        runner.rollback(max(0, self._read - outside))
        cached = outside + runner.length
        fed = ids[cached : ends[-1]]
        self._read = ends[-1]
        if not fed:
            assert not keep, "the last id is read for its logits"
            return Forward(np.zeros((0, len(self._map.vocabulary)), np.float32), vocabulary=self.draft_vocabulary)
        found = runner.extend(fed, keep=ends[-1] - ends[0] + 1 if keep else 0, hidden=hidden)
        rows = [end - ends[0] for end in ends[:keep]]
        return Forward(
            self._shared(found.columns, rows),
            found.hidden[rows] if found.hidden is not None else None,
            None,
            self.draft_vocabulary,
        )

    def _shared(self, columns: "Numbers", rows: Sequence[int]) -> "Numbers":
        """Some rows of the draft's logits, of the shared tokens only."""
        if isinstance(columns, np.ndarray):
            found: npt.NDArray[np.float32] = columns[np.array(rows, np.int64)[:, None], self._map.columns]
            return found
        import torch

        kept = (
            columns
            if len(rows) == len(columns) == 1
            else columns[torch.tensor(rows, device=columns.device, dtype=torch.long)]
        )
        return kept.index_select(1, self._map.columns_on(kept.device))
