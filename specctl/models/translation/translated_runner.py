"""A draft with another tokenizer, as a runner of its target's ids (TLI: Timor et al., arXiv 2502.05202)."""

from collections.abc import Sequence

import numpy as np

from specctl.models.running.runner import Forward, Runner, joined
from specctl.models.translation.columns import Columns
from specctl.models.translation.own_text_runner import OwnTextRunner
from specctl.models.translation.token_map import TokenMap


class TranslatedRunner(OwnTextRunner):
    """A `Runner` that is told its target's ids and gives logits of those that its draft has too.

    The draft's logits of the shared tokens are what it drafts from: renormalised, they are its law there, and signals
    are of this law.

    Args:
        runner, tokens: as of `OwnTextRunner`.
    """

    def __init__(self, runner: Runner, tokens: TokenMap) -> None:
        super().__init__(runner, tokens)
        self.draft_vocabulary = tokens.vocabulary
        self._shared = Columns(tokens.columns)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        text, behind = self._text, len(tokens) - keep
        for token in tokens[:behind]:
            self._forget(text.append(token))
        if not keep:
            return self._rows(text.ids, [len(text.ids)], 0, hidden)
        parts: list[Forward] = []
        ends: list[int] = []  # where the text ends for each row of the coming pass
        for token in tokens[behind:]:
            before = [*text.ids] if ends else []
            kept = text.append(token)
            if ends and (kept < ends[-1] or self._outside(len(text.ids)) != self._outside(ends[0])):
                parts.append(self._rows(before, ends, len(ends), hidden))
                ends = []
            if not ends:
                self._forget(min(kept, len(text.ids) - 1))
            ends.append(len(text.ids))
        parts.append(self._rows(text.ids, ends, len(ends), hidden))
        return joined(parts) if len(parts) > 1 else parts[0]

    def _rows(self, ids: Sequence[int], ends: Sequence[int], keep: int, hidden: bool) -> Forward:
        """Read what is not cached of the draft's ids.

        Args:
            ids: the text's, in the draft's ids.
            ends: how many of them come before each prediction, rising; nothing is changed from the first one on.
            keep: how many predictions are wanted, all of ``ends`` or none.
            hidden: whether hidden states are wanted.
        """
        found = self._pass(ids, ends[0], ends[-1], ends[-1] - ends[0] + 1 if keep else 0, hidden)
        if found is None:
            return Forward(np.zeros((0, len(self._map.vocabulary)), np.float32), vocabulary=self.draft_vocabulary)
        rows = [end - ends[0] for end in ends[:keep]]
        return Forward(
            self._shared.of(found.columns, rows),
            found.hidden[rows] if found.hidden is not None else None,
            None,
            self.draft_vocabulary,
        )
