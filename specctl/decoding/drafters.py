"""Who writes ahead: drafters propose a block of tokens for someone else to verify."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch

from specctl.decoding.sampling import Sampling, draw, sibling
from specctl.models.runner import Runner
from specctl.policies import Signal, StoppingPolicy, draft_phase
from specctl.records import DraftStep, Round, StopReason


@dataclass(frozen=True, slots=True)
class Draft:
    """A block of tokens with the distributions they were drawn from.

    Attributes:
        tokens: K ids.
        probs: ``(K, V)`` float32; None when greedy, where each is one-hot at its token.
        steps: what was seen at each token.
        stop: why drafting ended.
        threshold: the policy's threshold while it drafted.
        inner: the rounds of the level below, in a hierarchy.
    """

    tokens: list[int]
    probs: torch.Tensor | None
    steps: tuple[DraftStep, ...]
    stop: StopReason | None
    threshold: float | None = None
    inner: tuple[Round, ...] = ()


class Drafter(Protocol):
    """Proposes blocks; every token carries the distribution it was drawn from."""

    def begin(self, sampling: Sampling, eos: Set[int], generator: torch.Generator | None) -> None:
        """A new sequence begins, to be drawn with these; caches are left alone.

        The verifier's own sampling comes in here because exactness needs both distributions processed alike.
        """

    def prefill(self, sequence: Sequence[int]) -> None:
        """Cache all but the last token of the prompt."""

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        """Draft at most ``budget`` tokens after ``sequence``."""

    def observe(self, round_: Round) -> None:
        """The block was judged: adapt, and forget what was refused."""

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the sequence."""


class ModelDrafter:
    """A draft model that a stopping policy stops.

    Args:
        runner: the draft model.
        policy: asked after each token.
        record: signals to compute whether or not the policy reads them, for people to see.
    """

    def __init__(self, runner: Runner, policy: StoppingPolicy, record: Set[Signal] = frozenset()) -> None:
        self.runner = runner
        self.policy = policy
        self._signals = policy.signals | record
        self._sampling = Sampling()
        self._eos: Set[int] = frozenset()
        self._generator: torch.Generator | None = None
        self._start = 0

    def begin(self, sampling: Sampling, eos: Set[int], generator: torch.Generator | None) -> None:
        self._sampling, self._eos = sampling, eos
        self._generator = sibling(generator, self.runner.device)
        self.policy.reset()

    def prefill(self, sequence: Sequence[int]) -> None:
        if pending := sequence[self.runner.length : -1]:
            self.runner.extend(pending, keep=0)

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        threshold = self.policy.current_threshold
        rows: list[torch.Tensor] = []
        self._start = len(sequence)
        pending = sequence[self.runner.length :]

        def propose(index: int) -> DraftStep:
            nonlocal pending
            logits = self.runner.extend(pending, keep=1).logits[0]  # (V,)
            step, probs = self._step(logits, index)
            if probs is not None:
                rows.append(probs)
            pending = [step.token]
            return step

        steps, stop = draft_phase(self.policy, budget, self._eos, propose)
        probs = torch.stack(rows[: len(steps)]) if steps and rows else None  # (K, V)
        return Draft([step.token for step in steps], probs, tuple(steps), stop, threshold)

    def _step(self, logits: torch.Tensor, index: int) -> tuple[DraftStep, torch.Tensor | None]:
        """Draw one token and read it, with the signals wanted, in a single transfer."""
        probs: torch.Tensor | None = None
        if self._sampling.greedy:
            token = logits.argmax(-1)
        else:
            probs = self._sampling.probs(logits)
            token = draw(probs, self._generator)
        if not self._signals:
            return DraftStep(index, int(token)), probs
        raw = probs if probs is not None and self._sampling.plain else logits.float().softmax(-1)  # (V,)
        found = [token]
        if "entropy" in self._signals:
            found.append(torch.special.entr(raw).sum())
        if "top_prob" in self._signals:
            found.append(raw.amax())
        if "token_prob" in self._signals:
            found.append(raw.gather(0, token[None])[0])
        # float64 holds ids and probabilities alike
        values = torch.stack([value.double() for value in found]).tolist()
        names = [name for name in ("entropy", "top_prob", "token_prob") if name in self._signals]
        return DraftStep(index, int(values[0]), **dict(zip(names, values[1:], strict=True))), probs

    def observe(self, round_: Round) -> None:
        self.policy.observe(round_)
        self.rollback(self._start + round_.accepted)

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)
