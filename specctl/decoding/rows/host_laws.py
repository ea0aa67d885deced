"""Distributions of rows on the host, by numpy: `device_laws` has the same by torch.

Reading a token is a few dozen operations on a few kilobytes, and where a draft step takes 0.2 ms they count. Numpy
finds a maximum in a tenth of torch's time and starts an operation in a third of it.
"""

from collections.abc import Sequence, Set
from functools import cache
from math import exp, inf, isfinite, isnan, log, nan
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specctl.decoding.beams import IMPOSSIBLE
from specctl.policies import TOP_PROBS, Signal

if TYPE_CHECKING:
    from specctl.decoding.sampling import Sampling

TINY = float(np.finfo(np.float32).tiny)
PART = 8192
"""The most numbers of a dot product at a time."""
HOTTEST = float(np.finfo(np.float32).max)
"""The highest temperature that a float32 can hold; any that is nearly as high draws from the uniform distribution."""
UNDERFLOW = np.float32(-200)
"""Logits so far below the largest have a probability of 0 in float32."""
SHARES = (32.0, 0.5)
"""The least weights that are looked at for top-p, in V-th parts of what it leaves out: first large ones alone, which
are few; the second is less than 1, for rounding."""
MOST_BY_ENTROPY = 100
"""Of so many of the likeliest tokens top-h takes the entropy, as transformers' own does; it keeps no others."""
BLOCK = 64
"""Of so many numbers the maximum is taken at once in the search for the largest of all."""

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


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
        top = logits.item(self.best)  # a float32, whatever Python keeps it in
        self._below = logits - (nan if top == inf else top)
        self._weights = np.exp(self._below)
        self._whole = _sum(self._weights)

    def probs(self, temperature: float) -> Floats:
        """The distribution ``(V,)`` at a temperature above 0; NaN where a logit is NaN or infinite."""
        if temperature == 1:
            found: Floats = self._weights / np.float32(self._whole)
            return found
        found = np.exp(self._below / np.float32(min(temperature, HOTTEST)))
        found /= np.float32(_sum(found))
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

    def logs(self, tokens: Sequence[int]) -> list[float]:
        """The log-probabilities of tokens: 0 at most, and `IMPOSSIBLE` at least, which stands for NaN too."""
        whole = log(self._whole)
        found = (float(self._below[token]) - whole for token in tokens)
        return [min(max(value, IMPOSSIBLE), 0.0) if value == value else IMPOSSIBLE for value in found]

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


class Softmaxes:
    """The `Softmax` of each of some rows ``(R, V)``, whose numbers are those of each alone.

    Attributes:
        best: of each row.
    """

    __slots__ = ("_below", "_weights", "_wholes", "best")

    def __init__(self, rows: Floats) -> None:
        best = rows.argmax(-1)
        tops = rows[np.arange(len(rows)), best]
        self.best: list[int] = best.tolist()
        self._below = rows - np.where(tops == np.float32(inf), np.float32(nan), tops)[:, None]
        self._weights = np.exp(self._below)
        self._wholes = [_sum(row) for row in self._weights]

    def probs(self, temperature: float) -> Floats:  # (R, V)
        """`Softmax.probs` of each row."""
        if temperature == 1:
            wholes: Floats = np.array(self._wholes, dtype=np.float32)
            found: Floats = np.divide(self._weights, wholes[:, None])
            return found
        return _shared_out(np.exp(self._below / np.float32(min(temperature, HOTTEST))))

    def row(self, number: int) -> Softmax:
        """That of one row."""
        found = Softmax.__new__(Softmax)
        found.best = self.best[number]
        found._below, found._weights = self._below[number], self._weights[number]
        found._whole = self._wholes[number]
        return found


def _sum(numbers: Floats) -> float:
    """The sum ``(V,)`` as a product with ones, which takes a third of the time, and whose code `_mean` runs too."""
    return _dot(numbers, _ones(len(numbers)))


@cache
def _ones(count: int) -> Floats:
    return np.ones(count, dtype=np.float32)


def _dot(one: Floats, other: Floats) -> float:
    """The sum of products ``(V,)``, in parts short enough that numpy's BLAS does not start its threads for them."""
    if len(one) <= PART:
        return float(np.vdot(one, other))
    return sum(_dot(one[start : start + PART], other[start : start + PART]) for start in range(0, len(one), PART))


