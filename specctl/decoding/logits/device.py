"""Sampling and verification with torch on any device, for any number of texts, without waiting for the device.

`host` has the same functions in numpy, in the same order, and explains the rules. Below, p and q are the verifier's and
the draft's probabilities.
"""

from collections.abc import Callable, Sequence, Set
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from specctl.decoding.draft import Drafted
from specctl.decoding.draws import DrawGenerator, uniforms
from specctl.decoding.logits.host import MOST_BY_ENTROPY
from specctl.decoding.logits.logits import (
    IMPOSSIBLE,
    TINY,
    Beams,
    Look,
    Verdict,
    not_a_number,
    require_numbers,
    token_logprobs,
    verdict_of,
)
from specctl.errors import RecordError
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Foresee, Numbers
from specctl.models.passes.synchronisation import sent
from specctl.policies import DISTRIBUTION_SIGNALS, TOP_PROBS, Signal
from specctl.profile.schema import Verification
from specctl.records import TokenLogprobs

if TYPE_CHECKING:
    from specctl.decoding.logits.token_sampler import TokenSampler
    from specctl.decoding.sampling import Sampling
    from specctl.decoding.trees import DraftTree


class DeviceLogits:
    """`Logits` of a tensor ``(R, V)``, on any device and of any dtype."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def part(self, rows: slice) -> "DeviceLogits":
        return DeviceLogits(self.numbers[rows])

    def best(self) -> tuple[list[int], list[float]]:
        best = self.numbers.max(-1)
        choices, values = torch.stack([best.indices.double(), best.values.double()]).tolist()
        return [int(choice) for choice in choices], values

    def distributions(self, sampling: "Sampling") -> "DeviceLogits":
        return DeviceLogits(processed(self.numbers, sampling))

    def sample(
        self,
        sampler: "TokenSampler",
        uniforms: Sequence[float | None],
        hidden: torch.Tensor | None = None,
        previous: Sequence[float] | torch.Tensor | None = None,
        foresee: Foresee | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        draws = [uniform for uniform in uniforms if uniform is not None]
        numbers = None
        if len(draws) == 1:
            numbers = torch.tensor(draws, dtype=torch.float64)[0]  # on the host, so that nothing is sent
        elif draws:
            numbers = sent(draws, self.numbers.device, torch.float64)
        before = None if previous is None else self._here(previous, torch.float64)
        return sampled(sampler, self.numbers, numbers, hidden, before, foresee)

    def describe(
        self,
        sampler: "TokenSampler",
        tokens: Sequence[int],
        hidden: torch.Tensor | None = None,
        previous: Sequence[float] | torch.Tensor | None = None,
    ) -> tuple[list[list[float]], torch.Tensor | None]:
        rows, chosen = self.part(slice(len(tokens))), self._here(tokens, torch.int64)
        signals = [*rows.signals(chosen, sampler.wanted).values()]
        columns, last = [chosen, *signals], None
        if sampler.predictor is not None and hidden is not None:
            before = None
            if sampler.predictor.reads_signals:
                own = torch.stack(signals, dim=-1)  # (n, 3)
                # A row's hidden state belongs to the token before it, so the signals must too.
                first = torch.zeros_like(own[0]) if previous is None else self._here(previous, own.dtype)
                before, last = torch.cat([first[None].to(own.dtype), own[:-1]]), own[-1]
            columns.append(sampler.predictor.accept_prob(hidden[: len(tokens)], before))
        # float64 holds ids and probabilities alike
        together = [column.double()[:, None] for column in columns]
        if sampler.tops:
            together.append(rows.top_probs().double())
        numbers: list[list[float]] = torch.cat(together, dim=-1).tolist()
        return numbers, last

    def signals(self, tokens: Sequence[int] | torch.Tensor, wanted: Set[Signal]) -> dict[Signal, torch.Tensor]:
        return read_signals(self.numbers, self._here(tokens, torch.int64), wanted)

    def logprobs(self, tokens: Sequence[int], most: int) -> tuple[TokenLogprobs, ...]:
        logits = self.numbers[: len(tokens)].float()
        best = logits.topk(min(most, logits.shape[1]))  # (n, M)
        chosen = logits.gather(1, self._here(tokens, torch.int64)[:, None])
        logs = (torch.cat([chosen, best.values], 1) - logits.logsumexp(-1, keepdim=True)).double()  # (n, M + 1)
        logs = logs.nan_to_num(IMPOSSIBLE, IMPOSSIBLE, IMPOSSIBLE).clamp(IMPOSSIBLE, 0)
        # float64 holds ids and probabilities alike
        rows, count = torch.cat([logs, best.indices.double()], 1).tolist(), best.indices.shape[1]
        return tuple(
            token_logprobs(token, row[0], [*map(int, row[1 + count :])], row[1 : 1 + count])
            for token, row in zip(tokens, rows, strict=True)
        )

    def top_probs(self) -> torch.Tensor:
        return read_top_probs(self.numbers)

    def beams(self, most: int, asked: slice, wanted: Set[Signal], *, tops: bool) -> Beams:
        logits = self.numbers.float()
        best = logits.topk(min(most, logits.shape[1]))  # (R, k)
        logs = (best.values - logits.logsumexp(-1, keepdim=True)).double()  # (R, k)
        logs = logs.nan_to_num(IMPOSSIBLE, IMPOSSIBLE, IMPOSSIBLE).clamp(IMPOSSIBLE, 0)
        signals = read_signals(logits[asked], best.indices[asked, 0], wanted).values()
        # float64 holds ids and probabilities alike
        together = [best.indices.double(), logs, *(value.double() for value in signals)]
        if tops:
            together.append(read_top_probs(logits[:1]).double())
        numbers = iter(torch.cat([part.flatten() for part in together]).tolist())
        (rows, count), read = best.indices.shape, len(best.indices[asked])
        return Beams(
            [[int(number) for number in islice(numbers, count)] for _ in range(rows)],
            [[*islice(numbers, count)] for _ in range(rows)],
            {name: [*islice(numbers, read)] for name in DISTRIBUTION_SIGNALS if name in wanted},
            [*numbers],
        )

    def verdicts(
        self, drafted: Sequence[Drafted], bounds: Sequence[int], verification: Verification = "token"
    ) -> list[Verdict | RecordError]:
        # Drafts differ in length. Per-token numbers are padded to the longest draft; logits are concatenated text by
        # text. All stays on the device until one transfer reads the verdicts.
        target = self.numbers
        tokens = [each.draft.tokens for each in drafted]
        texts, counts, starts = len(tokens), [*map(len, tokens)], bounds[:-1]
        longest, device, ragged = max(counts), target.device, min(counts) < max(counts)
        for each, length in zip(drafted, counts, strict=True):
            if each.numbers is None:
                each.numbers = uniforms((length + 1,), device, each.generator)
        numbers = _together([each.numbers for each in drafted if each.numbers is not None])
        # The offsets of each text's draft tokens and of its numbers.
        first, drawn = ([*accumulate(sizes, initial=0)][:-1] for sizes in (counts, [length + 1 for length in counts]))

        def padded(beginnings: Sequence[int]) -> list[int]:
            """``(B, K)`` indices: those of each text's tokens from its start on, then 0."""
            return [
                begin + place if place < length else 0
                for begin, length in zip(beginnings, counts, strict=True)
                for place in range(longest)
            ]

        # Per-text values are sent at once: (B, 1) each, then (B, K) each, then the ids of all drafts.
        single = [
            *counts,
            *starts,
            *(end - 1 for end in bounds[1:]),
            *first,
            *(max(0, begin + length - 1) for begin, length in zip(first, counts, strict=True)),
            *(begin + length for begin, length in zip(drawn, counts, strict=True)),
        ]
        ids = [token for each in tokens for token in each]
        several = [*(token for each in tokens for token in (*each, *[0] * (longest - len(each))))]
        several += [*padded(starts), *padded(first), *padded(drawn)]
        places = sent([*single, *several, *ids], device)
        count, start, last_row, begin, last_token, last_number = places[: len(single)].view(-1, texts, 1)
        total = target.sum(-1).double()  # (R,), NaN if any number of the row is
        read = [total]
        extra_rows = target  # (B, V), where nothing was drafted
        if longest:
            token, row, one, coin = places[len(single) : len(single) + len(several)].view(-1, texts, longest)
            draft, vocabulary = _draft_probs(drafted, target, places[len(single) + len(several) :])
            column = token if vocabulary is None else vocabulary.columns_of(token)
            target_of, draft_of, last = target[row, token], draft[one, column], None
            if ragged:
                number = torch.arange(longest, device=device)
                target_of = target_of.masked_fill(number >= count, 0.0)
                draft_of = draft_of.masked_fill(number >= count, 1.0)
                last = number == count - 1

            def surplus(weights: torch.Tensor) -> torch.Tensor:  # (B, K - 1)
                # One text's rows are a view.
                at, by = (slice(1, longest),) * 2 if texts == 1 else (row[:, 1:].flatten(), one[:, 1:].flatten())
                above = less(weights.reshape(-1, 1) * target[at], draft[by], vocabulary)  # (B (K - 1), V)
                return above.clamp_min(0).sum(-1).view_as(weights)

            if verification == "block":
                found = by_block(target_of, draft_of, numbers[coin], surplus, last)
            else:
                found = by_token(target_of, draft_of, numbers[coin])
            accepted = found.accepted
            place = start + accepted
            if len(target) < len(ids) + texts:  # some drafts have no row after their last token
                place = place.minimum(last_row)
            extra_rows = target.index_select(0, place[:, 0])
            draft_rows = draft.index_select(0, (begin + accepted).minimum(last_token)[:, 0])
            weighed = extra_rows if found.weight is None else extra_rows * found.weight
            residual = less(weighed, draft_rows, vocabulary).clamp_min(0)
            use_residual = (accepted < count) & (residual.sum(-1, keepdim=True) > 0)
            extra_rows = torch.where(use_residual, residual, extra_rows)
            read += [accepted[:, 0].double(), found.chances.double().flatten()]
        # float64 holds ids and probabilities alike
        extra = pick(extra_rows, numbers[last_number[:, 0]]).double()  # (B,)
        numbers_read = iter(torch.cat([*read, extra]).tolist())
        sums = [*islice(numbers_read, len(target))]
        accepts = [int(number) for number in islice(numbers_read, texts if longest else 0)] or [0] * texts
        chances = [[*islice(numbers_read, longest)] for _ in range(texts)]
        extras = [int(number) for number in numbers_read]
        return [
            not_a_number(*sums[bounds[text] : bounds[text + 1]])
            or verdict_of(
                accepts[text],
                extras[text] if accepts[text] < bounds[text + 1] - bounds[text] else None,
                chances[text][: counts[text]],
            )
            for text in range(texts)
        ]

    def look(self, tree: "DraftTree", sampling: "Sampling", generator: DrawGenerator | None) -> Callable[[int], Look]:
        numbers = uniforms((max(tree.depths) + 1,), self.numbers.device, generator)
        probs = processed(self.numbers, sampling)  # (N + 1, V)
        draws = pick(probs, numbers[self._here(tree.depths, torch.int64)])  # (N + 1,)
        rows, ids = (self._here(some, torch.int64) for some in (tree.parents, tree.tokens[1:]))
        # float64 holds ids and probabilities alike
        everything = torch.cat([probs.sum().double()[None], draws.double(), probs[rows, ids].double()]).tolist()
        total, found, reached = everything[0], everything[1 : 1 + len(draws)], everything[1 + len(draws) :]
        require_numbers(total)

        def look(number: int) -> Look:
            chance = sum(reached[below - 1] for below in tree.children[number].values())
            return Look(int(found[number]), min(chance, 1.0))

        return look

    def _here(self, numbers: Sequence[float] | Numbers, dtype: torch.dtype) -> torch.Tensor:
        """Numbers on the rows' device, without waiting for it; ``dtype`` applies to those that are not arrays."""
        if isinstance(numbers, torch.Tensor):
            return numbers.to(self.numbers.device)
        made = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else numbers
        return sent(made, self.numbers.device, dtype)


