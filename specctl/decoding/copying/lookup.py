"""Prompt lookup: draft tokens are copied from where the text's end occurred before (Saxena 2023)."""

from collections.abc import Sequence, Set
from typing import cast

from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.draws import DrawGenerator
from specctl.decoding.sampling import Sampling
from specctl.models.running.slot import Slot
from specctl.policies import LOOKUP_SIGNALS, Resting, Signal, StoppingPolicy, draft_phase, rests
from specctl.policies.match_rates import MatchRates
from specctl.records import DraftStep, Round, StopReason


class LookupDrafter(Drafter):
    """Copies what followed the latest occurrence of the text's end, until its stopping policy ends the block.

    The longest match counts (`SuffixIndex`). Where what followed it reaches the text's end, copying goes on with the
    draft's own tokens, so that a repeated phrase is repeated further. Where the last token is new to the text, the
    round drafts nothing. Only tokens of the sequence are indexed, never drafted ones.

    Every token is certain given the text, so its distribution is one-hot: token by token, a verifier keeps token x with
    its own probability p(x), and draws from the rest of p after a rejection. Rates are learned anew in each sequence.

    Args:
        runner: holds the text.
        policy: asked after each token.
        record: signals to record even if the policy does not read them.

    Raises:
        ValueError: a signal is wanted that a lookup does not have.
    """

    observed: int | None = None

    def __init__(self, runner: Slot, policy: StoppingPolicy, record: Set[Signal] = frozenset()) -> None:
        if unknown := (policy.signals | record) - LOOKUP_SIGNALS:
            raise ValueError(f"a lookup does not have {', '.join(sorted(unknown))}")
        assert runner.index is not None, "only a lookup's text is looked up"
        self.runner, self._places = runner, runner.index
        self.policy = policy
        self._foresees = "next_accept_prob" in policy.signals | record
        self._rates = MatchRates()
        self._eos: Set[int] = frozenset()
        self._matched = 0  # tokens of the round's match

    def begin(self, sampling: Sampling, eos: Set[int], generator: DrawGenerator | None) -> None:  # noqa: ARG002
        self._eos = eos
        self._rates = MatchRates()
        self.policy.reset()

    def prefill(self, sequence: Sequence[int], *, begins: bool = True, first: bool = True) -> None:  # noqa: ARG002
        if begins:
            self.policy.reset()
        if self.policy.draft_limit():
            self._index(sequence[:-1])

    def _index(self, sequence: Sequence[int]) -> None:
        self._places.append(sequence[self.runner.length :])

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        threshold = self.policy.current_threshold
        if not self.policy.draft_limit():
            return Draft([], None, (), StopReason.MAX_DRAFT, threshold)
        self._index(sequence)
        text, match = self._places.tokens, self._places.match
        self._matched = 0 if match is None else match.length
        copied: list[int] = []

        def copy(index: int) -> DraftStep:
            assert match is not None
            behind = match.end + len(copied) - len(text)  # from 0 on the text has ended, and the draft goes on
            token = copied[behind] if behind >= 0 else text[behind]
            copied.append(token)
            following = self._rates.rate(self._matched + index) if self._foresees else None
            return DraftStep(index, token, next_accept_prob=following)

        steps, stop = draft_phase(self.policy, budget, self._eos, copy, longest=0 if match is None else None)
        return Draft([step.token for step in steps], None, tuple(steps), stop, threshold)

    def observe(self, round_: Round) -> None:
        if round_.steps:
            verified = round_.accepted + (not round_.fully_accepted)
            outcomes = round_.chances or [float(place < round_.accepted) for place in range(verified)]
            for place, outcome in enumerate(outcomes):
                self._rates.learn(self._matched + place, outcome)
        self.policy.observe(round_)

    def rests(self) -> int:
        return rests(self.policy)

    def rested(self, rounds: int) -> None:
        cast("Resting", self.policy).rested(rounds)

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)
