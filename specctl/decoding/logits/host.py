"""Sampling and verification on the host with numpy, for any number of texts; `device` does the same with torch.

Sampling a token takes a few dozen operations on a few kilobytes, which matters where a draft step takes 0.2 ms. Numpy
finds a maximum in a tenth of torch's time and starts an operation in a third of it. Exactness rests on the verdict
here. Below, p and q are the verifier's and the draft's probabilities.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from math import exp, inf, isfinite, isnan, isqrt, log, nan
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from specctl.decoding.draft import Draft, Drafted
from specctl.decoding.draws import DrawGenerator, host_numbers
from specctl.decoding.logits.logits import (
    IMPOSSIBLE,
    TINY,
    Beams,
    Logits,
    Look,
    Verdict,
    array,
    kept_in_turn,
    require_numbers,
    token_logprobs,
    verdict_of,
)
from specctl.errors import RecordError
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Foresee, Signals
from specctl.policies import DISTRIBUTION_SIGNALS, TOP_PROBS, Signal
from specctl.profile.schema import Verification
from specctl.records import ExtraToken, TokenLogprobs

if TYPE_CHECKING:
    import torch

    from specctl.decoding.logits.token_sampler import TokenSampler
    from specctl.decoding.sampling import Sampling
    from specctl.decoding.trees import DraftTree

PART = 8192  # The longest part of a dot product that is computed at once
HOTTEST = float(np.finfo(np.float32).max)
"""The highest temperature in float32; any temperature near it draws from the uniform distribution."""
UNDERFLOW = np.float32(-200)  # Logits this far below the largest have probability 0 in float32
SHARES = (32.0, 0.5)
"""The smallest weights considered for top-p, as multiples of the removed share divided by V: first only large ones,
which are few; the second bound is below 1 to allow for rounding.
"""
MOST_BY_ENTROPY = 100
"""Top-h takes the entropy of this many of the likeliest tokens and keeps no others, as transformers does."""
BLOCK = 64  # The search for the largest numbers starts from the maxima of blocks of this size
NARROWEST = 64  # The smallest block size that `blocks` returns

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class HostLogits:
    """`Logits` of a float32 array ``(R, V)``. Only heads need torch.

    Args:
        numbers: the rows of logits.
        device: of the heads' networks; None for the host.
        signals: see `Forward`.
    """

    __slots__ = ("_device", "_signals", "numbers")

    def __init__(self, numbers: Floats, device: "torch.device | None" = None, signals: Signals | None = None) -> None:
        self.numbers, self._device, self._signals = numbers, device, signals

    def part(self, rows: slice) -> "HostLogits":
        return HostLogits(self.numbers[rows], self._device)

    def best(self) -> tuple[list[int], list[float]]:
        indices = self.numbers.argmax(-1).tolist()
        return indices, [self.numbers.item(row, index) for row, index in enumerate(indices)]

    def distributions(self, sampling: "Sampling") -> "HostLogits":
        return HostLogits(processed(self.numbers, sampling))

    def sample(
        self,
        sampler: "TokenSampler",
        uniforms: Sequence[float | None],
        hidden: "torch.Tensor | None" = None,
        previous: "Sequence[float] | torch.Tensor | None" = None,
        foresee: Foresee | None = None,
    ) -> tuple[list[list[float]], Floats | None]:
        logits, sampling, wanted = self.numbers, sampler.sampling, sampler.wanted
        greedy, unfiltered = uniforms[0] is None, sampler.unfiltered
        given = self._signals if sampler.takes_pass_signals else None
        softmax = Softmax(logits) if unfiltered or (wanted and given is None) or sampler.tops else None
        probs: Floats | None = None  # (R, V)
        if greedy:
            tokens = logits.argmax(-1).tolist() if softmax is None else softmax.best
        else:
            probs = softmax.probs(sampling.temperature) if unfiltered and softmax else processed(logits, sampling)
            tokens = picked(probs, cast("Sequence[float]", uniforms))
        ids = sampler.vocabulary
        found: list[list[float]] = [[token if ids is None else ids.ids.item(token)] for token in tokens]
        if given is not None:
            columns = [given[place] for place, name in enumerate(DISTRIBUTION_SIGNALS[:2]) if name in wanted]
            for row, numbers in enumerate(found):
                numbers += [column.item(row) for column in columns]
        elif softmax is not None and wanted:
            for row, numbers in enumerate(found):
                numbers += softmax.signals(row, tokens[row], wanted)
        if sampler.predictor is not None and hidden is not None:
            before = None if previous is None else self._tensor(previous)
            found[0].append(sampler.predictor.accept_prob(hidden, before).item())
        if sampler.foresees and foresee is not None:
            found[0].append(foresee(self._tensor(found[0][0])).item())
        if sampler.tops and softmax is not None:
            for row, numbers in enumerate(found):
                numbers += softmax.tops(row)
        return found, probs

    def describe(
        self,
        sampler: "TokenSampler",
        tokens: Sequence[int],
        hidden: "torch.Tensor | None" = None,
        previous: "Sequence[float] | torch.Tensor | None" = None,
    ) -> tuple[list[list[float]], Sequence[float] | None]:
        rows = self.part(slice(len(tokens)))
        signals = list(rows.signals(tokens, sampler.wanted).values())
        columns: list[Sequence[object]] = [tokens, *(values.tolist() for values in signals)]
        last = None
        if sampler.predictor is not None and hidden is not None:
            before = None
            if sampler.predictor.reads_signals:
                own = np.stack(signals, axis=1)  # (n, 3)
                # A row's hidden state belongs to the token before it, so the signals must too.
                first = np.zeros(own.shape[1]) if previous is None else np.asarray(previous)
                before, last = (
                    self._tensor(np.concatenate([first[None].astype(np.float32), own[:-1]])),
                    own[-1].tolist(),
                )
            columns.append(sampler.predictor.accept_prob(hidden[: len(tokens)], before).tolist())
        tops = rows.top_probs().tolist() if sampler.tops else [()] * len(tokens)
        return [[*row, *more] for *row, more in zip(*columns, tops, strict=True)], last

    def signals(self, tokens: "Sequence[int] | torch.Tensor", wanted: Set[Signal]) -> dict[Signal, Floats]:
        if not wanted:
            return {}
        pairs = zip(self.numbers, _ids(tokens), strict=True)
        found = np.array(
            [Softmax(row[None]).signals(0, token, wanted) for row, token in pairs], dtype=np.float32
        )  # (R, F)
        return dict(zip((name for name in DISTRIBUTION_SIGNALS if name in wanted), found.T, strict=True))

    def logprobs(self, tokens: Sequence[int], most: int) -> tuple[TokenLogprobs, ...]:
        found = []
        for row, token in zip(self.numbers, tokens, strict=False):
            ids = likeliest(row, most).tolist() if most else []
            log, *logs = Softmax(row[None]).logs(0, [token, *ids])
            found.append(token_logprobs(token, log, ids, logs))
        return tuple(found)

    def top_probs(self) -> Floats:
        return np.array([Softmax(row[None]).tops(0) for row in self.numbers], dtype=np.float32).reshape(-1, TOP_PROBS)

    def beams(self, most: int, asked: slice, wanted: Set[Signal], *, tops: bool) -> Beams:
        ids = [likeliest(row, most).tolist() for row in self.numbers]
        # So that signals equal those of a chain's steps bit for bit.
        each = [Softmax(row[None]) for row in self.numbers]
        logs = [one.logs(0, some) for one, some in zip(each, ids, strict=True)]
        values = [one.signals(0, some[0], wanted) for one, some in zip(each[asked], ids[asked], strict=True)]
        names = [name for name in DISTRIBUTION_SIGNALS if name in wanted]
        signals = {name: [row[place] for row in values] for place, name in enumerate(names)}
        return Beams(ids, logs, signals, each[0].tops(0) if tops else [])

    def verdicts(
        self, drafted: Sequence[Drafted], bounds: Sequence[int], verification: Verification = "token"
    ) -> list[Verdict | RecordError]:
        found: list[Verdict | RecordError] = []
        for each, (start, end) in zip(drafted, pairwise(bounds), strict=True):
            try:
                found.append(verdict(each.draft, self.numbers[start:end], each.generator, verification))
            except RecordError as error:
                found.append(error)
        return found

    def look(self, tree: "DraftTree", sampling: "Sampling", generator: DrawGenerator | None) -> Callable[[int], Look]:
        numbers = host_numbers(max(tree.depths) + 1, generator)

        def look(number: int) -> Look:  # only the rows on the path are processed
            row = processed(self.numbers[number : number + 1], sampling)  # (1, V)
            require_numbers(float(row.sum()))
            chance = float(row[0, [*tree.children[number]]].sum())
            return Look(picked(row, [numbers[tree.depths[number]]])[0], min(chance, 1.0))

        return look

    def _tensor(self, numbers: "Sequence[float] | Floats | torch.Tensor | float") -> "torch.Tensor":
        """The tensor that a head reads."""
        import torch

        return torch.as_tensor(numbers).to(device=self._device)


class CertainLogits(HostLogits):
    """`Logits` of a draft that writes text: one certain token per row, with the signals of the draft's own first token.

    Args:
        numbers: ``(R, V)``, 0 at each row's token and else -inf.
        own: the logits ``(R, N)`` of the first token that the draft itself wrote for each row.
    """

    __slots__ = ("_own",)

    def __init__(self, numbers: Floats, own: Logits) -> None:
        super().__init__(numbers)
        self._own = own

    def part(self, rows: slice) -> "CertainLogits":
        return CertainLogits(self.numbers[rows], self._own.part(rows))

    def sample(
        self,
        sampler: "TokenSampler",
        uniforms: Sequence[float | None],
        hidden: "torch.Tensor | None" = None,  # noqa: ARG002 - signature of the interface
        previous: "Sequence[float] | torch.Tensor | None" = None,  # noqa: ARG002
        foresee: Foresee | None = None,  # noqa: ARG002
    ) -> tuple[list[list[float]], None]:
        signals, _ = self._own.sample(
            replace(sampler, predictor=None, foresees=False, vocabulary=None), [None] * len(uniforms)
        )
        rows = signals if isinstance(signals, list) else signals.tolist()
        tokens = self.numbers.argmax(-1).tolist()
        return [[token, *more] for token, (_, *more) in zip(tokens, rows, strict=True)], None

    def signals(self, tokens: "Sequence[int] | torch.Tensor", wanted: Set[Signal]) -> dict[Signal, Floats]:  # noqa: ARG002
        found = self._own.signals(self._own.best()[0], wanted)
        return {name: array(column) for name, column in found.items()}

    def top_probs(self) -> Floats:
        return array(self._own.top_probs())


def _ids(tokens: "Sequence[int] | torch.Tensor") -> Sequence[int]:
    return tokens if isinstance(tokens, Sequence) else tokens.tolist()


class Softmax:
    """The softmax of ``(R, V)`` logits at temperature 1, and the numbers that signals need from it.

    It runs right after a model's pass, with cold processor caches, so the number of operations decides its time. A
    row's numbers do not depend on the other rows.

    Args:
        logits: ``(R, V)``.

    Attributes:
        best: for each row the index of the largest logit, or of the first NaN.
    """

    __slots__ = ("_below", "_weights", "_wholes", "best")

    def __init__(self, logits: Floats) -> None:
        self.best: list[int] = logits.argmax(-1).tolist()
        tops = [*map(logits.item, range(len(logits)), self.best)]
        if inf in tops:
            tops = [nan if top == inf else top for top in tops]
        self._below = logits - _column(tops)
        self._weights = np.exp(self._below)
        self._wholes = _sums(self._weights)

    def probs(self, temperature: float) -> Floats:  # (R, V)
        """The distributions at a temperature above 0; NaN in a row with a logit that is NaN or infinite."""
        if temperature == 1:
            found: Floats = self._weights / _column(self._wholes)
            return found
        return _shared_out(np.exp(self._below / np.float32(min(temperature, HOTTEST))))

    def signals(self, row: int, token: int, wanted: Set[Signal]) -> list[float]:
        """The wanted signals of a row and one of its tokens, in the order of `DISTRIBUTION_SIGNALS`: entropy in nats,
        top probability, and the token's probability.
        """
        found: list[float] = []
        whole = self._wholes[row]
        if "entropy" in wanted:
            found.append(log(whole) - self._mean(row))
        if "top_prob" in wanted:
            found.append(1 / whole)
        if "token_prob" in wanted:
            found.append(self._weights.item(row, token) / whole)
        return found

    def logs(self, row: int, tokens: Sequence[int]) -> list[float]:
        """The log-probabilities of tokens, clamped to [`IMPOSSIBLE`, 0]; NaN becomes `IMPOSSIBLE` too."""
        whole = log(self._wholes[row])
        found = (self._below.item(row, token) - whole for token in tokens)
        return [min(max(value, IMPOSSIBLE), 0.0) if value == value else IMPOSSIBLE for value in found]

    def tops(self, row: int) -> list[float]:
        """The `TOP_PROBS` largest probabilities, descending, float32; padded with 0 where V is less."""
        weights = self._weights[row]
        count = min(TOP_PROBS, len(weights))
        best = np.sort(np.partition(weights, -count)[-count:])[::-1] / np.float32(self._wholes[row])
        return [*best.tolist(), *[0.0] * (TOP_PROBS - count)]

    def _mean(self, row: int) -> float:
        """The mean of the logits minus the largest one. Suppressed logits, at -inf, have no share."""
        weights, below = self._weights[row], self._below[row]
        total = _dot(weights, below)
        if isnan(total):
            total = _dot(weights, np.maximum(below, UNDERFLOW))
        return total / self._wholes[row]


def _column(values: Sequence[float]) -> Floats | float:
    """One number per row as ``(R, 1)``; for a single row a scalar, which is the cheaper operand."""
    return values[0] if len(values) == 1 else np.array(values, dtype=np.float32)[:, None]


def _sum(numbers: Floats) -> float:
    """The sum ``(V,)`` as a product with ones: it takes a third of the time, and runs the same code as `_mean`."""
    return _dot(numbers, _ones(len(numbers)))


def _sums(rows: Floats) -> list[float]:
    """`_sum` for each row of ``(R, V)``."""
    return [_sum(rows[0])] if len(rows) == 1 else [_sum(row) for row in rows]


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
        scores = rows  # subtracting the largest may have rounded nearly equal logits to equal ones
    if 0 < sampling.top_k < rows.shape[1] or sampling.top_p < 1:
        for row, own in enumerate(weights):
            kept = _kept(scores[row], own, sampling.top_k, sampling.top_p)
            if kept is None:
                own[:] = np.exp(_below(_sorted_out(scores[row : row + 1], sampling)))[0]
            else:
                own *= kept
    if sampling.min_p > 0:
        weights *= weights >= np.float32(sampling.min_p)  # relative to the largest weight, which is 1
    found = _normalised(weights)
    if sampling.shapes:
        for row in found:
            _shape(row, sampling)
    return found


def _beyond_entropy(scores: Floats, top_h: float) -> Mask:
    """The tokens ``(V,)`` that top-h removes; among equal ones the first counts first."""
    falling = likeliest(scores, MOST_BY_ENTROPY)
    parts = np.add.accumulate(_information(_softmax(scores[None, falling])[0]))
    out = np.ones(len(scores), dtype=np.bool_)
    out[falling] = parts > top_h * parts[-1]
    out[falling[0]] = False  # the most probable token always stays
    return out


def _shape(probs: Floats, sampling: "Sampling") -> None:
    """Apply to a distribution ``(V,)``, in place, the filters that depend on what earlier filters have left."""
    if sampling.typical_p < 1:
        with np.errstate(divide="ignore"):
            off = np.abs(-np.log(probs.astype(np.float64)) - np.add.reduce(_information(probs))).astype(np.float32)
        order = off.argsort(kind="stable")
        before = np.add.accumulate(probs[order], dtype=np.float64)
        last = min(int(np.count_nonzero(before < sampling.typical_p)), len(probs) - 1)
        _leave_out(probs, off > off[order[last]])
    if sampling.epsilon_cutoff > 0:
        _leave_out(probs, (probs < np.float32(sampling.epsilon_cutoff)) & (probs < probs.max()))
    if sampling.eta_cutoff > 0:
        entropy = float(np.add.reduce(_information(probs)))
        least = min(sampling.eta_cutoff, sampling.eta_cutoff**0.5 * exp(-entropy))
        _leave_out(probs, (probs < np.float32(least)) & (probs < probs.max()))


def _information(probs: Floats) -> npt.NDArray[np.float64]:
    """The terms of the entropy in nats."""
    exact = probs.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(exact == 0, 0.0, -exact * np.log(exact))


def _leave_out(probs: Floats, out: Mask) -> None:
    probs[out] = 0
    probs /= np.add.reduce(probs)


def likeliest(row: Floats, count: int) -> Counts:
    """The indices of the ``count`` largest numbers of a row ``(V,)``, descending; among equal ones the first comes
    first.
    """
    if count >= len(row):
        return (-row).argsort(kind="stable")[:count]
    blocks = len(row) // BLOCK
    # At least ``count`` numbers reach the smallest of the ``count`` largest block maxima.
    maxima = row[: blocks * BLOCK].reshape(blocks, BLOCK).max(-1) if blocks > 4 * count else row
    found = np.flatnonzero(row >= np.partition(maxima, -count)[-count])
    if len(found) < count:  # there is a NaN
        return (-row).argsort(kind="stable")[:count]
    return found[(-row[found]).argsort(kind="stable")[:count]]


def _sorted_out(scores: Floats, sampling: "Sampling") -> Floats:
    """The scores with -inf where top-k and top-p remove a token; sorts all of them."""
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

    None where top-p's edge falls between equal weights: only a full sort then decides which of them stay.

    Args:
        scores: logits, after temperature.
        weights: their softmax up to a factor; all NaN in a row without a distribution.
        top_k, top_p: see `Sampling`, one of them in force.
    """
    if isnan(weights.item(0)):
        return np.zeros(len(weights), dtype=np.bool_)
    if 0 < top_k < len(scores):
        numbers, falling = scores, scores[likeliest(scores, top_k + 1)]
        if top_p == 1:
            return np.asarray(scores >= falling[top_k - 1])
        if falling[top_k - 1] == falling[top_k] > -inf:
            return None  # top-k keeps equal scores, so there are more to look at
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
    """The largest weights of a row ``(V,)``, descending, with a sum of at least ``part``; a few more may follow.

    Weights below ``rest`` / V are not needed for that, since their sum is less than ``rest``.
    """
    for share in SHARES:
        most = weights[weights >= np.float32(share * rest / len(weights))]
        if share < 1 or float(np.add.reduce(most)) > part:
            break
    most.sort()
    return most[::-1]