def sampled(
    sampler: "TokenSampler",
    logits: torch.Tensor,
    uniforms: torch.Tensor | None,
    hidden: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    foresee: Foresee | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`DeviceLogits.sample` as tensors alone, so that it can be compiled or captured.

    Args:
        logits: ``(R, V)``.
        uniforms: ``(R,)`` float64; or ``()``, of a single row.
        sampler, hidden, previous, foresee: see there.

    Returns:
        ``(R, F)`` float64 and ``(R, V)``.
    """
    probs = None if uniforms is None else processed(logits, sampler.sampling)  # (R, V)
    tokens = logits.argmax(-1) if probs is None or uniforms is None else pick(probs, uniforms)  # (R,)
    known = probs if sampler.sampling.plain else None
    signals = read_signals(logits, tokens, sampler.wanted, known).values()
    if sampler.vocabulary is not None:  # indexing with a single number would wait for it
        tokens = sampler.vocabulary.ids_on(logits.device).index_select(0, tokens)
    numbers = [tokens, *signals]
    if sampler.predictor is not None and hidden is not None:
        numbers.append(sampler.predictor.accept_prob(hidden, previous).reshape(1))
    if sampler.foresees and foresee is not None:
        numbers.append(foresee(tokens[0]).reshape(1))
    # float64 holds ids and probabilities alike
    packed = torch.stack([number.double() for number in numbers], -1)
    if sampler.tops:
        packed = torch.cat([packed, read_top_probs(logits).double()], -1)
    return packed, probs


def processed(logits: torch.Tensor, sampling: "Sampling") -> torch.Tensor:  # (..., V) -> (..., V)
    """The processed distributions in float32; one-hot at the argmax when greedy, NaN where a logit is NaN."""
    if sampling.greedy:
        one_hot = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
        return one_hot.float()
    scores = logits.float()
    if sampling.temperature != 1:
        # Otherwise a low temperature could overflow.
        scores = (scores - scores.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_h > 0:
        scores = scores.masked_fill(_beyond_entropy(scores, sampling.top_h), -torch.inf)
    if 0 < sampling.top_k < scores.shape[-1]:
        least_kept = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least_kept, -torch.inf)
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        # On CUDA float32 sums vary from run to run, enough to move the edge.
        tail = ascending.softmax(-1).cumsum(-1, dtype=torch.float64) <= 1 - sampling.top_p
        # The most probable token always stays; assigning to a single index would wait for the device.
        tail[..., -1:] = False
        scores = scores.masked_fill(torch.empty_like(tail).scatter_(-1, order, tail), -torch.inf)
    probs = scores.softmax(-1)
    if sampling.min_p > 0:
        kept = probs.where(probs >= sampling.min_p * probs.amax(-1, keepdim=True), 0)
        probs = kept / kept.sum(-1, keepdim=True)
    return _shaped(probs, sampling) if sampling.shapes else probs


def _beyond_entropy(scores: torch.Tensor, top_h: float) -> torch.Tensor:  # (..., V) -> (..., V)
    """The tokens that top-h removes; among equal ones the first counts first."""
    falling, order = scores.sort(dim=-1, descending=True, stable=True)
    count = min(MOST_BY_ENTROPY, scores.shape[-1])
    parts = _information(falling[..., :count].softmax(-1)).cumsum(-1)
    out = torch.zeros_like(falling, dtype=torch.bool)
    out[..., count:] = True
    out[..., 1:count] = parts[..., 1:] > top_h * parts[..., -1:]  # the likeliest always stays
    return torch.empty_like(out).scatter_(-1, order, out)


def _shaped(probs: torch.Tensor, sampling: "Sampling") -> torch.Tensor:  # (..., V) -> (..., V)
    """Distributions after the filters that depend on what earlier filters have left."""
    if sampling.typical_p < 1:
        entropy = _information(probs).sum(-1, keepdim=True)
        off = (-probs.double().log() - entropy).abs().float()  # (..., V), infinite for tokens already removed
        rising, order = off.sort(dim=-1, stable=True)
        before = probs.gather(-1, order).cumsum(-1, dtype=torch.float64) < sampling.typical_p
        last = before.sum(-1, keepdim=True).clamp_max(probs.shape[-1] - 1)
        probs = _without(probs, off > rising.gather(-1, last))
    if sampling.epsilon_cutoff > 0:
        probs = _without(probs, (probs < sampling.epsilon_cutoff) & (probs < probs.amax(-1, keepdim=True)))
    if sampling.eta_cutoff > 0:
        entropy = _information(probs).sum(-1, keepdim=True)
        least = ((-entropy).exp() * sampling.eta_cutoff**0.5).clamp_max(sampling.eta_cutoff).float()
        probs = _without(probs, (probs < least) & (probs < probs.amax(-1, keepdim=True)))
    return probs


def _information(probs: torch.Tensor) -> torch.Tensor:
    """The terms of the entropy in nats, float64."""
    exact = probs.double()
    return -torch.xlogy(exact, exact)


def _without(probs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    kept = probs.masked_fill(out, 0)
    return kept / kept.sum(-1, keepdim=True)


def read_signals(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: Set[Signal] = frozenset(DISTRIBUTION_SIGNALS),
    probs: torch.Tensor | None = None,
) -> dict[Signal, torch.Tensor]:
    """Entropy in nats, top probability and the tokens' probability under the softmax at temperature 1.

    Args:
        logits: ``(..., V)``, raw.
        tokens: ``(...)`` int64.
        wanted: which of `DISTRIBUTION_SIGNALS`.
        probs: ``(..., V)`` float32, that softmax where it is known.

    Returns:
        ``(...)`` float32 of each signal wanted, in the order of `DISTRIBUTION_SIGNALS`.
    """
    found: dict[Signal, torch.Tensor] = {}
    if not wanted:
        return found
    raw = logits.float().softmax(-1) if probs is None else probs  # (..., V)
    if "entropy" in wanted:
        found["entropy"] = -(raw * raw.clamp_min(TINY).log()).sum(-1)  # 0 at 0, and takes a third of entr's time
    if "top_prob" in wanted:
        found["top_prob"] = raw.amax(-1)
    if "token_prob" in wanted:
        found["token_prob"] = raw.gather(-1, tokens[..., None])[..., 0]
    return found


def read_top_probs(logits: torch.Tensor) -> torch.Tensor:  # (..., V) -> (..., TOP_PROBS)
    """The `TOP_PROBS` largest probabilities of the softmax at temperature 1, descending; float32, padded with 0 where V
    is less.
    """
    scores = logits.float()
    count = min(TOP_PROBS, scores.shape[-1])
    best = (scores.topk(count).values - scores.logsumexp(-1, keepdim=True)).exp()
    return torch.nn.functional.pad(best, (0, TOP_PROBS - count))


def draw(weights: torch.Tensor, generator: DrawGenerator | None) -> torch.Tensor:  # (..., V) -> (...)
    """One index for each row, with probability proportional to its weight, without waiting for the device."""
    return pick(weights, uniforms(weights.shape[:-1], weights.device, generator))


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:  # (..., V), (...) -> (...)
    """The index at which a row's running sum of weights exceeds a given share of their total: inverse transform
    sampling.

    ``uniforms`` may be a single number on the host. With a uniform number, index i has probability w_i / sum(w). Sums
    are float64, so that a token of probability 1e-12 keeps that probability.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    whole = sums[..., -1:].contiguous()
    # In this order a number of the host is an argument of the product; otherwise it would be copied, and waited for.
    index = torch.searchsorted(sums, (uniforms * whole[..., 0])[..., None], right=True)
    # A number just below 1 may round to the total; nothing after the last weight may be picked.
    return torch.minimum(index, torch.searchsorted(sums, whole)).clamp_max_(weights.shape[-1] - 1)[..., 0]


class Acceptance(NamedTuple):
    """`host.Acceptance` on the device: int64 and float32 ``(..., 1)``, and ``(..., K)`` floats. A weight of None means
    1.
    """

    accepted: torch.Tensor
    weight: torch.Tensor | None
    chances: torch.Tensor


def _together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _draft_probs(
    drafted: Sequence[Drafted], target: torch.Tensor, ids: torch.Tensor
) -> tuple[torch.Tensor, DraftVocabulary | None]:
    """The distributions of all drafts' tokens ``(D, N)``, and the ids of their columns where columns are not ids.

    Args:
        drafted: the drafts.
        target: ``(R, V)``.
        ids: ``(D,)``, the tokens of all drafts.
    """
    drafts = [each.draft for each in drafted if each.draft.tokens]
    vocabulary = drafts[0].vocabulary
    probs = [draft.probs for draft in drafts if draft.probs is not None and len(draft.probs) == len(draft.tokens)]
    if len(probs) == len(drafts) and all(draft.vocabulary is vocabulary for draft in drafts):
        return _together([_here(each, target) for each in probs]), vocabulary
    found = target.new_zeros(len(ids), target.shape[1]).scatter_(1, ids[:, None], 1.0)
    start = 0
    for draft in drafts:  # a copied token may have no column in the draft's vocabulary
        if draft.probs is not None:
            some = _here(draft.probs, target)
            wide = some if draft.vocabulary is None else torch.as_tensor(draft.vocabulary.widened(some, 0.0))
            found[start : start + len(some)].copy_(wide)
        start += len(draft.tokens)
    return found, None


def _here(probs: Numbers, target: torch.Tensor) -> torch.Tensor:
    made = torch.from_numpy(probs) if isinstance(probs, np.ndarray) else probs
    return sent(made, target.device) if made.is_cpu else made.to(target.device)


def less(rows: torch.Tensor, draft: torch.Tensor, vocabulary: DraftVocabulary | None) -> torch.Tensor:
    """`host.less` by tensor operations alone."""
    return rows - draft if vocabulary is None else vocabulary.less(rows, draft)


def by_token(target_of: torch.Tensor, draft_of: torch.Tensor, coins: torch.Tensor) -> Acceptance:
    """`host.by_token` by tensor operations alone, of one draft or of several.

    Args:
        target_of, draft_of: ``(..., K)``; shorter drafts are padded with tokens that are never accepted, 0 and 1.
        coins: ``(..., K)``.
    """
    kept = (target_of >= draft_of) | (coins * draft_of < target_of)
    chances = (target_of / draft_of.clamp_min(TINY)).clamp_max(1)
    return Acceptance(kept.int().cumprod(-1).sum(-1, keepdim=True), None, chances)


def by_block(
    target_of: torch.Tensor,
    draft_of: torch.Tensor,
    coins: torch.Tensor,
    surplus: Callable[[torch.Tensor], torch.Tensor],
    last: torch.Tensor | None = None,
) -> Acceptance:
    """`host.by_block` by tensor operations alone: log w_i is a walk held below 0, S_i - max(S_0, ..., S_i).

    Args:
        target_of, draft_of, coins: see `by_token`.
        surplus: Z_1 to Z_{K-1} from w_1 to w_{K-1}, both ``(..., K - 1)`` float32.
        last: ``(B, K)`` bool, where drafts end; None where each has K tokens.
    """
    logs = (target_of.double() / draft_of.double().clamp_min(TINY)).log()
    # -inf from the first token on that cannot be accepted.
    walk = torch.cat([torch.zeros_like(logs[..., :1]), logs.cumsum(-1)], -1)
    weights = (walk - walk.cummax(-1).values).exp()  # (..., K + 1)
    inner = weights[..., 1:-1]
    above = surplus(inner.float())
    chances = torch.where(inner < 1, above / (above + (1 - inner)).clamp_min(TINY), 1.0)
    chances = torch.cat([chances, weights[..., -1:]], -1)  # (..., K)
    if last is not None:
        chances = torch.where(last, weights[..., 1:], chances)
    numbers = torch.arange(1, coins.shape[-1] + 1, device=coins.device)
    accepted = ((coins < chances) * numbers).amax(-1, keepdim=True)
    at_least = 1 - (1 - chances).flip(-1).cumprod(-1).flip(-1)
    each = at_least / torch.cat([torch.ones_like(at_least[..., :1]), at_least[..., :-1]], -1).clamp_min(TINY)
    return Acceptance(accepted, weights.gather(-1, accepted).float(), each)
