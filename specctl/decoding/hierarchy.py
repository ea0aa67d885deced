"""HSDDW's middle model, which verifies a faster drafter's tokens and is itself a drafter (Syu and Lee 2025)."""

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING

from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.draws import DrawGenerator, sibling
from specctl.decoding.logits.judging import logits_of
from specctl.decoding.logits.token_sampler import (
    AcceptancePredictor,
    TokenSampler,
    own_accept_prob,
    predictors_read,
    step_of,
)
from specctl.decoding.round import prefill, verified_round
from specctl.decoding.sampling import Sampling
from specctl.models.passes.forward import Forward, Numbers, joined_numbers
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.models.running.slot import Slot
from specctl.policies import DISTRIBUTION_SIGNALS, Signal, StoppingPolicy, collect_phase
from specctl.records import DraftStep, Round

if TYPE_CHECKING:
    import torch


class PreVerifiedDrafter(Drafter):
    """A draft model that runs inner rounds over a faster drafter until its own policy stops, then offers the block.

    Each inner round is speculative sampling with this model as the verifier. So the tokens it keeps and the one it adds
    are exact draws of this model, and each carries this model's own distribution to the next verifier. The policy is
    asked about each collected token in order, with this model's signals at that token's position. When it stops, the
    whole block is offered, including the tokens after the trigger. Only a rule with ``keep_trigger = false``, which
    reads distributions and no drawn tokens, drops the trigger and everything after it.

    The paper's pseudocode counts only the inner drafter's accepted tokens towards its limit (n_tot). Here the token
    that this model draws counts too, since it is a draft token like the others. Inner rounds leave one position for it,
    so that a block never exceeds the policy's ``draft_limit`` or the budget.

    Args:
        inner: a model with a policy, or a hierarchy again.
        runner: the middle model.
        policy: asked after each inner round about the tokens it added.
        once: offer the block after a single inner round; the policy then only limits its length.
        record: signals to record even if the policy does not read them.
        predictor: predicts acceptance, on the runner's device; needed only for the signals ``accept_prob`` and
            ``own_accept_prob``.

    Raises:
        ValueError: a signal needs a head that is missing; or the middle model is a draft head. A draft head reads the
            tokens of a block one by one, so verification gains it nothing.
    """

    def __init__(
        self,
        inner: Drafter,
        runner: Slot,
        policy: StoppingPolicy,
        *,
        once: bool = False,
        record: Set[Signal] = frozenset(),
        predictor: AcceptancePredictor | DiscoPredictor | None = None,
    ) -> None:
        if runner.reads_states:
            raise ValueError("a draft head cannot verify a draft in one pass")
        self.inner = inner
        self.runner = self._model = runner
        self.policy = policy
        self._once = once
        self._signals = policy.signals | record
        self._predictor, self._disco = predictors_read(predictor, self._signals)
        if "next_accept_prob" in self._signals:
            raise ValueError("a draft that verifies another draft makes no prediction for its next token")
        reads_signals = self._predictor is not None and self._predictor.reads_signals
        wanted = frozenset(DISTRIBUTION_SIGNALS) if reads_signals else self._signals & set(DISTRIBUTION_SIGNALS)
        if self._disco is not None:
            wanted |= {"entropy"}
        self._sampler = TokenSampler(Sampling(), wanted, self._predictor, tops=self._disco is not None)
        # (3,) DISTRIBUTION_SIGNALS of the last token collected, for a head that reads them
        self._previous: Sequence[float] | torch.Tensor | None = None
        self._sampling = Sampling()
        self._eos: Set[int] = frozenset()
        self._generator: DrawGenerator | None = None
        self._start = 0

    def begin(self, sampling: Sampling, eos: Set[int], generator: DrawGenerator | None) -> None:
        self._sampling, self._eos = sampling, eos
        self.runner = sampling.over(self._model)
        self._generator = sibling(generator, self.runner.device)
        self.policy.reset()
        self.inner.begin(sampling, eos, self._generator)

    @property
    def observed(self) -> int | None:
        return None  # a faster draft head reads this model's states

    def prefill(self, sequence: Sequence[int], *, begins: bool = True, first: bool = True) -> None:  # noqa: ARG002
        if begins:
            self.runner = self._model
            self.policy.reset()
        if self.policy.draft_limit() and self.runner.room(len(sequence)):
            prefill(self.runner, self.inner, sequence, begins=begins)

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        threshold = self.policy.current_threshold
        text = list(sequence)
        rows: list[Numbers] = []
        self._start = len(sequence)
        budget = min(budget, self.runner.room(self._start))

        def pre_verify(index: int, first: int, room: int) -> tuple[Round, list[DraftStep]]:
            added: list[DraftStep] = []
            seen = self.inner.observed
            if seen is not None and seen < len(text) - 2:
                # An empty block was offered. A draft head can draft without the state of one position, never of more.
                # Its draft depends on where its round begins and on whether that state is missing.
                prefill(self.runner, self.inner, text, begins=False)

            def read(forward: Forward, probs: Numbers | None, tokens: Sequence[int]) -> None:
                added.extend(self._steps(forward, tokens, first))
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
                hidden=self._predictor is not None,
                chances=False,  # replay lacks them at this level, and a policy must learn alike live and in replay
            )
            text.extend(round_.emitted)
            return round_, added

        steps, stop, inner = collect_phase(self.policy, self._once, budget, self._eos, pre_verify)
        probs = joined_numbers(rows)[: len(steps)] if steps and rows else None  # (K, V)
        return Draft([step.token for step in steps], probs, tuple(steps), stop, threshold, tuple(inner))

    def _steps(self, forward: Forward, tokens: Sequence[int], first: int) -> list[DraftStep]:
        """The tokens with the signals wanted, in a single transfer.

        Args:
            forward: K + 1 rows; the first n predict the tokens.
            tokens: n ids.
            first: position of the first token in the block, from 1.
        """
        if not self._signals:
            return [DraftStep(first + position, token) for position, token in enumerate(tokens)]
        rows, last = logits_of(forward).describe(self._sampler, tokens, forward.hidden, self._previous)
        self._previous = last
        found = [dict(zip(self._sampler.fields, row, strict=True)) for row in rows]
        if self._predictor is not None and first == 1:
            found[0]["accept_prob"] = 1.0  # no draft token precedes it
        if self._disco is not None:
            for index, numbers in enumerate(found, start=first):
                numbers["own_accept_prob"] = own_accept_prob(self._disco, numbers, index)
        return [step_of(first + position, numbers, self._signals) for position, numbers in enumerate(found)]

    def observe(self, round_: Round) -> None:
        self.policy.observe(round_)
        self.keep(round_)

    def keep(self, round_: Round) -> None:
        """See `ModelDrafter`."""
        self.rollback(self._start + round_.accepted)

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)
        self.inner.rollback(length)
