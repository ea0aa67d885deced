"""Block verification as the paper prints it (arXiv 2403.10444, Algorithm 2), in fractions."""

from collections.abc import Sequence
from fractions import Fraction

Rows = list[list[Fraction]]


def in_fractions(tokens: Sequence[int], draft: Rows, target: Rows) -> dict[tuple[int, int], Fraction]:
    """The probability of each number of accepted tokens with each extra token."""
    count = len(tokens)
    weights = [Fraction(1)]
    for token, q, p in zip(tokens, draft, target, strict=False):
        weights.append(min(weights[-1] * p[token] / q[token], Fraction(1)))
    law: dict[tuple[int, int], Fraction] = {}
    left = Fraction(1)  # no longer beginning passed
    for kept in range(count, -1, -1):
        if kept == count:
            row, chance = target[kept], weights[kept]
        else:
            row = [max(weights[kept] * p - q, Fraction(0)) for p, q in zip(target[kept], draft[kept], strict=True)]
            bottom = sum(row) + 1 - weights[kept]
            chance = Fraction(1) if not kept else sum(row, Fraction(0)) / bottom if bottom else Fraction(1)
        if reached := left * chance:
            total = sum(row)
            law |= {(kept, token): reached * weight / total for token, weight in enumerate(row) if weight}
        left *= 1 - chance
    return law
