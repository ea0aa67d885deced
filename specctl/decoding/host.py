"""What is quicker done by numpy where tensors are in the processor's own memory.

Reading a token is a few dozen operations on a few kilobytes, and where a draft step takes 0.2 ms they count. Numpy
finds a maximum in a tenth of torch's time and starts an operation in a third of it. What is compiled or captured, and
what is on another device, is left to torch.
"""

from collections.abc import Set
from math import inf, isnan, log, nan

import numpy as np
import numpy.typing as npt
import torch
from torch.compiler import is_compiling

from specctl.models.running.runner import Forward
from specctl.policies import TOP_PROBS, Signal

TINY = torch.finfo(torch.float32).tiny
PART = 8192
"""The most numbers of a dot product at a time."""
HOTTEST = float(np.finfo(np.float32).max)
"""The highest temperature that a float32 can hold; any that is nearly as high draws from the uniform distribution."""
UNDERFLOW = np.float32(-200)
"""Logits so far below the largest have a probability of 0 in float32."""
CANDIDATES = (128, 1024, 1 << 31)
"""How many of the likeliest tokens are looked at, one number after the other, until top-p leaves some of them out;
instead of a large part all are sorted."""

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]


def on_host(tensor: torch.Tensor) -> bool:
    """Whether numpy can read a tensor where it is."""
    return tensor.is_cpu and not is_compiling()


def array(tensor: torch.Tensor) -> Floats:
    """A tensor on the host as a float32 array: of the same memory, if it is one already."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    found: Floats = (tensor if tensor.dtype == torch.float32 else tensor.float()).numpy()
    return found


def rows_of(forward: Forward) -> Floats | None:
    """The logits ``(R, V)`` of a pass as numpy's, if they are on the host."""
    if forward.rows is not None:
        return forward.rows
    return array(forward.logits) if on_host(forward.logits) else None


def argmax(values: torch.Tensor) -> torch.Tensor:  # (..., V) -> (...)
    """The index of each row's largest value, int64: the first of equal ones, or that of a NaN."""
    if values.dtype != torch.float32 or not on_host(values):
        return values.argmax(-1)
    return torch.from_numpy(np.asarray(array(values).argmax(-1)))


def best_of(forward: Forward) -> tuple[list[int], list[float]]:
    """The index of each row's largest logit, and its value: NaN where a row of ``(R, V)`` holds one."""
    if (rows := rows_of(forward)) is not None:
        indices = rows.argmax(-1).tolist()
        return indices, [float(row[index]) for row, index in zip(rows, indices, strict=True)]
    best = forward.logits.max(-1)
    choices, values = torch.stack([best.indices.double(), best.values.double()]).tolist()
    return [int(choice) for choice in choices], values


class Softmax:
    """The softmax of ``(V,)`` logits at temperature 1, and what signals need of it.

    It comes right after a model's pass, which has emptied the processor's caches: what counts is how few operations
    there are.

    Args:
        logits: ``(V,)``.

    Attributes:
        best: the index of the largest logit, or of the first NaN.
    """

    __slots__ = ("_below", "_weights", "_whole", "best")

    def __init__(self, logits: Floats) -> None:
        self.best = int(logits.argmax())
        top = float(logits[self.best])
        self._below = logits - np.float32(nan if top == inf else top)
        self._weights = np.exp(self._below)
        self._whole = float(self._weights.sum())

    def probs(self, temperature: float) -> Floats:
        """The distribution ``(V,)`` at a temperature above 0; NaN where a logit is NaN or infinite."""
        if temperature == 1:
            found: Floats = self._weights / np.float32(self._whole)
            return found
        found = np.exp(self._below / np.float32(min(temperature, HOTTEST)))
        found /= found.sum()
        return found

    def signals(self, token: int, wanted: Set[Signal]) -> list[float]:
        """Entropy in nats, top probability and the token's probability: those wanted, in the order of
        `DISTRIBUTION_SIGNALS`."""
        found: list[float] = []
        if "entropy" in wanted:
            found.append(log(self._whole) - self._mean())
        if "top_prob" in wanted:
            found.append(1 / self._whole)
        if "token_prob" in wanted:
            found.append(float(self._weights[token]) / self._whole)
        return found

    def tops(self) -> list[float]:
        """The `TOP_PROBS` largest probabilities, descending, in float32; 0 for those that V is too small for."""
        count = min(TOP_PROBS, len(self._weights))
        best = np.sort(np.partition(self._weights, -count)[-count:])[::-1] / np.float32(self._whole)
        return [*best.tolist(), *[0.0] * (TOP_PROBS - count)]

    def _mean(self) -> float:
        """Of the logits less the largest; those that were suppressed, at -inf, have no share."""
        total = _dot(self._weights, self._below)
        if isnan(total):
            total = _dot(self._weights, np.maximum(self._below, UNDERFLOW))
        return total / self._whole


