"""Block verification in numbers alone: what follows from which beginnings of a draft pass. No torch here."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def kept_in_turn(passing: Sequence[float]) -> list[float]:
    """Of each of K draft tokens, the probability that it is kept, given all K and that those before it are.

    Args:
        passing: h_1 to h_K, the probabilities that the draft's beginnings pass; see
            `specctl.decoding.acceptance.passing`.
    """
    # Fewer than i tokens are kept if neither these i nor a longer beginning passes: a product from the end.
    fewer = [*accumulate(reversed(passing), lambda failed, chance: failed * (1 - chance), initial=1.0)][:0:-1]
    at_least = [1.0, *(1 - failed for failed in fewer)]  # of 0 to K tokens
    return [kept / before if before else 0.0 for before, kept in pairwise(at_least)]
