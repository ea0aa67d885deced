"""Distributions of rows wherever torch has them, without waiting for a device: `host_laws` has the same by numpy."""

from collections.abc import Set
from typing import TYPE_CHECKING

import torch

from specctl.decoding.rows.draws import DrawGenerator, uniforms
from specctl.decoding.rows.host_laws import MOST_BY_ENTROPY, TINY
from specctl.policies import DISTRIBUTION_SIGNALS, TOP_PROBS, Signal

if TYPE_CHECKING:
    from specctl.decoding.sampling import Sampling


def processed(logits: torch.Tensor, sampling: "Sampling") -> torch.Tensor:  # (..., V) -> (..., V)
    """The processed distributions in float32; one-hot at the argmax when greedy, NaN where a logit is NaN."""
    if sampling.greedy:
        one_hot = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1])
        return one_hot.float()
    scores = logits.float()
    if sampling.temperature != 1:
        # A low temperature must not overflow.
        scores = (scores - scores.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_h > 0:
        scores = scores.masked_fill(_beyond_entropy(scores, sampling.top_h), -torch.inf)
    if 0 < sampling.top_k < scores.shape[-1]:
        least_kept = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least_kept, -torch.inf)
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        # On CUDA float32 sums differ from run to run, enough to move the edge.
        tail = ascending.softmax(-1).cumsum(-1, dtype=torch.float64) <= 1 - sampling.top_p
        tail[..., -1:] = False  # the most probable token always stays; a single place would be waited for
        scores = scores.masked_fill(torch.empty_like(tail).scatter_(-1, order, tail), -torch.inf)
    probs = scores.softmax(-1)
    if sampling.min_p > 0:
        kept = probs.where(probs >= sampling.min_p * probs.amax(-1, keepdim=True), 0)
        probs = kept / kept.sum(-1, keepdim=True)
    return _shaped(probs, sampling) if sampling.shapes else probs


def _beyond_entropy(scores: torch.Tensor, top_h: float) -> torch.Tensor:  # (..., V) -> (..., V)
    """The tokens that top-h leaves out; of equal ones the first comes first."""
    falling, order = scores.sort(dim=-1, descending=True, stable=True)
    count = min(MOST_BY_ENTROPY, scores.shape[-1])
    parts = _information(falling[..., :count].softmax(-1)).cumsum(-1)
    out = torch.zeros_like(falling, dtype=torch.bool)
    out[..., count:] = True
    out[..., 1:count] = parts[..., 1:] > top_h * parts[..., -1:]  # the likeliest always stays
    return torch.empty_like(out).scatter_(-1, order, out)


def _shaped(probs: torch.Tensor, sampling: "Sampling") -> torch.Tensor:  # (..., V) -> (..., V)
    """Distributions after the filters that look at what the others have left."""
    if sampling.typical_p < 1:
        entropy = _information(probs).sum(-1, keepdim=True)
        off = (-probs.double().log() - entropy).abs().float()  # (..., V) infinite for what is left out already
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
        found["entropy"] = -(raw * raw.clamp_min(TINY).log()).sum(-1)  # 0 at 0, and a third of entr's time
    if "top_prob" in wanted:
        found["top_prob"] = raw.amax(-1)
    if "token_prob" in wanted:
        found["token_prob"] = raw.gather(-1, tokens[..., None])[..., 0]
    return found


def read_top_probs(logits: torch.Tensor) -> torch.Tensor:  # (..., V) -> (..., TOP_PROBS)
    """The `TOP_PROBS` largest probabilities of the softmax at temperature 1, descending; float32, 0 where V is less."""
    scores = logits.float()
    count = min(TOP_PROBS, scores.shape[-1])
    best = (scores.topk(count).values - scores.logsumexp(-1, keepdim=True)).exp()
    return torch.nn.functional.pad(best, (0, TOP_PROBS - count))


def draw(weights: torch.Tensor, generator: DrawGenerator | None) -> torch.Tensor:  # (..., V) -> (...)
    """One index of each row, with probability proportional to its weight, without waiting for the device."""
    return pick(weights, uniforms(weights.shape[:-1], weights.device, generator))


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:  # (..., V), (...) -> (...)
    """The index at which the running sum of a row's weights passes a part of the whole, by the inverse method.

    ``uniforms`` may be a single number of the host. For a number drawn uniformly it is index i with probability
    w_i / sum(w). Sums are float64, so that a token of probability 1e-12 gets its due.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    whole = sums[..., -1:].contiguous()
    # In this order a number of the host is an argument of the product, and no copy that is waited for.
    index = torch.searchsorted(sums, (uniforms * whole[..., 0])[..., None], right=True)
    # A number just below 1 may round to the whole; behind the last weight nothing must be picked.
    return torch.minimum(index, torch.searchsorted(sums, whole)).clamp_max_(weights.shape[-1] - 1)[..., 0]