def _below(rows: Floats) -> Floats:
    """The logits minus the largest of their row; NaN in a row with a largest logit that is not a number."""
    tops = np.maximum.reduce(rows, axis=-1, keepdims=True)  # NaN where the row has one
    if not all(map(isfinite, tops.ravel().tolist())):
        tops = np.where(np.isfinite(tops), tops, np.float32(nan))
    found: Floats = rows - tops
    return found


def _softmax(scores: Floats) -> Floats:
    below = _below(scores)
    return _normalised(np.exp(below, out=below))


def _normalised(weights: Floats) -> Floats:
    """Normalises with pairwise sums, which round least: rounding at a filter's edge decides which tokens stay."""
    weights /= np.add.reduce(weights, axis=-1, keepdims=True)
    return weights


def _shared_out(weights: Floats) -> Floats:
    """Rows of weights ``(R, V)`` normalised by the sums of `Softmax`."""
    weights /= _column(_sums(weights))
    return weights


def picked(weights: Floats, uniforms: Sequence[float]) -> list[int]:
    """`device.pick` for rows ``(R, V)``: the index at which a row's running sum exceeds a given share of its total.

    Searches the running sum of block sums first, then that of one block: in numpy, one element of a running sum costs
    more than thirty elements of a sum.

    Args:
        weights: at least 0.
        uniforms: R numbers in [0, 1).
    """
    width, starts = blocks(weights.shape[1])
    ends = np.add.accumulate(np.add.reduceat(weights, starts, 1, np.float64), 1)  # (R, B)
    found = []
    for row, uniform in enumerate(uniforms):
        running = ends[row]
        part = uniform * running.item(-1)
        block = _passing(running, part)
        first = block * width
        if block:
            part -= running.item(block - 1)
        found.append(first + _passing(np.add.accumulate(weights[row, first : first + width], 0, np.float64), part))
    return found