def processed(rows: Floats, sampling: "Sampling") -> Floats:  # (R, V) -> (R, V)
    """The processed distributions in float32; one-hot at the argmax when greedy, NaN where a logit is NaN or infinite.

    Without filters they are those of `Softmax.probs`, to the last bit.
    """
    if sampling.greedy:
        found = np.zeros(rows.shape, dtype=np.float32)
        found[np.arange(len(rows)), rows.argmax(-1)] = 1
        return found
    scores = _below(rows)
    if sampling.temperature != 1:
        with np.errstate(over="ignore"):
            scores /= np.float32(min(sampling.temperature, HOTTEST))
    if not sampling.filters:
        return _shared_out(np.exp(scores, out=scores))
    if sampling.top_h > 0:
        out = np.array([_beyond_entropy(row, sampling.top_h) for row in scores])
        scores, rows = (np.where(out, np.float32(-inf), numbers) for numbers in (scores, rows))
    weights = np.exp(scores)
    if sampling.temperature == 1:
        scores = rows  # where numbers that hardly differ are not rounded to equal ones
    if 0 < sampling.top_k < rows.shape[1] or sampling.top_p < 1:
        for row, own in enumerate(weights):
            kept = _kept(scores[row], own, sampling.top_k, sampling.top_p)
            if kept is None:
                own[:] = np.exp(_below(_sorted_out(scores[row : row + 1], sampling)))[0]
            else:
                own *= kept
    if sampling.min_p > 0:
        weights *= weights >= np.float32(sampling.min_p)  # of the largest, which is 1
    laws = _normalised(weights)
    if sampling.shapes:
        for law in laws:
            _shape(law, sampling)
    return laws


def _beyond_entropy(scores: Floats, top_h: float) -> Mask:
    """The tokens ``(V,)`` that top-h leaves out; of equal ones the first comes first."""
    falling = likeliest(scores, MOST_BY_ENTROPY)
    parts = np.add.accumulate(_information(_softmax(scores[None, falling])[0]))
    out = np.ones(len(scores), dtype=np.bool_)
    out[falling] = parts > top_h * parts[-1]
    out[falling[0]] = False  # the likeliest always stays
    return out


def _shape(law: Floats, sampling: "Sampling") -> None:
    """Apply to a distribution ``(V,)``, in its own memory, the filters that look at what the others have left."""
    if sampling.typical_p < 1:
        with np.errstate(divide="ignore"):
            off = np.abs(-np.log(law.astype(np.float64)) - np.add.reduce(_information(law))).astype(np.float32)
        order = off.argsort(kind="stable")
        before = np.add.accumulate(law[order], dtype=np.float64)
        last = min(int(np.count_nonzero(before < sampling.typical_p)), len(law) - 1)
        _leave_out(law, off > off[order[last]])
    if sampling.epsilon_cutoff > 0:
        _leave_out(law, (law < np.float32(sampling.epsilon_cutoff)) & (law < law.max()))
    if sampling.eta_cutoff > 0:
        entropy = float(np.add.reduce(_information(law)))
        least = min(sampling.eta_cutoff, sampling.eta_cutoff**0.5 * exp(-entropy))
        _leave_out(law, (law < np.float32(least)) & (law < law.max()))


def _information(law: Floats) -> npt.NDArray[np.float64]:
    """The terms of the entropy in nats."""
    exact = law.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(exact == 0, 0.0, -exact * np.log(exact))


def _leave_out(law: Floats, out: Mask) -> None:
    law[out] = 0
    law /= np.add.reduce(law)


def likeliest(row: Floats, count: int) -> Counts:
    """The indices of the ``count`` largest numbers of a row ``(V,)``, falling; of equal ones the first comes first."""
    if count >= len(row):
        return (-row).argsort(kind="stable")[:count]
    blocks = len(row) // BLOCK
    # As many blocks have a number at least as large as the last of the largest maxima.
    maxima = row[: blocks * BLOCK].reshape(blocks, BLOCK).max(-1) if blocks > 4 * count else row
    found = np.flatnonzero(row >= np.partition(maxima, -count)[-count])
    if len(found) < count:  # there is a NaN
        return (-row).argsort(kind="stable")[:count]
    return found[(-row[found]).argsort(kind="stable")[:count]]


