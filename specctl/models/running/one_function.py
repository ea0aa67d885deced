"""Whether a model computes one function of a text, whatever passes read it in: drafting and batching change the passes.

No list of families is needed: a short text is read in one pass without a cache, as transformers reads a prompt, and in
the short passes over a cache that decoding is made of.
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
from specctl.models.passes.rotation import rotation_of
from specctl.models.passes.stepping import reads_prompts_whole
from specctl.models.passes.weights import device_of
from specctl.models.running.engines import eager
from specctl.models.running.passes import Request
from specctl.models.running.rounding import ROUNDING
from specctl.models.running.slot import Slot
from specctl.models.running.static import obstacle

PROMPT, LENGTH = 6, 16
"""Tokens of the text's first pass over a cache, and of the whole text: more than the windows of no real model, few
enough that the check takes about as long as three words do."""
DIFFERENT = 4
"""How many ids the text has: some models break a tie between equal tokens by how many others a pass reads."""
FACTOR = {torch.float32: 32.0, torch.float64: 32.0}
LOW_FACTOR = 2.0
"""How many times further than `jittered` logits those of other passes may be off, by dtype, else the second.

Measured on tiny models of all families of transformers 5.24 and on SmolLM2 135M: where they were right it was 0.3 to 3
times in float32 and up to 0.48 times in bfloat16 and float16, whose jitter is coarser than their rounding; where they
were wrong it was from 100,000 times on in float32, and from 2.3 and 18 times on in bfloat16 and float16.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a check has found.

    Attributes:
        apart: how far logits of passes over a cache are off, as a share of the logits' standard deviation.
        most: how far rounding explains.
        failure: the error in which such passes ended; None where they did not.
    """

    apart: float = 0.0
    most: float = 0.0
    failure: str | None = None

    @property
    def wrong(self) -> bool:
        return self.failure is not None or not self.apart <= self.most

    def told(self, over: str = "a cache") -> str:
        """What is wrong, as the end of a sentence, with what the passes were over."""
        if self.failure is not None:
            return f"its passes over {over} fail ({self.failure})"
        return (
            f"its logits differ by {self.apart:.1%} of their spread between one pass over a text and passes of 1 and 5 "
            f"tokens over {over}, of which rounding explains {100 * self.most:.2g}%"
        )


def over_cache(model: PreTrainedModel, vocabulary: int, other: Slot | None = None) -> Reading:
    """Compare one pass over a text with passes of 1 and of 5 tokens over a cache, some of them taken back.

    A model that limits its time step in wide passes only (Mamba 2) is compared with what ``generate`` makes of it: the
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
            runner.begin(LENGTH)  # rotations go by the whole text, as in one pass
            expected, whole = _expected(model, vocabulary, text, other)
            parts = [_errors(rows, expected[places]) for places, rows in _read(runner, text, wrong)]
            runner.rollback(0)
            most = _explained(model, vocabulary, text, whole, other)
    except Exception as error:
        if out_of_memory(error):
            raise
        return Reading(failure=_brief(error))
    return Reading(max(_middle(part) for part in parts), most)


def over_rows(model: PreTrainedModel, vocabulary: int, most: float) -> Reading | None:
    """Compare one pass over a text with passes over two texts and fixed buffers; None where none are possible.

    Args:
        model, vocabulary: as in `over_cache`, which has found nothing wrong.
        most: how far rounding explains, as that has found.

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
            return Reading(_middle(_errors(torch.cat(rows), expected[PROMPT : PROMPT + 6])), most)
    except Exception as error:
        if out_of_memory(error):
            raise
        return Reading(failure=_brief(error))


def _texts(model: PreTrainedModel, vocabulary: int) -> tuple[list[int], list[int]]:
    """Ids of a text, and others: none of those that a configuration gives a meaning."""
    draws = torch.Generator().manual_seed(12)
    told = [model.config.to_dict(), model.config.get_text_config(decoder=True).to_dict()]
    special = {value for one in told for name, value in one.items() if isinstance(value, int) and "token" in name}
    # Padding, controls and pictures have the first ids and the last.
    usual = [*range(vocabulary // 4, vocabulary - vocabulary // 4)]
    some = [usual[place] for place in torch.randperm(len(usual), generator=draws)[: 4 * DIFFERENT].tolist()]
    some = [token for token in some if token not in special][:DIFFERENT] or [0]
    chosen = torch.randint(0, len(some), (2, LENGTH), generator=draws).tolist()
    text, other = ([some[place] for place in one] for one in chosen)
    return text, other


def _expected(
    model: PreTrainedModel, vocabulary: int, text: Sequence[int], other: Slot | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits ``(LENGTH, V)`` behind each token of a text with which others are compared, and those of one pass."""
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
    """The logits ``(T, V)`` of a pass without a cache and a mask, with the positions that ``generate`` gives."""
    ids = torch.tensor([list(text)], device=device_of(model))
    known, given = signature(model.forward).parameters, dict[str, Any]()
    if "position_ids" in known:
        given["position_ids"] = torch.arange(len(text), device=ids.device)[None]
    if "use_cache" in known:
        given["use_cache"] = False
    logits: torch.Tensor = model(input_ids=ids, **given).logits
    return logits[0, :, :vocabulary].float().clone()


def _read(runner: Slot, text: Sequence[int], wrong: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Read a text over a cache, first as it is and then with other tokens taken back: places, and logits there."""
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
    """The logits of ``width`` tokens from ``start`` on, behind which the cache held others."""
    runner.rollback(start)
    return _rows(runner.extend(text[runner.length : start + width], width))


def _explained(
    model: PreTrainedModel, vocabulary: int, text: Sequence[int], whole: torch.Tensor, other: Slot | None
) -> float:
    """How far logits may be off for rounding alone."""
    own = ROUNDING.get(model.dtype, ROUNDING[torch.float32])
    if other is not None:
        return own
    with jittered(model):
        jitter = _middle(_errors(_whole(model, vocabulary, text), whole))
    found = FACTOR.get(model.dtype, LOW_FACTOR) * max(jitter, torch.finfo(model.dtype).eps)
    return max(found, own) if getattr(model, "quantization_method", None) is not None else found


@contextmanager
def jittered(model: torch.nn.Module) -> Iterator[None]:
    """Move every number that a module without others in it gives by one unit in its last place, up or down by chance.

    What that does to the logits tells how far rounding alone may move them in this model and this dtype.
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
    """The logits of a pass, which the next may overwrite."""
    return torch.as_tensor(forward.columns).float().clone()


def _errors(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:  # (R, V), (R, V) -> (R,)
    """How far rows of logits are off as a share of their spread, as a root mean square; infinite with a NaN."""
    finite = theirs.isfinite()  # some models mask logits with infinity
    off = torch.where(mine == theirs, 0.0, (mine - theirs).abs()).nan_to_num(torch.inf)
    spreads = torch.stack([row[some].std() for row, some in zip(theirs, finite, strict=True)])
    return (off.square().mean(-1).sqrt() / spreads.clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num(torch.inf)


def _middle(errors: torch.Tensor) -> float:
    """That of the median row: a few are far off where rounding has sent a token to other experts."""
    return float(errors.median())


def _brief(error: Exception) -> str:
    told: Iterable[str] = str(error).split()
    return f"{type(error).__name__}: {' '.join(told)}"[:200].rstrip(".: ")