@cache
def blocks(count: int) -> "tuple[int, Counts]":
    """The block size for this many numbers, and the blocks' offsets."""
    width = max(NARROWEST, isqrt(count))
    return width, np.arange(0, count, width)


def _passing(running: npt.NDArray[np.float64], part: float) -> int:
    """The index at which a running sum exceeds a given share of the total."""
    index = bisect_right(running, part)
    # A number just below 1 may round to the total; nothing after the last weight may be picked.
    return index if index < len(running) else min(int(running.searchsorted(running[-1])), index - 1)


class Acceptance(NamedTuple):
    """A verification rule's decision on K draft tokens."""

    accepted: int  # n, the number of accepted tokens
    weight: float  # w: after n < K tokens the verifier's own token is drawn from max(w p - q, 0), normalised
    # for each draft token its probability of acceptance, given all K tokens and that those before it are accepted
    chances: Sequence[float]


def verdict(
    draft: Draft, target: Floats, generator: DrawGenerator | None, verification: Verification = "token"
) -> Verdict:
    """The verdict on one text's draft. Token by token, only the extra token's row is read whole.

    Args:
        draft: of K tokens.
        target: ``(K + 1, V)``; or ``(K, V)``, K > 0, where no token is to follow a fully accepted draft.
        generator: for a coin for each token, and the extra token's draw.
        verification: which of the two rules.

    Raises:
        RecordError: ``target`` holds NaN.
    """
    tokens, vocabulary, count = draft.tokens, draft.vocabulary, len(draft.tokens)
    *coins, last = host_numbers(count + 1, generator)
    require_numbers(*target[:, 0].tolist())  # a row with one NaN is all NaN
    if not count:
        return Verdict(0, picked(target[:1], [last])[0], ExtraToken.BONUS, ())
    given = 0 if draft.probs is None else len(draft.probs)
    if draft.probs is not None and given == count:
        probs = array(draft.probs)
    else:
        probs = np.zeros((count, target.shape[1]), dtype=np.float32)
        probs[np.arange(given, count), tokens[given:]] = 1
        if draft.probs is not None:  # a copied token may be missing from the draft's vocabulary
            some = array(draft.probs)
            probs[:given] = some if vocabulary is None else vocabulary.widened(some, 0.0)
        vocabulary = None
    columns = tokens if vocabulary is None else vocabulary.columns(tokens)
    # For so few numbers, comparing one by one is faster.
    target_of = [target.item(place, token) for place, token in enumerate(tokens)]
    draft_of = [probs.item(place, column) for place, column in enumerate(columns)]
    if verification == "block":
        found = by_block(target_of, draft_of, probs, target, coins, vocabulary)
    else:
        found = by_token(target_of, draft_of, coins)
    if found.accepted == len(target):
        return verdict_of(count, None, found.chances)
    row = target[found.accepted]  # (V,)
    if found.accepted < count:
        residual = less(row * np.float32(found.weight), probs[found.accepted], vocabulary)
        np.maximum(residual, 0, out=residual)
        row = residual if residual[residual.argmax()] else row
    return verdict_of(found.accepted, picked(row[None], [last])[0], found.chances)


