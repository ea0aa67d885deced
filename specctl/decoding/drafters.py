"""Who writes ahead: drafters propose a block of tokens for someone else to verify."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch

from specctl.decoding.sampling import Sampling, draw, sibling
from specctl.models.runner import Forward, Runner
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


Head = Callable[[torch.Tensor], torch.Tensor]
"""From a last hidden state ``(H,)`` to the chance ``()`` that the token it belongs to will be accepted."""


class ModelDrafter:
    """A draft model that a stopping policy stops.

    Args:
        runner: the draft model.
        policy: asked after each token.
        record: signals to compute whether or not the policy reads them, for people to see.
        head: foretells acceptance, on the runner's device; needed for the signal ``accept_prob`` alone.

    Raises:
        ValueError: ``accept_prob`` is wanted and there is no head.
    """

    def __init__(
        self, runner: Runner, policy: StoppingPolicy, record: Set[Signal] = frozenset(), head: Head | None = None
    ) -> None:
        self.runner = runner
        self.policy = policy
        self._signals = policy.signals | record
        self._head = head if "accept_prob" in self._signals else None
        if self._head is None and "accept_prob" in self._signals:
            raise ValueError("accept_prob needs a head")
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
        limit = self.policy.draft_limit()
        stop = StopReason.MAX_DRAFT if limit <= budget else StopReason.BUDGET
        threshold = self.policy.current_threshold
        steps: list[DraftStep] = []
        rows: list[torch.Tensor] = []
        self._start = len(sequence)
        pending = sequence[self.runner.length :]
        while len(steps) < min(limit, budget):
            # On a round's first step nothing drafted has been fed yet that a head could judge.
            judging = self._head is not None and bool(steps)
            forward = self.runner.extend(pending, keep=1, hidden=judging)
            step, probs = self._step(forward, len(steps) + 1)
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

    def _step(self, forward: Forward, index: int) -> tuple[DraftStep, torch.Tensor | None]:
        """Draw one token and read it, with the signals wanted, in a single transfer."""
        logits = forward.logits[0]  # (V,)
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
        if self._head is not None and forward.hidden is not None:
            found.append(self._head(forward.hidden[0]))
        # float64 holds ids and probabilities alike
        values = torch.stack([value.double() for value in found]).tolist()
        names = [name for name in ("entropy", "top_prob", "token_prob") if name in self._signals]
        accept_prob = None
        if self._head is not None:
            accept_prob = 1.0 if forward.hidden is None else values.pop()
        signals = dict(zip(names, values[1:], strict=True))
        return DraftStep(index, int(values[0]), **signals, accept_prob=accept_prob), probs

    def observe(self, round_: Round) -> None:
        self.policy.observe(round_)
        self.rollback(self._start + round_.accepted)

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)
