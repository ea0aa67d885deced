"""Paths in a tree of tokens, and their cache entries. No torch here."""

from collections.abc import Iterable, Sequence
from typing import Any


def path_to(parents: Sequence[int], token: int) -> list[int]:
    """The numbers of a token's ancestors from the root down, and its own; ``parents`` as in `extend_tree`."""
    path = [token]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path[::-1]


def grown_tree(tree: Sequence[int], text: list[int], tokens: Sequence[int], before: int) -> list[int]:
    """All tokens of a tree with those of one more pass, as `Runner.extend_tree` is told of them.

    Args:
        tree: the tokens of the passes before.
        text: the sequence in the cache; a root that is read with its tree is appended.
        tokens, before: as in `extend_tree`.
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
