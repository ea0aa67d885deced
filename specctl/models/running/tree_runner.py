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