def _sorted_out(scores: Floats, sampling: "Sampling") -> Floats:
    """The scores with -inf for those that top-k and top-p leave out, all of them sorted."""
    vocabulary = scores.shape[1]
    if 0 < sampling.top_k < vocabulary:
        edge = np.partition(scores, vocabulary - sampling.top_k, axis=-1)[:, vocabulary - sampling.top_k, None]
        scores = np.where(scores < edge, np.float32(-inf), scores)
    if sampling.top_p == 1:
        return scores
    order = scores.argsort(axis=-1, kind="stable")
    ascending = np.take_along_axis(scores, order, axis=-1)
    tail = _softmax(ascending).cumsum(-1, dtype=np.float64) <= 1 - sampling.top_p
    tail[:, -1] = False  # the most probable token always stays
    dropped = np.empty_like(tail)
    np.put_along_axis(dropped, order, tail, axis=-1)
    return np.where(dropped, np.float32(-inf), scores)


def _kept(scores: Floats, weights: Floats, top_k: int, top_p: float) -> Mask | None:
    """Which tokens of a row ``(V,)`` top-k and top-p keep.

    None where top-p's edge lies between equal ones, so that it depends on how they are sorted which of them stay.

    Args:
        scores: logits, or what temperature has made of them.
        weights: the softmax of these but for a factor; NaN in a row without a distribution, and then all are.
        top_k, top_p: as in `Sampling`, one of them in force.
    """
    if isnan(weights.item(0)):
        return np.zeros(len(weights), dtype=np.bool_)
    if 0 < top_k < len(scores):
        numbers, falling = scores, scores[likeliest(scores, top_k + 1)]
        if top_p == 1:
            return np.asarray(scores >= falling[top_k - 1])
        if falling[top_k - 1] == falling[top_k] > -inf:
            return None  # top-k keeps both, so that there are more to look at
        falling = falling[:top_k]
        ahead = np.exp(falling - falling[0])
        part = top_p * float(np.add.reduce(ahead))
    else:
        whole = float(np.add.reduce(weights))
        part = top_p * whole
        numbers, falling = weights, _falling(weights, part, whole - part)
        ahead = falling
    before = np.add.accumulate(ahead, dtype=np.float64)
    before -= ahead
    count = max(1, int(before.searchsorted(part)))
    if count < len(falling) and falling[count] == falling[count - 1]:
        return None
    return np.asarray(numbers >= falling[count - 1])


def _falling(weights: Floats, part: float, rest: float) -> Floats:
    """The largest weights of a row ``(V,)``, falling, as many as have ``part`` together or some more.

    What weighs less than a V-th part of the ``rest`` is not needed for that, since all of it together is less than the
    rest.
    """
    for share in SHARES:
        most = weights[weights >= np.float32(share * rest / len(weights))]
        if share < 1 or float(np.add.reduce(most)) > part:
            break
    most.sort()
    return most[::-1]


def _below(rows: Floats) -> Floats:
    """The logits less the largest of their row; NaN in a row whose largest is no number."""
    tops = np.maximum.reduce(rows, axis=-1, keepdims=True)  # NaN where there is one
    if not all(map(isfinite, tops.ravel().tolist())):
        tops = np.where(np.isfinite(tops), tops, np.float32(nan))
    found: Floats = rows - tops
    return found


def _softmax(scores: Floats) -> Floats:
    below = _below(scores)
    return _normalised(np.exp(below, out=below))


def _normalised(weights: Floats) -> Floats:
    """By sums in pairs, whose rounding is the least: at a filter's edge it tells which tokens stay."""
    weights /= np.add.reduce(weights, axis=-1, keepdims=True)
    return weights


def _shared_out(weights: Floats) -> Floats:
    """The laws of rows of weights ``(R, V)`` by the sums of `Softmax`."""
    wholes: Floats = np.array([_sum(row) for row in weights], dtype=np.float32)
    weights /= wholes[:, None]
    return weights
