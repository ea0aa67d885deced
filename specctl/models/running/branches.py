"""Many continuations of one text, each from its own position, over a shared cache."""

from collections.abc import Callable, Sequence

import torch

from specctl.models.passes.forward import Forward
from specctl.models.running.slot import Slot

AT_ONCE = 64  # Branches in one forward pass: enough to fill it, with a mask that stays small

Choose = Callable[[Sequence[int], Forward], list[int]]
"""Called with the numbers of some branches and the pass over their last tokens, one row for each; returns their next
tokens."""


def continue_branches(
    runner: Slot,
    sequence: Sequence[int],
    starts: Sequence[int],
    first: Sequence[int],
    length: int,
    choose: Choose,
    *,
    hidden: bool = False,
) -> None:
    """For every start, continue ``sequence[:start]`` and a first token by ``length`` tokens.

    Args:
        runner: its cache holds any prefix of the sequence, before and afterwards.
        sequence: ids that the branches start from.
        starts: the number of its tokens that each of the B branches starts with, at least 1.
        first: each branch's first token.
        length: the number of tokens to pick for each branch, limited by the context. Tokens are picked for all branches
            while any of them has room.
        choose: picks the tokens.
        hidden: whether ``choose`` needs hidden states.
    """
    at_once = AT_ONCE if runner.holds_everything else 1
    for begin in range(0, len(starts), at_once):
        which = range(begin, min(len(starts), begin + at_once))
        some_starts, tokens = [starts[b] for b in which], [first[b] for b in which]
        runner.rollback(max(some_starts))
        if pending := sequence[runner.length : max(some_starts)]:
            runner.extend(pending, keep=0)
        # A branch that has filled the context continues with the others, but its further tokens are not to be used.
        for step in range(min(length, runner.context - min(some_starts))):
            if runner.holds_everything:
                forward = _extended(runner, tokens, some_starts, step, hidden)
            else:
                forward = runner.extend(tokens, keep=1, hidden=hidden)
            tokens = choose(which, forward)
        runner.rollback(max(some_starts))


def _extended(runner: Slot, tokens: Sequence[int], starts: Sequence[int], step: int, hidden: bool) -> Forward:
    """One more token of B branches, each of which sees the sequence up to its start and its own tokens.

    Args:
        runner: one that `holds_everything`.
        tokens: B ids, the next of each branch.
        starts: the number of the sequence's tokens that each branch starts with.
        step: the number of tokens that each branch already has.
        hidden: whether hidden states are wanted.
    """
    count, prefix = len(tokens), runner.length - step * len(tokens)
    columns = torch.arange(runner.length + count, device=runner.device)
    begins = torch.tensor(starts, device=runner.device)  # (B,)
    own = (columns - prefix) % count == torch.arange(count, device=runner.device)[:, None]  # (B, S)
    seen = torch.where(columns < prefix, columns < begins[:, None], own)
    positions = (begins + step).clamp_max(runner.context - 1)
    return runner.masked_pass(tokens, positions, seen, hidden=hidden)
