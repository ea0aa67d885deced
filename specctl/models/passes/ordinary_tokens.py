"""Token ids for passes whose text does not matter."""

from collections.abc import Set
from itertools import cycle, islice

FIRST, LAST = 10, 110  # Most vocabularies begin with special tokens, and have letters next
FEW = 4  # With fewer ids in that range the whole vocabulary is taken


def ordinary_tokens(number: int, vocabulary: int, eos: Set[int] = frozenset()) -> list[int]:
    """``number`` ids that a model knows and that end no sequence; where there are enough, none likely to be special.

    Args:
        number: how many.
        vocabulary: V; they are below it.
        eos: ids that end a sequence; one of them is taken only where there is no other id.
    """
    ids = [token for token in range(FIRST, min(LAST, vocabulary)) if token not in eos]
    if len(ids) < FEW:
        ids = [token for token in range(min(LAST, vocabulary)) if token not in eos] or [0]
    return list(islice(cycle(ids), number))
