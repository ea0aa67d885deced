"""Whether passes of every width compute the same function, up to rounding: drafting changes how wide passes are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from specctl.models.running.slot import Slot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROUNDING = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}
"""The largest difference of a logit, as a share of the logits' standard deviation, that rounding explains.

Measured on the embedded target, plain and quantised by torchao, between widths of 1 to 96: 6e-6, 0.009 and 0.09; larger
models differ several times as much. Products whose inputs are rounded to 8 bits, in onnxruntime, gave 0.015 to 0.04 for
one row against several: in float32 that is far outside, in the others it is no more than what their rounding does.
"""
WIDTHS = 1, 2, 5, 8
BEFORE = 48


def apart(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of two tensors as a share of the second's standard deviation; infinite with a NaN."""
    mine, theirs = mine.float(), theirs.float()
    difference = torch.where(mine == theirs, 0.0, (mine - theirs).abs())  # some models mask logits with infinity
    if not difference.any():
        return 0.0  # perhaps without any spread
    numbers = theirs[theirs.isfinite()]
    found = float(difference.max() / numbers.std()) if len(numbers) > 1 else float("inf")
    return found if found == found else float("inf")


def widths_apart(runner: Slot, vocabulary: int) -> float:
    """The largest difference that the widths of passes make, as `apart` measures it.

    The same tokens are read in one wide pass, in passes of 1, 2, 5 and 8, and where the runner can as a tree with a
    branch before them, which moves them to other places of the cache.

    Args:
        runner: any; its cache is empty afterwards.
        vocabulary: V, ids are drawn from below it.
    """
    sweep = [*WIDTHS, *WIDTHS[::-1]]
    before = min(BEFORE, runner.context - sum(sweep))
    if before < 1:
        sweep, before = list(WIDTHS[: max(runner.context - 1, 0)]), 1
    draws = torch.Generator().manual_seed(12)
    text: list[int] = torch.randint(0, vocabulary, (before + sum(sweep),), generator=draws).tolist()
    with torch.inference_mode():
        runner.rollback(0)
        wide = torch.as_tensor(runner.extend(text, sum(sweep)).logits).clone()
        found = [_swept(runner, text, before, sweep)]
        if runner.no_trees is None:
            found.append(_grown(runner, text, before, sweep))
        runner.rollback(0)
    return max(apart(rows, wide) for rows in found)


def _swept(runner: Slot, text: Sequence[int], start: int, widths: Sequence[int]) -> torch.Tensor:
    """The logits of a text from ``start`` on, read in passes of these widths."""
    _back_to(runner, text, start)
    rows = []
    for width in widths:
        rows.append(torch.as_tensor(runner.extend(text[start : start + width], width).logits).clone())
        start += width
    return torch.cat(rows)


def _grown(runner: Slot, text: Sequence[int], start: int, widths: Sequence[int]) -> torch.Tensor:
    """The same as one branch of a tree, which passes of these widths grow; a token of another stands before it."""
    _back_to(runner, text, start)
    rows = []
    tokens, parents = [text[start], text[0], *text[start + 1 : start + sum(widths)]], [0, 0, *range(2, sum(widths))]
    read = 0
    for width in [1 + widths[0] + widths[1], *widths[2:]]:  # a tree's first pass has its root and more
        part, above = tokens[read : read + width], parents[max(read - 1, 0) : read + width - 1]
        rows.append(torch.as_tensor(runner.extend_tree(part, above, before=read).logits).clone())
        read += width
    runner.rollback(start)
    found = torch.cat(rows)
    return torch.cat([found[:1], found[2:]])


def _back_to(runner: Slot, text: Sequence[int], start: int) -> None:
    runner.rollback(start)
    if runner.length < start:  # a recurrent state goes back further
        runner.extend(text[runner.length : start], 0)


def width_fault(model: "PreTrainedModel", vocabulary: int) -> str | None:
    """Why drafting would change the text of a model whose weights are quantised; None where it would not.

    What such weights compute may depend on the width of a pass, by more than other products do.

    Args:
        model: one that torch runs.
        vocabulary: the pair's shared vocabulary.
    """
    from specctl.models.running.engines import eager

    found, most = widths_apart(eager(model, vocabulary), vocabulary), ROUNDING.get(model.dtype, 1e-3)
    if found <= most:
        return None
    return (
        "its quantised weights compute something else in passes over one token than over several (logits differ by "
        f"{found:.2g} of their spread, and rounding explains {most:g})"
    )