def _dot(one: Floats, other: Floats) -> float:
    """The sum of products ``(V,)``, in parts short enough that numpy's BLAS does not start its threads for them."""
    if len(one) <= PART:
        return float(np.vdot(one, other))
    return sum(_dot(one[start : start + PART], other[start : start + PART]) for start in range(0, len(one), PART))


def picked(weights: Floats, uniform: float) -> int:
    """`sampling.pick` of one row ``(V,)``: the index at which its running sum passes a part of the whole."""
    running = weights.cumsum(dtype=np.float64)
    index = int(running.searchsorted(uniform * running[-1], side="right"))
    # A number just below 1 may round to the whole; behind the last weight nothing must be picked.
    return index if index < len(running) else min(int(running.searchsorted(running[-1])), index - 1)


def filtered(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor | None:
    """The softmax of the scores that the filters keep, without sorting more of them than it takes.

    Args:
        scores: ``(..., V)`` float32 on the host.
        top_k, top_p, min_p: as in `Sampling`, at least one of them in force.

    Returns:
        ``(..., V)`` float32; None where top-p's edge lies between equal scores, so that it depends on how they are
        sorted which of them stay.
    """
    rows = scores.reshape(-1, scores.shape[-1])
    probs = rows.softmax(-1)
    kept = array(probs)
    if 0 < top_k < rows.shape[1] or top_p < 1:
        least = _least(rows, probs, top_k, top_p)  # (R, 1)
        if least is None:
            return None
        kept = _normalised(kept * (array(rows) >= least))
    if min_p > 0:
        kept = _normalised(kept * (kept >= min_p * kept.max(-1, keepdims=True)))
    return torch.from_numpy(kept).reshape(scores.shape)


def _least(rows: torch.Tensor, probs: torch.Tensor, top_k: int, top_p: float) -> Floats | None:
    """The least score ``(R, 1)`` that top-k and top-p keep; None where it does not tell.

    Args:
        rows, probs: ``(R, V)``, scores and their softmax.
        top_k, top_p: as in `filtered`, one of them in force.
    """
    vocabulary = rows.shape[1]
    if 0 < top_k < vocabulary:
        falling = array(rows.topk(top_k + 1).values)  # (R, k + 1), from the likeliest down
        if top_p == 1:
            return falling[:, -2:-1]
        if (falling[:, -2] == falling[:, -1]).any():
            return None  # top-k keeps both, so that there are more to look at
        counts = _reaching(_normalised(np.exp(falling[:, :-1] - falling[:, :1])), top_p)
    else:
        for width in CANDIDATES:
            if width > vocabulary // 4:
                falling = -np.sort(-array(rows), axis=-1)
                counts = _reaching(_normalised(np.exp(falling - falling[:, :1])), top_p)
                break
            best = rows.topk(width)
            falling = array(best.values)
            counts = _reaching(array(probs.gather(-1, best.indices)), top_p)
            if counts.max() < width:
                break
    lines = np.arange(len(falling))
    least = falling[lines, counts - 1]
    more = counts < falling.shape[1]
    if (more & (least == falling[lines, np.minimum(counts, falling.shape[1] - 1)])).any():
        return None
    return least[:, None]


def _reaching(weights: Floats, top_p: float) -> Counts:
    """How many of the falling weights ``(R, C)`` of each row it takes to reach ``top_p``, at least one."""
    before = np.cumsum(weights, axis=-1, dtype=np.float64) - weights
    found: Counts = np.maximum((before < top_p).sum(-1), 1)
    return found


def _normalised(weights: Floats) -> Floats:
    weights /= weights.sum(-1, keepdims=True)
    return weights
