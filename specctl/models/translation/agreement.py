"""How much of a text its target would have again, had a draft written it in tokens of its own."""

from collections.abc import Iterable

from specctl.models.translation.continuation import Continuation
from specctl.models.translation.draft_text import DraftText
from specctl.models.translation.token_map import TokenMap

MOST = 512
"""Tokens of each text that are looked at."""
AHEAD = 64
"""Bytes of a text that a draft may have to write to tell one token."""


def agreement(tokens: TokenMap, texts: Iterable[Iterable[int]]) -> float:
    """The share of tokens that come out as they were, behind a text as it is, if the draft goes on as it does.

    What the draft knows is no part of it: so many tokens can be accepted at most.

    Args:
        tokens: of the target and the draft.
        texts: in ids of the target's, as its tokenizer cuts them.
    """
    continuation, same, whole = Continuation(tokens), 0, 0
    for some in texts:
        ids = [*some][:MOST]
        text = DraftText(tokens)
        for place, token in enumerate(ids):
            rest = tokens.target.text(ids[place:])[:AHEAD]
            written = tokens.draft.encode(rest)
            found = (continuation.next(text, written[: length + 1]) for length in range(len(written)))
            same += next((one for one in found if one is not None), None) == token
            whole += 1
            text.append(token)
    return same / whole if whole else 0.0
