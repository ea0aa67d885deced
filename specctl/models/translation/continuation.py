"""The target's tokens of what a draft writes in its own (SLEM, algorithm 2: Timor et al., arXiv 2502.05202)."""

from collections.abc import Sequence

import numpy as np

from specctl.models.translation.columns import Columns
from specctl.models.translation.draft_text import DraftText
from specctl.models.translation.token_map import TokenMap

FARTHEST = 8
"""Tokens of a draft after which the target's next one is taken as it then is, whatever might come behind it."""


class Continuation:
    """Cuts what a draft writes behind a text as the target's tokenizer does.

    The word that is being written is cut together with what follows it. Where other tokens than the text's come of that
    the text stays as it is, and what follows is cut by itself. Special tokens are drafted where both have them;
    nothing is cut across one.

    Args:
        tokens: of the target and the draft.

    Attributes:
        writable: the draft's tokens that are text, and the special ones that its target has.
    """

    def __init__(self, tokens: TokenMap) -> None:
        self._target, self._draft = tokens.target, tokens.draft
        theirs = dict(zip(tokens.columns.tolist(), tokens.vocabulary.ids.tolist(), strict=True))
        special = {*tokens.draft.specials.values()}
        self._special = {own: index for own, index in theirs.items() if own in special}
        spelt = (own for own, text in tokens.draft.of.items() if text)
        self.writable = Columns(np.array(sorted({*spelt, *self._special}), dtype=np.int64))
        self._any = min(tokens.target.of, default=0)

    def next(self, text: DraftText, written: Sequence[int]) -> int | None:
        """The target's token that comes next; None while more has to be written to tell.

        A token is told by what comes behind it: cut at the end of what was written it may be the beginning of a longer
        one. Where nothing can be cut of `FARTHEST` tokens it is one that most likely is wrong.

        Args:
            text: so far.
            written: the draft's ids behind it, ``writable`` ones, of which none but the last is special.
        """
        if not written:
            return None
        data, special = self._draft.text(written), self._special.get(written[-1])
        settled = special is not None or len(written) >= FARTHEST
        found = self._cut(text, data, settled) if data else ()
        if len(found) > 1 or (found and settled):
            return found[0]
        return special if special is not None else self._any if settled else None

    def _cut(self, text: DraftText, data: bytes, settled: bool) -> Sequence[int]:
        """The target's ids of bytes behind a text; of whole characters only, unless they are ``settled``."""
        word, begins = text.word, text.begins
        before = self._target.text(word)
        if begins and not word and self._draft.puts_space:
            data = data.removeprefix(b" ")
        elif begins and self._target.puts_space:
            before = before.removeprefix(b" ")
        if not settled:
            data = data[: max(0, len(_characters(before + data)) - len(before))]
        if not data:
            return ()
        whole = self._target.encode(before + data, first=begins)
        if whole[: len(word)] == [*word]:
            return whole[len(word) :]
        return self._target.encode(data)


def _characters(data: bytes) -> bytes:
    """Bytes without the beginning of a character at their end."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start] if error.end == len(data) else data
    return data
