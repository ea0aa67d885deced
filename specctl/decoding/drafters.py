"""Who writes ahead: drafters propose a block of tokens for someone else to verify."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch

from specctl.decoding.reading import SIGNALS, numbers, reader
from specctl.decoding.sampling import Sampling, arrivals, sibling
from specctl.models.runner import FusedRunner, Runner
from specctl.policies import Signal, StoppingPolicy
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
        self._fused = runner if isinstance(runner, FusedRunner) else None
        self._reader = reader(self._sampling, self._signals)
        self._eos: Set[int] = frozenset()
        self._generator: torch.Generator | None = None
        self._start = 0

    def begin(self, sampling: Sampling, eos: Set[int], generator: torch.Generator | None) -> None:
        self._sampling, self._eos = sampling, eos
        # Fused, all signals cost little, and one reader means one pass to compile or capture, whatever the policy.
        self._reader = reader(sampling, self._signals if self._fused is None else frozenset(SIGNALS))
        self._generator = sibling(generator, self.runner.device)
        self.policy.reset()

    def prefill(self, sequence: Sequence[int]) -> None:
        if pending := sequence[self.runner.length : -1]:
            self.runner.extend(pending, keep=0)

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        limit = self.policy.draft_limit()
        stop = StopReason.MAX_DRAFT if limit <= budget else StopReason.BUDGET
        threshold = self.policy.current_threshold
        steps: list[DraftStep] = []
        rows: list[torch.Tensor] = []
        self._start = len(sequence)
        pending = sequence[self.runner.length :]
        while len(steps) < min(limit, budget):
            step, probs = self._step(pending, len(steps) + 1)
            steps.append(step)
            if probs is not None:
                rows.append(probs)
            stops = self.policy.should_stop(step)
            if stops and not self.policy.keep_trigger:
                # Whatever the token is: keeping only an end of sequence would favour it.
                del steps[-1], rows[-1:]
                stop = StopReason.POLICY
                break
            if step.token in self._eos:
                stop = StopReason.EOS
                break
            if stops:
                stop = StopReason.POLICY
                break
            pending = [step.token]
        return Draft([step.token for step in steps], torch.stack(rows) if rows else None, tuple(steps), stop, threshold)

    def _step(self, pending: Sequence[int], index: int) -> tuple[DraftStep, torch.Tensor | None]:
        """Draw one token after ``pending`` and read it, with the signals wanted, in a single transfer."""
        if self._fused is not None and len(pending) == 1:
            noise = self._noise(self._fused.vocabulary)
            values, probs = self._fused.read(pending[0], self._reader, noise)
            token, *signals = values.tolist()
        else:
            logits = self.runner.extend(pending, keep=1).logits[0]  # (V,)
            found, probs = self._reader(logits, self._noise(len(logits)))
            token, *signals = numbers(found)
        known = zip(self._reader.names(), signals, strict=True)
        return DraftStep(index, int(token), **{name: value for name, value in known if name in self._signals}), probs

    def _noise(self, vocabulary: int) -> torch.Tensor | None:
        if self._sampling.greedy:
            return None
        return arrivals(vocabulary, self.runner.device, self._generator)  # (V,)

    def observe(self, round_: Round) -> None:
        self.policy.observe(round_)
        self.rollback(self._start + round_.accepted)

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)
