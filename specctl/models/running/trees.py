"""Runners that read a tree of tokens in one pass."""

from collections.abc import Sequence
from typing import Protocol, cast

from specctl.models.running.runner import Forward, Runner


class TreeRunner(Runner, Protocol):
    """A `Runner` that may read several continuations of its sequence at once, and keep one of them.

    Attributes:
        no_trees: why it cannot after all, as the end of a sentence; None if it can.
    """

    @property
    def no_trees(self) -> str | None: ...

    def extend_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> Forward:
        """Run a tree after the cached prefix: each token sees the prefix, its ancestors and itself.

        A token's position is its depth after the prefix, so it computes what it would in a chain of its ancestors.
        Next comes `keep_path`, or a `rollback` to the prefix.

        Args:
            tokens: T ids, at most `masks.WIDEST`; the first is the root, which continues the sequence.
            parents: of the others, T - 1 numbers, each that of an earlier token.

        Returns:
            A row for each token: logits ``(T, V)``, and the states of all.
        """

    def keep_path(self, path: Sequence[int]) -> None:
        """Cache the prefix and then these tokens of the last tree, and nothing else.

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
