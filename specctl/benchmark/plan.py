"""How a benchmark is to be run. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """How a benchmark is to be run.

    Attributes:
        lengths: token limits; every prompt is run to each of them.
        repeats: how often every prompt is run.
        oracle: whether to compute the bounds of greedy decoding.
    """

    lengths: Sequence[int]
    repeats: int = 1
    oracle: bool = False
