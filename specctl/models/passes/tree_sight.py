"""Which tokens of a tree see which, and how large trees may be. No torch here."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

WIDEST = 64  # Longer passes get no ready-made mask: they are prompts, where a kernel's own causal mask is fastest
WINDOWS = "it has layers with a sliding window or with a state of their own"
"""Why a model reads no trees, as the end of a sentence."""
LARGEST_TREE = 512  # The most tokens of a tree, however many passes it is read in

Seen = npt.NDArray[np.bool_]


class TreeSight:
    """Which tokens of a growing tree each of them sees: itself and its ancestors."""

    def __init__(self) -> None:
        self._seen = np.ones((1, 1), dtype=bool)  # (N, N), of the root alone

    def grown(self, parents: Sequence[int], before: int) -> Seen:
        """What the tokens of one more pass see of the tree.

        Args:
            parents: of the pass's tokens without the root, each the number of an earlier token.
            before: B, how many tokens of the tree earlier passes read; up to 1 a new tree is meant.

        Returns:
            ``(T, B + T)`` bool; with B = 0 the first row is the root's.
        """
        known = max(before, 1)
        assert len(self._seen) >= known, "the passes before this one read another tree"
        old = self._seen[:known, :known]  # a pass may be repeated
        seen = np.eye(known + len(parents), dtype=bool)
        seen[:known, :known] = old
        for token, parent in enumerate(parents, start=known):
            seen[token] |= seen[parent]
        self._seen = seen
        return seen[before:]


def path_to(parents: Sequence[int], token: int) -> list[int]:
    """The numbers of a token's ancestors from the root down, and its own; ``parents`` as in `extend_tree`."""
    path = [token]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path[::-1]


def grown_tree(tree: Sequence[int], text: list[int], tokens: Sequence[int], before: int) -> list[int]:
    """All tokens of a tree with those of one more pass, as `Slot.extend_tree` receives them.

    Args:
        tree: the tokens of the passes before.
        text: the sequence in the cache; a root that is read with its tree is appended.
        tokens, before: see `extend_tree`.
    """
    if not before:
        text.append(tokens[0])
        return list(tokens)
    return [*(tree if before > 1 else text[-1:]), *tokens]


def gather_path(buffers: Iterable[Any], start: int, path: Sequence[int]) -> None:
    """Bring some tokens of a tree together where it begins, in the order of a path.

    Args:
        buffers: ``(1, heads, capacity, head_dim)``, tensors or arrays of numpy, which take a third of the time.
        start: the slot of the tree's first token.
        path: places in the tree, rising; so no slot is written before it has been read.
    """
    for buffer in buffers:
        for slot, place in enumerate(path):
            if place != slot:
                buffer[:, :, start + slot] = buffer[:, :, start + place]
