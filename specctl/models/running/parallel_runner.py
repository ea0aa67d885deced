"""A draft that writes several tokens in one pass, because it was trained to read masks in their place."""

from collections.abc import Sequence
from typing import Any

from specctl.errors import ModelError
from specctl.models.passes.forward import Forward, joined
from specctl.models.running.around import Around
from specctl.models.running.slot import Slot

PARD_TOKENS = 8
"""Runners of loaded models, by the engine that a profile asks for, and of drafts that write several tokens a pass."""


def in_parallel(runner: Slot, config: Any, vocabulary: int, name: str) -> Slot:
    """A draft's runner, with a `ParallelRunner` around it if its configuration names PARD's mask.

    Args:
        runner: the draft model's, which verifies no other draft.
        config: of transformers.
        vocabulary: V, the pair's shared vocabulary.
        name: the draft's, in messages.

    Raises:
        ModelError: the mask is no id.
    """
    mask = getattr(config, "pard_token", None)
    if mask is None or runner.translates is not None:
        return runner  # one with another tokenizer is asked for rows of several of its ids
    if type(mask) is not int or not 0 <= mask < vocabulary:
        raise ModelError(f"{name}: pard_token in its config.json is {mask!r}, not an id from 0 to {vocabulary - 1}.")
    return ParallelRunner(runner, mask)


class ParallelRunner(Around):
    """A parallel draft model as a `Slot`, such as PARD's (An et al. 2025, arXiv 2504.18583).

    The first pass of a round reads what is new of the text and K - 1 masks behind it; its last K rows predict the next
    K tokens, each without knowing those before it. A token fed after that moves to the next row, and behind the last
    row the tokens fed are read, with masks behind them, in a pass of their own. What was read of masks and of drafts is
    forgotten when the round ends.

    Args:
        runner: the model or head.
        mask: the id that stands for tokens to be drafted.
        count: K.
    """

    def __init__(self, runner: Slot, mask: int, count: int = PARD_TOKENS) -> None:
        super().__init__(runner)
        self.verifies, self.no_trees, self.marginals = False, None, True
        self.longest = count
        self.context = runner.context - count + 1
        self._mask = mask
        self._block: Forward | None = None
        self._row = 0
        self._newest = 0  # the last token that was read of the text
        self._fed: list[int] = []  # since the block's pass

    @property
    def length(self) -> int:
        return self.runner.length + len(self._fed)

    def same_around(self, bare: Slot) -> Slot:
        assert self.longest is not None
        return ParallelRunner(super().same_around(bare), self._mask, self.longest)

    def fresh(self) -> Slot:
        assert self.longest is not None
        return ParallelRunner(self.runner.fresh(), self._mask, self.longest)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """As in `Slot`; rows of a block are those of its pass, and tokens of the text before it are read as ever."""
        if self._block is None and keep != 1:
            self._newest = tokens[-1]
            return self.runner.extend(tokens, keep, hidden=hidden)
        if self._block is None:
            return self._begun(tokens, hidden)
        rows = [self._next(token, hidden) for token in tokens]
        return joined(rows[-keep:]) if keep else _rows(rows[-1], slice(0))

    def rollback(self, length: int) -> None:
        self._block = None
        self._fed.clear()
        self.runner.rollback(length)

    def extend_tree(
        self,
        tokens: Sequence[int],  # noqa: ARG002 - the signature of `Slot`
        parents: Sequence[int],  # noqa: ARG002
        *,
        before: int = 0,
        hidden: bool = False,
    ) -> Forward:
        """As in `Slot`: all tokens of a level are followed by the next row.

        Raises:
            ValueError: the block has no further row.
        """
        assert before, "the newest token is read by `extend`"
        if self._block is None:  # without a row behind it
            self.runner.rollback(self.runner.length - 1)
            self._begun([self._newest], hidden)
        if self._row + 1 == self.longest:
            raise ValueError(f"the block drafts {self.longest} tokens")
        self._row += 1
        return self._given(hidden)

    def keep_path(self, path: Sequence[int]) -> None:  # noqa: ARG002 - nothing of a tree was read
        """Go back to the text that was read."""
        self.rollback(self.runner.length)

    def _begun(self, tokens: Sequence[int], hidden: bool) -> Forward:
        """The first row of a block behind tokens."""
        runner, masks = self.runner, (self.longest or 1) - 1
        self._fed.clear()
        self._newest, self._row = tokens[-1], 0
        self._block = runner.extend([*tokens, *[self._mask] * masks], keep=masks + 1, hidden=hidden)
        runner.rollback(runner.length - masks)
        return self._given(hidden)

    def _next(self, token: int, hidden: bool) -> Forward:
        """The row that follows a token."""
        self._fed.append(token)
        if self._row + 1 == self.longest:
            return self._begun([*self._fed], hidden)
        self._row += 1
        return self._given(hidden)

    def _given(self, hidden: bool) -> Forward:
        assert self._block is not None
        if hidden and self._block.hidden is None:  # nobody had asked for states yet
            row, fed = self._row, [*self._fed]
            self.runner.rollback(self.runner.length - 1)
            self._begun([self._newest], hidden)
            self._row, self._fed = row, fed
        return _rows(self._block, slice(self._row, self._row + 1))


def _rows(forward: Forward, which: slice) -> Forward:
    states = None if forward.hidden is None else forward.hidden[which]
    return Forward(forward.columns[which], states, None, forward.vocabulary)