def less(rows: Floats, draft: Floats, vocabulary: DraftVocabulary | None) -> Floats:
    """``(..., V)`` numbers minus a draft's probabilities ``(..., N)``; may modify the numbers in place."""
    return np.subtract(rows, draft, out=rows) if vocabulary is None else vocabulary.less(rows, draft)


def by_token(target_of: Sequence[float], draft_of: Sequence[float], coins: Sequence[float]) -> Acceptance:
    """Accept token i with probability min(1, p_i / q_i) while all before it are accepted (arXiv 2211.17192, Alg. 1).

    Args:
        target_of, draft_of: p and q of each of K draft tokens.
        coins: K numbers, uniform in [0, 1).
    """
    pairs = list(zip(target_of, draft_of, strict=True))
    tossed = enumerate(zip(pairs, coins, strict=True))
    accepted = next((place for place, ((p, q), coin) in tossed if not (p >= q or coin * q < p)), len(pairs))
    return Acceptance(accepted, 1.0, [float(np.float32(min(p / max(q, TINY), 1.0))) for p, q in pairs])


def by_block(
    target_of: Sequence[float],
    draft_of: Sequence[float],
    draft_probs: Floats,
    target_probs: Floats,
    coins: Sequence[float],
    vocabulary: DraftVocabulary | None = None,
) -> Acceptance:
    """Accept the longest prefix of the draft that passes (Sun et al., arXiv 2403.10444, Alg. 2).

    Each prefix passes independently of the others, so later ones are tried even if an early one fails. Given only the
    first i tokens, i or more are then accepted with probability w_i (see `passing`), the highest that preserves the
    verifier's distribution.

    Args:
        target_of, draft_of, draft_probs, target_probs, vocabulary: see `passing`.
        coins: K numbers, uniform in [0, 1).
    """
    weights, chances = passing(target_of, draft_of, draft_probs, target_probs, vocabulary)
    tossed = enumerate(zip(coins, chances, strict=True), start=1)
    accepted = max((number for number, (coin, chance) in tossed if coin < chance), default=0)
    return Acceptance(accepted, weights[accepted], kept_in_turn(chances))


