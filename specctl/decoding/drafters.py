"""Drafting by a draft model or draft head."""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from specctl.decoding.draft import Draft
from specctl.decoding.draws import DrawGenerator, Uniforms, sibling
from specctl.decoding.logits.judging import draft_logits_of, numbers_on, stacked
from specctl.decoding.logits.token_sampler import (
    AcceptancePredictor,
    TokenSampler,
    own_accept_prob,
    packed_signals,
    predictors_read,
    signals_among,
    step_of,
)
from specctl.decoding.lookup import Agreement
from specctl.decoding.sampling import Sampling
from specctl.decoding.steps_ahead import Fed, Reach, StartedStep, StepsAhead
from specctl.models.passes.forward import Numbers
from specctl.models.passes.preparation_time import working_seconds
from specctl.models.passes.watching import States
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.models.running.slot import Slot
from specctl.policies import (
    DISTRIBUTION_SIGNALS,
    Resting,
    Signal,
    StoppingPolicy,
    draft_phase,
    longest_draft,
    never_stops,
    rests,
)
from specctl.records import DraftStep, Round, StopReason

if TYPE_CHECKING:
    import torch


class ModelDrafter:
    """A draft model that drafts until its stopping policy ends the block.

    Args:
        runner: the draft model or draft head.
        policy: asked after each token.
        record: signals to record even if the policy does not read them.
        predictor: predicts acceptance, on the runner's device; needed only for the signals ``accept_prob`` and
            ``own_accept_prob``, which a DISCO head computes.

    Raises:
        ValueError: a signal needs a head that is missing, or ``next_accept_prob`` is wanted from a draft that does not
            predict it.
    """

    def __init__(
        self,
        runner: Slot,
        policy: StoppingPolicy,
        record: Set[Signal] = frozenset(),
        predictor: AcceptancePredictor | DiscoPredictor | None = None,
    ) -> None:
        self.runner = self._model = runner
        self.policy = policy
        self._agreement = Agreement() if "agreement" in policy.signals | record else None
        self._signals = (policy.signals | record) - {"agreement"}  # signals of the draft's distributions
        self._predictor, self._disco = predictors_read(predictor, self._signals)
        self._foresees = "next_accept_prob" in self._signals
        self._foresee = runner.foresee
        if self._foresees and self._foresee is None:
            raise ValueError("next_accept_prob needs a draft head that predicts it")
        reads_previous = self._predictor is not None and self._predictor.reads_signals
        # (3,) DISTRIBUTION_SIGNALS of the last token drafted, for a head that reads them
        self._previous: Sequence[float] | torch.Tensor | None = (
            (1.0,) * len(DISTRIBUTION_SIGNALS) if reads_previous else None
        )
        # Signals cost little within a compiled pass, and with all of them one compiled pass serves all policies.
        reads_all = runner.specialises or reads_previous
        self._read = frozenset(DISTRIBUTION_SIGNALS) if reads_all else self._signals & set(DISTRIBUTION_SIGNALS)
        if self._disco is not None:
            self._read |= {"entropy"}
        self._sampling = Sampling()
        self._take_samplers()
        self._eos: Set[int] = frozenset()
        self._generator: DrawGenerator | None = None
        self._uniforms = Uniforms(None)
        self._start = 0
        self._begins = False  # whether the next draft is the text's first
        self._prompt_seconds = 0.0  # the prompt's share of the time of the text's first draft
        self._drafts = False  # in this round
        self._pending: Sequence[int] = ()
        self._rows: list[Numbers] = []  # the distributions of the round's tokens
        self._steps = StepsAhead(self._start_step, self._take_back, runner.device)

    @property
    def observed(self) -> int | None:
        return self.runner.observed if self.runner.reads_states else None

    def observe_states(self, start: int, states: States) -> None:
        if self.runner.reads_states:
            self.runner.observe_states(start, states)

    def begin(self, sampling: Sampling, eos: Set[int], generator: DrawGenerator | None) -> None:
        self._sampling, self._eos = sampling, eos
        self.runner = sampling.over(self._model)
        self._take_samplers()
        # A number of the host is copied to the device together with the token.
        self._generator = sibling(generator, None)
        self._uniforms = Uniforms(self._generator)
        self._begins = True
        self.policy.reset()

    def _take_samplers(self) -> None:
        tops = self._disco is not None
        ids = self.runner.draft_vocabulary
        self._sampler = TokenSampler(self._sampling, self._read, self._predictor, self._foresees, tops, ids)
        self._blind = replace(self._sampler, predictor=None)  # of steps without a state to predict from
        more = self._predictor is not None or tops  # than signals of the distribution
        self._taken = None if more else signals_among(self._sampler.fields, self._signals)
        self._model.wants_signals = self._sampler.takes_pass_signals and self.runner is self._model

    def starts(self) -> bool:
        self.policy.reset()
        return self.policy.draft_limit() > 0

    def prefill(self, sequence: Sequence[int], *, begins: bool = True, first: bool = True) -> None:
        if begins:
            self.runner = self._model  # without the token rules of the previous text
            self.policy.reset()  # the policy decides whether the draft reads the text at all
        # After a cached prefix, widths would be captured that no other pass has.
        if begins and first and not (self.runner.reads_states or self.runner.length):
            return
        if not (self.policy.draft_limit() and self.runner.room(len(sequence))):
            return
        if pending := sequence[self.runner.length : -1]:
            self.runner.extend(pending, keep=0)

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        threshold = self.policy.current_threshold
        begins, self._begins = self._begins, False
        wanted, room = self.policy.draft_limit() > 0, self.runner.room(len(sequence))
        self._drafts = wanted and room > 0
        if not self._drafts:
            return Draft([], None, (), StopReason.BUDGET if wanted else StopReason.MAX_DRAFT, threshold)
        budget = min(budget, room)
        runner, ahead, runs_ahead = self.runner, self._steps, self.runner.runs_ahead
        self._start = len(sequence)
        draw: Callable[[int], DraftStep] = self._read_step if runs_ahead else self._next_step
        if self._agreement is not None:
            draw = self._agreement.telling(sequence, draw)
        self._pending, self._rows = sequence[runner.length :], []
        together = 1  # how many steps end together with the first one
        if runs_ahead:
            most, every = longest_draft(self.policy, budget, runner.longest), never_stops(self.policy)
            ahead.begin(self._pending, most, Reach.ALL if every else Reach.ONE)
            together = most if every else 1
        if begins:
            self._prompt_seconds = 0.0
            draw = self._noting(draw, len(self._pending) - 1, together)
        steps, stop = draft_phase(self.policy, budget, self._eos, draw, runner.longest)
        if runs_ahead:
            ahead.end()
            self._rows = ahead.probs(len(steps))
        return Draft(
            [step.token for step in steps],
            stacked(self._rows[: len(steps)]) if steps and self._rows else None,  # (K, N)
            tuple(steps),
            stop,
            threshold,
            vocabulary=self.runner.draft_vocabulary,
            prompt_seconds=self._prompt_seconds if begins else 0.0,
        )

    def _noting(self, draw: Callable[[int], DraftStep], unread: int, steps: int) -> Callable[[int], DraftStep]:
        """Wrap ``draw`` to note when the first step, which reads ``unread`` tokens of the prompt, ends."""

        def noted(index: int) -> DraftStep:
            if index > 1:
                return draw(index)
            began = working_seconds()
            step = draw(index)
            self._prompt_seconds = (working_seconds() - began) * unread / (unread + steps)
            return step

        return noted

    def _next_step(self, index: int) -> DraftStep:
        """Draw one token, and wait for it."""
        sampler, packed, probs = self._drawn(self._pending, index)
        numbers = packed if isinstance(packed, list) else packed.tolist()
        self._pending = [int(numbers[0])]
        if probs is not None:
            self._rows.append(probs)
        return self._step(index, sampler, numbers)

    def _drawn(self, pending: Fed, index: int) -> "tuple[TokenSampler, list[float] | torch.Tensor, Numbers | None]":
        """Draw one token after ``pending``: the sampler, its numbers from one transfer, and the distribution."""
        # Before a round's first step no draft token has been fed, so there is no acceptance to predict.
        predicts = self._predictor is not None and index > 1
        uniform = None if self._sampling.greedy else self._uniforms.next()
        packed: list[float] | torch.Tensor
        probs: Numbers | None
        if len(pending) <= self.runner.widest_sample:
            sampler = self._sampler
            fed = pending if isinstance(pending, Sequence) else [pending[0]]
            previous = None if self._previous is None else numbers_on(self.runner.device, self._previous)
            packed, probs = self.runner.sample(fed, sampler, uniform, previous)
        else:
            sampler = self._sampler if predicts else self._blind
            fed = cast("Sequence[int]", pending)  # the pass reads its token on the device
            forward = self.runner.extend(fed, keep=1, hidden=predicts)
            state = None if forward.hidden is None else forward.hidden[0]  # (H,)
            # The hidden state belongs to the token drawn one step ago, so the signals must too.
            found, rows = draft_logits_of(forward).sample(sampler, [uniform], state, self._previous, self._foresee)
            packed, probs = found[0], None if rows is None else rows[0]
        if self._previous is not None:
            self._previous = packed_signals(packed)
        return sampler, packed, probs

    def _step(self, index: int, sampler: TokenSampler, numbers: Sequence[float]) -> DraftStep:
        """A token as a `DraftStep`, from the sampler's numbers on the host."""
        if self._taken is not None:
            return DraftStep(index, int(numbers[0]), *self._taken((*numbers, None)))
        found = dict(zip(sampler.fields, numbers, strict=True))
        if self._predictor is not None and index == 1:
            found["accept_prob"] = 1.0
        if self._disco is not None:
            found["own_accept_prob"] = own_accept_prob(self._disco, found, index)
        return step_of(index, found, self._signals)

    def _start_step(self, pending: Fed, index: int, doubtful: bool) -> StartedStep:
        """Start a step whose numbers the host reads later."""
        mark = self._uniforms.mark() if doubtful and not self._sampling.greedy else None
        sampler, packed, probs = self._drawn(pending, index)
        if isinstance(packed, list) or not self.runner.runs_ahead:  # its pass could not be captured
            values = packed if isinstance(packed, list) else packed.tolist()
            return StartedStep(sampler, values, [int(values[0])], probs, mark)
        return StartedStep(sampler, self._steps.readback.send(packed), packed[:1], probs, mark)

    def _read_step(self, index: int) -> DraftStep:
        step, numbers = self._steps.read(index)
        return self._step(index, step.sampler, numbers)

    def _take_back(self, step: StartedStep, count: int) -> None:
        """Undo a started step: the next draws are those that would have followed without it.

        Args:
            step: the step to undo.
            count: the number of steps before it in the round.
        """
        if not self.runner.reads_states:  # a draft head rolls back to its observed states by itself
            self.runner.rollback(self._start + count - 1)
        if step.mark is not None:
            self._uniforms.go_back(step.mark)

    def observe(self, round_: Round) -> None:
        self.policy.observe(round_)
        self.keep(round_)

    def rests(self) -> int:
        return rests(self.policy)

    def rested(self, rounds: int) -> None:
        cast("Resting", self.policy).rested(rounds)

    def keep(self, round_: Round) -> None:
        """Roll the cache back to the accepted tokens. The last of them may come from another source."""
        if not self._drafts:
            return  # nothing was read
        self.rollback(self._start + round_.accepted)

    def rollback(self, length: int) -> None:
        if self._agreement is not None:
            self._agreement.rollback(length)
        self.runner.rollback(length)
