"""Token ids for passes with arbitrary text."""

from collections.abc import Set
from itertools import cycle, islice

FIRST, LAST = 10, 110  # Most vocabularies start with special tokens, followed by letters
FEW = 4  # With fewer ids in that range the whole vocabulary is used


def ordinary_tokens(number: int, vocabulary: int, eos: Set[int] = frozenset()) -> list[int]:
    """``number`` ids that a model knows and that end no sequence; if possible none that are special.

    Args:
        number: the number of ids.
        vocabulary: V; the ids are below it.
        eos: ids that end a sequence; one of them is used only if there is no other id.
    """
    ids = [token for token in range(FIRST, min(LAST, vocabulary)) if token not in eos]
    if len(ids) < FEW:
        ids = [token for token in range(min(LAST, vocabulary)) if token not in eos] or [0]
    return list(islice(cycle(ids), number))
