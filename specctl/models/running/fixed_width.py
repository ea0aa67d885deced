"""Passes of one shape only, so that a token's logits never depend on how many others are verified with it."""

from collections.abc import Sequence

from specctl.models.passes.forward import Forward, joined
from specctl.models.passes.watching import cut_states, kept_states
from specctl.models.running.around import Around
from specctl.models.running.passes import Passes
from specctl.models.running.slot import Slot

WIDTH = 16


class FixedWidthRunner(Around):
    """A `Slot` whose logits are bit for bit the same whatever the calls that led to them.

    Kernels round differently for different shapes, and even for different rows of one matrix. So the sequence is cut
    into blocks of ``width`` tokens that begin at multiples of it, and a pass is always one whole block, from its first
    token on, padded behind the last. A token then has the same row, the same shape and the same span of keys in every
    pass that contains it. Only the tokens before the first block with wanted logits run in one pass: those of the
    prompt, which every policy caches the same way.

    Args:
        runner: one that can roll back to any length and repeats a pass bit for bit.
        width: tokens of a block.
    """

    def __init__(self, runner: Slot, width: int = WIDTH) -> None:
        super().__init__(runner)
        self.width = self.fixed_width = width
        self.no_trees = "deterministic passes read chains"
        self.context = runner.context // width * width  # the last block must fit as well
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def engine(self) -> str:
        return f"{self.runner.engine}, blocks of {self.width}"

    def same_around(self, bare: Slot) -> Slot:
        return FixedWidthRunner(super().same_around(bare), self.width)

    def over(self, slots: int, width: int | None = None) -> Passes:
        return self.runner.over(slots, width or self.width)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """As in `Slot`; every pass costs a whole block, and tokens in several blocks cost a pass for each."""
        self._tokens.extend(tokens)
        begin, end = len(self._tokens) - len(tokens), len(self._tokens)
        if not keep:
            read, first = self.runner.length, end // self.width * self.width
            spans = (span for span in ((read, first), (max(read, first), end)) if span[0] < span[1])
            found = joined([self._kept(self._tokens[slice(*span)], 0, hidden) for span in spans])
            return Forward(found.logits, found.hidden, cut_states(found.states, slice(begin - read, None)))
        first = (end - keep) // self.width * self.width
        self.runner.rollback(first)
        read = self.runner.length
        parts = [self._kept(self._tokens[read:first], 0, hidden)] if read < first else []
        parts += [self._block(start, end, hidden) for start in range(first, end, self.width)]
        self.runner.rollback(end)
        found, kept = joined(parts), slice(end - keep - first, end - first)
        return Forward(
            found.logits[kept],
            None if found.hidden is None else found.hidden[kept],
            cut_states(found.states, slice(begin - read, end - read)),
        )

    def _block(self, start: int, end: int, hidden: bool) -> Forward:
        block = self._tokens[start : min(end, start + self.width)]
        return self._kept([*block, *[0] * (self.width - len(block))], self.width, hidden)

    def _kept(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        """A pass whose states the next one leaves alone."""
        found = self.runner.extend(tokens, keep=keep, hidden=hidden)
        return Forward(found.logits, found.hidden, kept_states(found.states))

    def rollback(self, length: int) -> None:
        del self._tokens[length:]
        self.runner.rollback(length)
