"""What runners of block draft heads share: where the block is, and the places that it attends to."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.head import DraftHeadRunner
from specctl.models.draft_heads.waiting_states import WaitingStates
from specctl.models.passes.watching import States
from specctl.models.running.runner import Forward


class BlockHeadRunner(DraftHeadRunner):
    """A block draft head's `Runner`.

    Tokens of places whose states were witnessed are not read: the keys and values of these places come from the states.
    The first token after a rollback whose logits are asked for is the block's anchor. Its pass drafts the whole block,
    and every token fed after it moves to the next row. A place before the anchor without a witnessed state is missing
    from what the block attends to; all other places keep their true positions.

    Attributes:
        longest: rows of a block that predict tokens.
    """

    head: BlockHead
    no_trees = None
    length = 0
    _remembered = 0  # places whose keys and values are cached
    _row = -1  # of the block, the one given last; -1 before its pass

    @cached_property
    def _waiting(self) -> WaitingStates:
        """States of the places behind those that are remembered."""
        return WaitingStates()

    @property
    def witnessed(self) -> int:
        return self._remembered + self._waiting.count

    def witness(self, start: int, states: States) -> None:
        self._waiting.add(states, self.witnessed - start)
        if self._waiting.full:
            self._remember()

    @abstractmethod
    def _remember(self) -> None:
        """Cache keys and values made of the states that wait."""

    def rollback(self, length: int) -> None:
        """End the block, and go to the end of the places that are both within ``length`` and witnessed."""
        self._row = -1
        self._waiting.cut(max(0, length - self._remembered))
        self._remembered = min(self._remembered, length)
        self.length = self.witnessed

    @property
    def marginals(self) -> bool:  # type: ignore[override]
        return self.head.config.markov is None

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        """As in `Runner`, a level at a time: its tokens move to the next row of the block, and no pass is made.

        A row follows each token by itself where there is a sequential head, else all of them alike.

        Raises:
            ValueError: the block has no further row.
        """
        assert before, "the newest token is read by `extend`, which makes the pass"
        self._move()
        return self._level(tokens, parents, before == 1, hidden)

    @abstractmethod
    def _level(self, tokens: Sequence[int], parents: Sequence[int], first: bool, hidden: bool) -> Forward:
        """The row that has been moved to, after each of a tree's tokens; ``first`` for those below the root."""

    def keep_path(self, path: Sequence[int]) -> None:  # noqa: ARG002 - the signature of `Runner`
        """Go back to the places whose states were witnessed."""
        self.rollback(self.witnessed)

    def _fed(self, tokens: Sequence[int], keep: int) -> Sequence[int]:
        """The tokens that a row of a block is given for; before a block those without logits are skipped.

        Raises:
            ValueError: logits of a token before the block's anchor are asked for.
        """
        if self._row >= 0:
            return tokens
        if keep > 1:
            raise ValueError("a block draft head gives logits of the newest token only")
        self.length += len(tokens) - keep
        return tokens[len(tokens) - keep :]

    def _move(self) -> None:
        """Go to the next row of the block.

        Raises:
            ValueError: the block has none.
        """
        if self._row + 1 == self.head.block_size:
            raise ValueError(f"the block drafts {self.head.longest} tokens")
        self._row += 1
