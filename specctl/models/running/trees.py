"""Runners that read a tree of tokens in one pass."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

from specctl.models.running.runner import Forward, Runner


class TreeRunner(Runner, Protocol):
    """A `Runner` that may read several continuations of its sequence at once, and keep one of them.

    Attributes:
        no_trees: why it cannot after all, as the end of a sentence; None if it can.
    """

    @property
    def no_trees(self) -> str | None: ...

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        """Run tokens of a tree after the cached prefix: each sees the prefix, its ancestors and itself.

        A token's position is its depth after the prefix, so it computes what it would in a chain of its ancestors.
        A tree may be read in several passes, one right after the other. Next comes `keep_path`, or a `rollback` to the
        prefix.

        Args:
            tokens: T ids, at most `masks.WIDEST`, and at most `masks.LARGEST_TREE` in all passes.
            parents: the numbers of their parents, each an earlier token of the tree; without the root's.
            before: B, how many of the tree's tokens were read by the passes right before. With 0 the first of the
                tokens is the root, which continues the sequence; with 1 the last token of an `extend` is the root, and
                with more this pass goes on where the last `extend_tree` ended.
            hidden: whether hidden states are wanted.

        Returns:
            A row for each token: logits ``(T, V)``, and the states of all.
        """

    def keep_path(self, path: Sequence[int]) -> None:
        """Cache the prefix and then these tokens of the last tree, and nothing else.

        A draft head keeps what came from its verifier's states, and nothing of a tree.

        Args:
            path: numbers of tokens, from the root on, each the parent of the next.
        """


def tree_obstacle(runner: Runner) -> str | None:
    """Why a runner cannot read trees, as the end of a sentence; None if it can."""
    reason: str | None = getattr(runner, "no_trees", "it reads tokens one after the other")
    return reason


def tree_runner(runner: Runner) -> TreeRunner:
    """A runner without a `tree_obstacle` as what it is."""
    # Asking a protocol takes 0.1 ms, and this is asked in every round.
    assert tree_obstacle(runner) is None, tree_obstacle(runner)
    return cast(TreeRunner, runner)


def path_to(parents: Sequence[int], token: int) -> list[int]:
    """The numbers of a token's ancestors from the root down, and its own; ``parents`` as in `extend_tree`."""
    path = [token]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path[::-1]


def grown_tree(tree: Sequence[int], text: list[int], tokens: Sequence[int], before: int) -> list[int]:
    """All tokens of a tree with those of one more pass, as `TreeRunner.extend_tree` is told of them.

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
