"""From logits to the distribution tokens are drawn from, and the draw itself."""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch

from specctl.decoding.host import TINY, Softmax, argmax, array, filtered, on_host
from specctl.policies import DISTRIBUTION_SIGNALS, TOP_PROBS, Signal
from specctl.profile.schema import SamplingTable, Verification

AT_A_TIME = 64
"""Numbers that `Uniforms` takes from its generator at a time."""
COLDEST = 1e-6
"""Temperatures below it are greedy: any difference between two float32 logits would make the larger one certain."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature and filters, applied alike to target and draft, in the order of transformers' ``generate``.

    Temperature 0 (below 1e-6) is greedy; top_k 0, top_p 1 and min_p 0 leave the distribution alone. ``verification``
    says whether draft tokens are verified one by one or as a block, which makes no difference to greedy decoding.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    verification: Verification = "token"

    @classmethod
    def of(cls, settings: SamplingTable) -> "Sampling":
        return cls(settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.verification)

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST

    @property
    def filters(self) -> bool:
        """Whether some tokens may get no probability at all."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def in_blocks(self) -> bool:
        """Whether drawn tokens are verified as a block."""
        return not self.greedy and self.verification == "block"

    @property
    def plain(self) -> bool:
        """Whether the processed distribution is the softmax of the raw logits."""
        return self.temperature == 1 and not self.filters

    def probs(self, logits: torch.Tensor) -> torch.Tensor:  # (..., V) -> (..., V)
        """The processed distribution in float32; one-hot at the argmax when greedy."""
        if self.greedy:
            one_hot = torch.nn.functional.one_hot(argmax(logits), logits.shape[-1])
            return one_hot.float()
        scores = logits.float()
        if self.temperature != 1:
            scores = (scores - scores.amax(-1, keepdim=True)) / self.temperature  # a low temperature must not overflow
        if (
            self.filters
            and on_host(scores)
            and (found := filtered(scores, self.top_k, self.top_p, self.min_p)) is not None
        ):
            return found
        if 0 < self.top_k < scores.shape[-1]:
            least_kept = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least_kept, -torch.inf)
        if self.top_p < 1:
            ascending, order = scores.sort(dim=-1)
            # On CUDA float32 sums differ from run to run, enough to move the edge.
            tail = ascending.softmax(-1).cumsum(-1, dtype=torch.float64) <= 1 - self.top_p
            tail[..., -1] = False  # the most probable token always stays
            scores = scores.masked_fill(torch.empty_like(tail).scatter_(-1, order, tail), -torch.inf)
        probs = scores.softmax(-1)
        if self.min_p > 0:
            kept = probs.where(probs >= self.min_p * probs.amax(-1, keepdim=True), 0)
            probs = kept / kept.sum(-1, keepdim=True)
        return probs


Mark = tuple[torch.Tensor | None, tuple[float, ...]]
"""Where the draws of `Uniforms` and of its generator stood."""


class Uniforms:
    """Numbers in [0, 1) for draws on the host, taken from a generator many at a time: one alone is as dear as all."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self._left: list[float] = []

    def next(self) -> float:
        if not self._left:
            self._left = torch.rand(AT_A_TIME, dtype=torch.float64, generator=self._generator).tolist()
        return self._left.pop()

    def mark(self) -> Mark:
        """Where the draws stand; a device's generator has its state on the host, so nothing waits."""
        return None if self._generator is None else self._generator.get_state(), tuple(self._left)

    def go_back(self, mark: Mark) -> None:
        """Draw again what was drawn since the mark, by a generator that was given: without one nothing is repeated."""
        state, left = mark
        self._left = list(left)
        if self._generator is not None and state is not None:
            self._generator.set_state(state)


def draw(weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:  # (..., V) -> (...)
    """One index of each row, with probability proportional to its weight, without waiting for the device."""
    return pick(weights, uniforms(weights.shape[:-1], weights.device, generator))


def uniforms(shape: Sequence[int], device: torch.device, generator: torch.Generator | None) -> torch.Tensor:  # (...)
    """Numbers in [0, 1), float64: all the randomness of a draw. Float32's would be too coarse for rare tokens."""
    return torch.rand(shape, dtype=torch.float64, device=device, generator=generator)


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


def sibling(generator: torch.Generator | None, device: torch.device) -> torch.Generator | None:
    """The generator itself if it is on ``device``, else a new one there, seeded with a draw from it."""
    return generator if generator is None or generator.device == device else offspring(generator, device)


def offspring(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """A new generator on ``device``, seeded with a draw from another one."""
    seed = torch.randint(1 << 62, (), generator=generator, device=generator.device)
    return torch.Generator(device).manual_seed(int(seed))


def read_signals(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    wanted: Set[Signal] = frozenset(DISTRIBUTION_SIGNALS),
    probs: torch.Tensor | None = None,
    sampling: Sampling | None = None,
) -> dict[Signal, torch.Tensor]:
    """Entropy in nats, top probability and the tokens' probability under the softmax at temperature 1.

    Args:
        logits: ``(..., V)``, raw.
        tokens: ``(...)`` int64.
        wanted: which of `DISTRIBUTION_SIGNALS`.
        probs: ``(..., V)`` float32, the distribution ``sampling`` makes of the logits; used where it is that softmax.

    Returns:
        ``(...)`` float32 of each signal wanted, in the order of `DISTRIBUTION_SIGNALS`.
    """
    found: dict[Signal, torch.Tensor] = {}
    if not wanted:
        return found
    if on_host(logits):
        rows = array(logits.float().reshape(-1, logits.shape[-1]))
        pairs = zip(rows, tokens.reshape(-1).tolist(), strict=True)
        numbers = np.array([Softmax(row).signals(token, wanted) for row, token in pairs], dtype=np.float32).T  # (F, n)
        names = [name for name in DISTRIBUTION_SIGNALS if name in wanted]
        return {
            name: torch.from_numpy(values).reshape(tokens.shape) for name, values in zip(names, numbers, strict=True)
        }
    plain = probs is not None and sampling is not None and sampling.plain
    raw = probs if probs is not None and plain else logits.float().softmax(-1)  # (..., V)
    if "entropy" in wanted:
        found["entropy"] = -(raw * raw.clamp_min(TINY).log()).sum(-1)  # 0 at 0, and a third of entr's time
    if "top_prob" in wanted:
        found["top_prob"] = raw.amax(-1)
    if "token_prob" in wanted:
        found["token_prob"] = raw.gather(-1, tokens[..., None])[..., 0]
    return found


def read_top_probs(logits: torch.Tensor) -> torch.Tensor:  # (..., V) -> (..., TOP_PROBS)
    """The `TOP_PROBS` largest probabilities of the softmax at temperature 1, descending; float32, 0 where V is less."""
    if on_host(logits):
        rows = array(logits.float().reshape(-1, logits.shape[-1]))
        found = np.array([Softmax(row).tops() for row in rows], dtype=np.float32)
        return torch.from_numpy(found).reshape(*logits.shape[:-1], TOP_PROBS)
    scores = logits.float()
    count = min(TOP_PROBS, scores.shape[-1])
    best = (scores.topk(count).values - scores.logsumexp(-1, keepdim=True)).exp()
    return torch.nn.functional.pad(best, (0, TOP_PROBS - count))
