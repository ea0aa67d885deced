"""How large a dynamic tree may grow."""

from dataclasses import dataclass

from specctl.errors import UsageError

LEAST, MOST = 2, 64
"""Tokens of a tree, the newest token included: one draft token, and what a pass may be wide."""
BEAMS, MOST_BEAMS = 10, 32
"""Beams by default, as in EAGLE-2, and at most."""


@dataclass(frozen=True, slots=True)
class TreeSize:
    """The size of the trees that a draft grows; how deep they are is up to its stopping policy.

    Attributes:
        tokens: the most that the target verifies in a round, the newest token included (EAGLE-2's ``total_token``).
        beams: how many tokens of a level are continued, and by how many tokens each (EAGLE-2's ``top_k``).
    """

    tokens: int = 60
    beams: int = BEAMS

    def __str__(self) -> str:
        return f"tree={self.tokens}" + (f",tree_beams={self.beams}" if self.beams != BEAMS else "")


def parse_tree(text: str) -> int:
    """The number of tokens that a flag gives.

    Raises:
        UsageError: it is none.
    """
    if text.isdecimal() and LEAST <= int(text) <= MOST:
        return int(text)
    raise UsageError(f"--tree {text} is not a number of tokens from {LEAST} to {MOST}", "for example --tree 60")
