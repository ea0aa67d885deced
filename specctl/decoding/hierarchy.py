"""HSDDW's middle model: it verifies what a faster drafter wrote and is itself a drafter (Syu and Lee 2025)."""

from collections.abc import Sequence, Set

import torch

from specctl.decoding.drafters import Draft, Drafter
from specctl.decoding.reading import AcceptancePredictor, Reading, distribution_signals, fetch_rows, step_of
from specctl.decoding.round import verified_round
from specctl.decoding.sampling import Sampling, read_signals, sibling
from specctl.models.running.runner import Forward, Runner
from specctl.policies import DISTRIBUTION_SIGNALS, Signal, StoppingPolicy, collect_phase
from specctl.records import DraftStep, Round


class PreVerifiedDrafter:
    """A model that sends an inner drafter back to work until its own policy hesitates, then offers what it collected.

    Each inner round is speculative sampling with this model as the verifier, so the tokens it keeps and the one it
    adds are lawful draws of this model, and every one carries this model's own distribution to whoever verifies the
    block. The policy is asked about each collected token in order, with this model's signals at that token's place;
    when it wants to stop, the block is offered whole, the tokens behind the trigger included. Only a rule that says
    ``keep_trigger = false``, which reads distributions and no drawn tokens, has the trigger and all behind it dropped.

    The paper's pseudocode counts only the inner drafter's accepted tokens towards its limit (n_tot); here the token
    this model draws counts too, since it is drafted text like the others. Inner rounds leave a place for it, so that a
    block never passes the policy's ``draft_limit`` nor the budget.

    Args:
        inner: a model with a policy, or a hierarchy again.
        runner: the middle model.
        policy: asked after each inner round about the tokens it added.
        once: offer the block after a single inner round; the policy then only limits its length.
        record: signals to compute whether or not the policy reads them, for people to see.
        head: foretells acceptance, on the runner's device; needed for the signal ``accept_prob`` alone.

    Raises:
        ValueError: ``accept_prob`` is wanted and there is no head.
    """

    def __init__(
        self,
        inner: Drafter,
        runner: Runner,
        policy: StoppingPolicy,
        *,
        once: bool = False,
        record: Set[Signal] = frozenset(),
        head: AcceptancePredictor | None = None,
    ) -> None:
        self.inner = inner
        self.runner = runner
        self.policy = policy
        self._once = once
        self._signals = policy.signals | record
        self._head = head if "accept_prob" in self._signals else None
        if self._head is None and "accept_prob" in self._signals:
            raise ValueError("accept_prob needs a head")
        # (3,) DISTRIBUTION_SIGNALS of the last token collected, for a head that reads them
        self._previous: torch.Tensor | None = None
        self._sampling = Sampling()
        self._eos: Set[int] = frozenset()
        self._generator: torch.Generator | None = None
        self._start = 0

    def begin(self, sampling: Sampling, eos: Set[int], generator: torch.Generator | None) -> None:
        self._sampling, self._eos = sampling, eos
        self._generator = sibling(generator, self.runner.device)
        self.policy.reset()
        self.inner.begin(sampling, eos, self._generator)

    def prefill(self, sequence: Sequence[int]) -> None:
        if pending := sequence[self.runner.length : -1]:
            self.runner.extend(pending, keep=0)
        self.inner.prefill(sequence)

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        threshold = self.policy.current_threshold
        text = list(sequence)
        rows: list[torch.Tensor] = []
        self._start = len(sequence)

        def pre_verify(index: int, first: int, room: int) -> tuple[Round, list[DraftStep]]:
            added: list[DraftStep] = []

            def read(forward: Forward, probs: torch.Tensor | None, tokens: Sequence[int]) -> None:
                added.extend(self._steps(forward, probs, tokens, first))
                if probs is not None:
                    rows.append(probs[: len(tokens)])

            round_ = verified_round(
                self.runner,
                self.inner,
                text,
                room,
                self._sampling,
                self._eos,
                self._generator,
                index=index,
                read=read,
                hidden=self._head is not None,
                chances=False,  # replay does not know them at this level, and a policy must learn alike in both
            )
            text.extend(round_.emitted)
            return round_, added

        steps, stop, inner = collect_phase(self.policy, self._once, budget, self._eos, pre_verify)
        block = torch.cat(rows)[: len(steps)] if rows else None  # (K, V)
        return Draft([step.token for step in steps], block, tuple(steps), stop, threshold, tuple(inner))

    def _steps(
        self, forward: Forward, probs: torch.Tensor | None, tokens: Sequence[int], first: int
    ) -> list[DraftStep]:
        """The tokens with the signals wanted, all read in a single transfer.

        Args:
            forward: K + 1 rows, of which the first n are the tokens' places.
            probs: ``(K + 1, V)``, the distributions there; None when greedy.
            tokens: n ids.
            first: the first one's place in the block, from 1.
        """
        if not self._signals:
            return [DraftStep(first + position, token) for position, token in enumerate(tokens)]
        found = fetch_rows(self._read(forward, probs, tokens))
        if self._head is not None and first == 1:
            found[0]["accept_prob"] = 1.0  # no draft token stands before it
        return [step_of(first + position, numbers, self._signals) for position, numbers in enumerate(found)]

    def _read(self, forward: Forward, probs: torch.Tensor | None, tokens: Sequence[int]) -> Reading:  # (n,) each
        reads_signals = self._head is not None and self._head.reads_signals
        wanted = frozenset(DISTRIBUTION_SIGNALS) if reads_signals else self._signals - {"accept_prob"}
        logits, count = forward.logits, len(tokens)
        chosen = torch.tensor(tokens, device=logits.device)
        probs = None if probs is None else probs[:count]
        reading = Reading(chosen, **read_signals(logits[:count], chosen, wanted, probs, self._sampling))
        if self._head is None or forward.hidden is None:
            return reading
        # A row's hidden state is of the token before it, and so must the signals be.
        previous = None
        if reads_signals:
            own = distribution_signals(reading)  # (n, 3)
            last = torch.zeros_like(own[0]) if self._previous is None else self._previous
            previous, self._previous = torch.cat([last[None], own[:-1]]), own[-1]
        return reading._replace(accept_prob=self._head.accept_prob(forward.hidden[:count], previous))

    def observe(self, round_: Round) -> None:
        self.policy.observe(round_)
        self.rollback(self._start + round_.accepted)

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)
        self.inner.rollback(length)