def passing(
    target_of: Sequence[float],
    draft_of: Sequence[float],
    draft_probs: Floats,
    target_probs: Floats,
    vocabulary: DraftVocabulary | None = None,
) -> tuple[list[float], list[float]]:  # K + 1, K
    """The weights w_0 to w_K of block verification, and the probabilities h_1 to h_K that each prefix passes.

    w_0 = 1 and w_i = min(w_{i-1} p_i / q_i, 1). The first i < K tokens pass with h_i = Z_i / (Z_i + 1 - w_i), Z_i the
    sum over x of max(w_i p(x) - q(x), 0) after these tokens, and the whole draft with h_K = w_K.

    Args:
        target_of, draft_of: p and q of each of K draft tokens.
        draft_probs: ``(K, N)``, q at each draft token.
        target_probs: ``(K, V)`` or more, p at each draft token; rows after the last are not read.
        vocabulary: see `Logits.verify`.
    """
    ratios = [float(p) / max(float(q), TINY) for p, q in zip(target_of, draft_of, strict=True)]
    weights = list(accumulate(ratios, lambda weight, ratio: min(weight * ratio, 1.0), initial=1.0))
    chances = weights[1:]
    for place, weight in enumerate(chances[:-1], start=1):
        # At weight 1 a prefix passes. This covers p = q too, where Z / Z is undefined and a longer prefix passes
        # anyway.
        if 0 < weight < 1:
            above = less(target_probs[place] * np.float32(weight), draft_probs[place], vocabulary)  # (V,)
            surplus = float(np.add.reduce(np.maximum(above, 0, out=above)))
            chances[place - 1] = surplus / (surplus + (1 - weight))
    return weights, chances
