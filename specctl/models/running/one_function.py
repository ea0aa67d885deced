"""Checks that a model computes one function of a text, no matter how passes divide it: drafting and batching change
that.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel

from specctl.errors import out_of_memory
from specctl.models.passes.forward import Forward
from specctl.models.passes.recurrent_state import reads_prompts_whole
from specctl.models.passes.rotation import rotation_of
from specctl.models.passes.weights import device_of
from specctl.models.running.engines import eager
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from specctl.models.running.static import obstacle

ROUNDING = {torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}
"""The largest difference of a logit, as a share of the logits' standard deviation, that rounding explains.

Measured on the embedded target, plain and quantised by torchao, between widths of 1 to 96: 6e-6, 0.009 and 0.09; larger
models differ several times as much. Products whose inputs are rounded to 8 bits, in onnxruntime, gave 0.015 to 0.04 for
one row against several: in float32 that is far outside, in the others it is no more than what their rounding does.
"""
LOW = torch.float16, torch.bfloat16
"""In these dtypes a large model's own rounding may exceed `ROUNDING`."""
WIDTHS = 1, 2, 5, 8
BEFORE = 48


def apart(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of two tensors as a share of the second one's standard deviation; infinite with a NaN."""
    mine, theirs = mine.float(), theirs.float()
    difference = torch.where(mine == theirs, 0.0, (mine - theirs).abs())  # some models mask logits with infinity
    if not difference.any():
        return 0.0  # there may be no spread
    numbers = theirs[theirs.isfinite()]
    found = float(difference.max() / numbers.std()) if len(numbers) > 1 else float("inf")
    return found if found == found else float("inf")


def widths_apart(runner: Slot, vocabulary: int) -> float:
    """The largest difference between passes of different widths, as `apart` measures it.

    The same tokens are read in one wide pass, in passes of 1, 2, 5 and 8, and, if the runner can, in a tree after
    another branch, which moves them to other cache slots.

    Args:
        runner: any; its cache is empty afterwards.
        vocabulary: V, ids are drawn from below it.
    """
    text, sweep = _width_text(runner.context, vocabulary)
    before = len(text) - sum(sweep)
    with torch.inference_mode():
        runner.rollback(0)
        wide = torch.as_tensor(runner.extend(text, sum(sweep)).logits).clone()
        found = [_swept(runner, text, before, sweep)]
        if runner.no_trees is None:
            found.append(_grown(runner, text, before, sweep))
        runner.rollback(0)
    return max(apart(rows, wide) for rows in found)


def _width_text(context: int, vocabulary: int) -> tuple[list[int], list[int]]:
    """Ids of a text that fits a context, and the widths of passes over its end."""
    sweep = [*WIDTHS, *WIDTHS[::-1]]
    before = min(BEFORE, context - sum(sweep))
    if before < 1:
        sweep, before = list(WIDTHS[: max(context - 1, 0)]), 1
    draws = torch.Generator().manual_seed(12)
    return torch.randint(0, vocabulary, (before + sum(sweep),), generator=draws).tolist(), sweep


def _swept(runner: Slot, text: Sequence[int], start: int, widths: Sequence[int]) -> torch.Tensor:
    """The logits of a text from ``start`` on, from passes of these widths."""
    _back_to(runner, text, start)
    rows = []
    for width in widths:
        rows.append(torch.as_tensor(runner.extend(text[start : start + width], width).logits).clone())
        start += width
    return torch.cat(rows)


def _grown(runner: Slot, text: Sequence[int], start: int, widths: Sequence[int]) -> torch.Tensor:
    """The same for one branch of a tree, grown by passes of these widths; another branch's token comes before it."""
    _back_to(runner, text, start)
    rows = []
    tokens, parents = [text[start], text[0], *text[start + 1 : start + sum(widths)]], [0, 0, *range(2, sum(widths))]
    read = 0
    for width in [1 + widths[0] + widths[1], *widths[2:]]:  # a tree's first pass includes its root
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
    """Why drafting would change the text of a model with quantised weights; None if it would not.

    Results with such weights may depend on the width of a pass by more than ordinary rounding.

    Args:
        model: one that torch runs.
        vocabulary: the pair's shared vocabulary.
    """
    runner, most = eager(model, vocabulary), ROUNDING.get(model.dtype, 1e-3)
    found = widths_apart(runner, vocabulary)
    if found > most and model.dtype in LOW:
        most = max(most, _own_rounding(model, vocabulary, *_width_text(runner.context, vocabulary)))
    if found <= most:
        return None
    return (
        "its quantised weights compute something else in passes over one token than over several (logits differ by "
        f"{found:.2g} of their spread, and rounding explains {most:.2g})"
    )


def _own_rounding(model: "PreTrainedModel", vocabulary: int, text: Sequence[int], sweep: Sequence[int]) -> float:
    """How far `jittered` takes the logits after a text's last tokens, as `apart` measures it.

    On SmolLM2 135M, passes of different widths differed by 0.24 (float16), 0.35 (bfloat16) and 0.46 (bfloat16 with
    8-bit weights) of that.
    """
    with torch.inference_mode():
        whole = _whole(model, vocabulary, text)
        with jittered(model):
            moved = _whole(model, vocabulary, text)
    return apart(moved[-sum(sweep) :], whole[-sum(sweep) :])


PROMPT, LENGTH = 6, 16
"""Tokens of the text's first pass over a cache, and of the whole text: more than no real model's window, and few enough
that the check is fast.
"""
# The number of different ids in the text: some models break ties between equal tokens by the other tokens of a pass.
DIFFERENT = 4
FACTOR = {torch.float32: 32.0, torch.float64: 32.0}
LOW_FACTOR = 2.0
"""How many times further than `jittered` logits those of other passes may be off, by dtype, else the second.

Measured on tiny models of all families of transformers 5.24 and on SmolLM2 135M: where they were right it was 0.3 to 3
times in float32 and up to 0.48 times in bfloat16 and float16, whose jitter is coarser than their rounding; where they
were wrong it was from 100,000 times on in float32, and from 2.3 and 18 times on in bfloat16 and float16.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of a check."""

    apart: float = 0.0  # error of the logits of passes over a cache, as a share of the logits' standard deviation
    most: float = 0.0  # the largest error that rounding explains
    failure: str | None = None  # the error that such passes raised; None without one

    @property
    def wrong(self) -> bool:
        return self.failure is not None or not self.apart <= self.most

    def told(self, over: str = "a cache") -> str:
        """What is wrong and in which passes, as the end of a sentence."""
        if self.failure is not None:
            return f"its passes over {over} fail ({self.failure})"
        return (
            f"its logits differ by {self.apart:.1%} of their spread between one pass over a text and passes of 1 and 5 "
            f"tokens over {over}, of which rounding explains {100 * self.most:.2g}%"
        )


def over_cache(model: PreTrainedModel, vocabulary: int, other: Slot | None = None) -> Reading:
    """Compare one pass over a text with passes of 1 and of 5 tokens over a cache, with rollbacks between some of them.

    A model that limits its time step in wide passes only (Mamba 2) is compared with the passes of ``generate``: the
    prompt in one pass, and the rest token by token.

    Args:
        model: in eval mode.
        vocabulary: V, ids are drawn from below it.
        other: reads the text instead of the model itself, which one process of several cannot call.

    Raises:
        torch.OutOfMemoryError: and other errors of a device that is out of memory.
    """
    text, wrong = _texts(model, vocabulary)
    try:
        with torch.inference_mode():
            runner = other or eager(model, vocabulary)
            runner.begin(LENGTH)  # rotations follow the whole text's length, as in one pass
            expected, whole = _expected(model, vocabulary, text, other)
            parts = [row_errors(rows, expected[places]) for places, rows in _read(runner, text, wrong)]
            runner.rollback(0)
            most = _explained(model, vocabulary, text, whole, other)
    except Exception as error:
        if out_of_memory(error):
            raise
        return Reading(failure=_brief(error))
    return Reading(max(_middle(part) for part in parts), most)


def over_rows(model: PreTrainedModel, vocabulary: int, most: float) -> Reading | None:
    """Compare one pass over a text with passes over two texts and fixed buffers; None if the model cannot run those.

    Args:
        model, vocabulary: see `over_cache`, which must have found nothing wrong.
        most: the error that rounding explains, from `over_cache`.

    Raises:
        torch.OutOfMemoryError: and other errors of a device that is out of memory.
    """
    if obstacle(model) is not None:
        return None
    text, other = _texts(model, vocabulary)
    try:
        with torch.inference_mode():
            expected = _whole(model, vocabulary, text)
            passes = eager(model, vocabulary).over(2)
            rotation = rotation_of(model)
            by = 0 if rotation is None else rotation.regime(LENGTH)
            first = Request(0, 0, text[:PROMPT], 1, rotated_as=by)
            passes.run([first, Request(1, 0, other[:2], 1, rotated_as=by)])
            rows = []
            for start, width in ((PROMPT, 1), (PROMPT + 1, 5)):
                part = text[start : start + width]
                asked = [
                    Request(1, 2, other[2:4], 1, rotated_as=by),
                    Request(0, start, part, width, rotated_as=by),
                ]
                rows.append(_rows(passes.run(asked)[1]))
            return Reading(_middle(row_errors(torch.cat(rows), expected[PROMPT : PROMPT + 6])), most)
    except Exception as error:
        if out_of_memory(error):
            raise
        return Reading(failure=_brief(error))


def _texts(model: PreTrainedModel, vocabulary: int) -> tuple[list[int], list[int]]:
    """Ids of a text, and other ids; none that a configuration gives a meaning."""
    draws = torch.Generator().manual_seed(12)
    told = [model.config.to_dict(), model.config.get_text_config(decoder=True).to_dict()]
    special = {value for one in told for name, value in one.items() if isinstance(value, int) and "token" in name}
    # Padding, control and picture ids are the first and the last ones.
    usual = [*range(vocabulary // 4, vocabulary - vocabulary // 4)]
    some = [usual[place] for place in torch.randperm(len(usual), generator=draws)[: 4 * DIFFERENT].tolist()]
    some = [token for token in some if token not in special][:DIFFERENT] or [0]
    chosen = torch.randint(0, len(some), (2, LENGTH), generator=draws).tolist()
    text, other = ([some[place] for place in one] for one in chosen)
    return text, other


def _expected(
    model: PreTrainedModel, vocabulary: int, text: Sequence[int], other: Slot | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference logits ``(LENGTH, V)`` after each token of a text, and those of one pass."""
    if other is not None:
        other.begin(LENGTH)
        other.rollback(0)
        found = _rows(other.extend(text, len(text)))
        return found, found
    whole = _whole(model, vocabulary, text)
    if not reads_prompts_whole(model):
        return whole, whole
    runner = eager(model, vocabulary)
    runner.begin(LENGTH)
    parts = [_whole(model, vocabulary, text[:PROMPT])]
    runner.extend(text[:PROMPT], 1)
    parts += [_rows(runner.extend([token], 1)) for token in text[PROMPT:]]
    return torch.cat(parts), whole


def _whole(model: PreTrainedModel, vocabulary: int, text: Sequence[int]) -> torch.Tensor:
    """The logits ``(T, V)`` of a pass without a cache and a mask, with the positions of ``generate``."""
    ids = torch.tensor([list(text)], device=device_of(model))
    known, given = signature(model.forward).parameters, dict[str, Any]()
    if "position_ids" in known:
        given["position_ids"] = torch.arange(len(text), device=ids.device)[None]
    if "use_cache" in known:
        given["use_cache"] = False
    logits: torch.Tensor = model(input_ids=ids, **given).logits
    return logits[0, :, :vocabulary].float().clone()


def _read(runner: Slot, text: Sequence[int], wrong: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Read a text over a cache, first directly and then with rollbacks of other tokens: positions, and the logits
    there.
    """
    runner.rollback(0)
    rows = [_rows(runner.extend(text[:PROMPT], 1))]
    rows += [_rows(runner.extend([token], 1)) for token in text[PROMPT : PROMPT + 2]]
    start = PROMPT + 2
    rows.append(_rows(runner.extend([*text[start : start + 3], *wrong[:2]], 5))[:3])
    yield [*range(PROMPT - 1, start + 3)], torch.cat(rows)
    start += 3
    rows = [_after(runner, text, start, 5)]
    rows += [_after(runner, text, start + 2, 1), _rows(runner.extend(text[start + 3 : start + 5], 2))]
    yield [*range(start, start + 5), *range(start + 2, start + 5)], torch.cat(rows)


def _after(runner: Slot, text: Sequence[int], start: int, width: int) -> torch.Tensor:
    """The logits of ``width`` tokens from ``start`` on, after other tokens there were rolled back."""
    runner.rollback(start)
    return _rows(runner.extend(text[runner.length : start + width], width))


def _explained(
    model: PreTrainedModel, vocabulary: int, text: Sequence[int], whole: torch.Tensor, other: Slot | None
) -> float:
    """The logits' error that rounding alone explains."""
    own = ROUNDING.get(model.dtype, ROUNDING[torch.float32])
    if other is not None:
        return own
    with jittered(model):
        jitter = _middle(row_errors(_whole(model, vocabulary, text), whole))
    found = FACTOR.get(model.dtype, LOW_FACTOR) * max(jitter, torch.finfo(model.dtype).eps)
    return max(found, own) if getattr(model, "quantization_method", None) is not None else found


@contextmanager
def jittered(model: torch.nn.Module) -> Iterator[None]:
    """Move every output number of a model's innermost modules by one unit in the last place, up or down at random.

    The change of the logits shows how much rounding alone may change them in this model and dtype.
    """
    draws = torch.Generator().manual_seed(5)

    def moved(_: torch.nn.Module, __: Any, found: Any) -> Any:
        if not isinstance(found, torch.Tensor) or not found.is_floating_point():
            return found
        signs = torch.randint(0, 2, found.shape, generator=draws).to(found.device) * 2 - 1
        return (found.float() * (1 + torch.finfo(found.dtype).eps * signs)).to(found.dtype)

    handles = [part.register_forward_hook(moved) for part in model.modules() if next(part.children(), None) is None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rows(forward: Forward) -> torch.Tensor:
    """A copy of a pass's logits, which the next pass may overwrite."""
    return torch.as_tensor(forward.columns).float().clone()


def row_errors(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:  # (R, V), (R, V) -> (R,)
    """The root mean square error of each row of logits, as a share of the row's spread; infinite with a NaN."""
    finite = theirs.isfinite()  # some models mask logits with infinity
    off = torch.where(mine == theirs, 0.0, (mine - theirs).abs()).nan_to_num(torch.inf)
    none = theirs.new_zeros(())
    spreads = torch.stack(
        [row[some].std() if some.sum() > 1 else none for row, some in zip(theirs, finite, strict=True)]
    )
    return (off.square().mean(-1).sqrt() / spreads.clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num(torch.inf)


def _middle(errors: torch.Tensor) -> float:
    """The error of the median row: a few rows are far off where rounding has sent a token to other experts."""
    return float(errors.median())


def _brief(error: Exception) -> str:
    told: Iterable[str] = str(error).split()
    return f"{type(error).__name__}: {' '.join(told)}"[:200].rstrip(".: ")
