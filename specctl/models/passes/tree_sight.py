"""Tree attention: which tokens of a tree see which, and the largest tree. No torch here."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

WIDEST = 64  # Wider passes get no precomputed mask: they are prompts, where a kernel's own causal mask is fastest
WINDOWS = "it has layers with a sliding window or with a state of their own"
"""Why a model reads no trees, as the end of a sentence."""
LARGEST_TREE = 512  # The most tokens of a tree, over all its passes

Seen = npt.NDArray[np.bool_]


class TreeSight:
    """Which tokens of a growing tree each token sees: itself and its ancestors."""

    def __init__(self) -> None:
        self._seen = np.ones((1, 1), dtype=bool)  # (N, N), of the root alone

    def grown(self, parents: Sequence[int], before: int) -> Seen:
        """The tree's tokens that the tokens of one more pass see.

        Args:
            parents: the parents of the pass's tokens without the root, each the index of an earlier token.
            before: B, the number of the tree's tokens read by earlier passes; 0 or 1 starts a new tree.

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
    """The indices of a token's ancestors from the root down, and its own; ``parents`` as in `extend_tree`."""
    path = [token]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path[::-1]


def grown_tree(tree: Sequence[int], text: list[int], tokens: Sequence[int], before: int) -> list[int]:
    """All tokens of a tree including those of one more pass, as `Slot.extend_tree` receives them.

    Args:
        tree: the tokens of earlier passes.
        text: the sequence in the cache; a root that is read with its tree is appended.
        tokens, before: see `extend_tree`.
    """
    if not before:
        text.append(tokens[0])
        return list(tokens)
    return [*(tree if before > 1 else text[-1:]), *tokens]


def gather_path(buffers: Iterable[Any], start: int, path: Sequence[int]) -> None:
    """Move the tokens of a path to the start of their tree, in the path's order.

    Args:
        buffers: ``(1, heads, capacity, head_dim)``, tensors or numpy arrays; numpy takes a third of the time.
        start: the slot of the tree's first token.
        path: indices in the tree, ascending, so that no slot is written before it has been read.
    """
    for buffer in buffers:
        for slot, place in enumerate(path):
            if place != slot:
                buffer[:, :, start + slot] = buffer[:, :, start + place]
