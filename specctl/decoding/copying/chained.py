"""A chain of two sources: a lookup and a model, of which the one drafts that is expected to bring more."""

from collections.abc import Sequence, Set
from dataclasses import replace

from specctl.decoding.copying.chaining import Chaining, with_copy
from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import DrawGenerator
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.sampling import Sampling
from specctl.models.passes.watching import States
from specctl.records import Round


class ChainedDrafter(Drafter):
    """In each round copies from the text, or lets a model draft and perhaps copies behind what it wrote.

    Where the lookup drafts the model is left alone, and reads what it missed when it next drafts. What it drafts is
    stopped by its own policy, which sees these rounds as if nothing had been copied behind; copies are as long as pays
    (`SourceChoice`). No model drafts behind a copy: where one more copied token does not pay, which costs only the
    wider pass, neither does one that costs a draft step more and is as seldom looked at.

    Which source writes a token follows from the tokens before it and from times, never from what is drawn for its
    place. So each token's distribution is what it was drawn from, one-hot for a copied one, and verification is exact.

    Args:
        model: drafts where the lookup does not.
        earlier: of how many tokens answers to earlier prompts are copied from too.
    """

    def __init__(self, model: ModelDrafter | PreVerifiedDrafter, earlier: int = 0) -> None:
        self.model = model
        self._chaining = Chaining(earlier)
        self._eos: Set[int] = frozenset()
        self._asked = False  # the model, in this round

    @property
    def observed(self) -> int | None:
        return self.model.observed

    def observe_states(self, start: int, states: States) -> None:
        self.model.observe_states(start, states)

    def begin(self, sampling: Sampling, eos: Set[int], generator: DrawGenerator | None) -> None:
        self._eos = eos
        self._chaining.begin()
        self.model.begin(sampling, eos, generator)

    def prefill(self, sequence: Sequence[int], *, begins: bool = True, first: bool = True) -> None:
        self._chaining.read_prompt(sequence[self._chaining.length : -1])
        self.model.prefill(sequence, begins=begins, first=first)

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        chaining, policy = self._chaining, self.model.policy
        written = sequence[chaining.length :]
        room = self.model.runner.room(len(sequence))
        copied = chaining.instead(written, budget, model=lambda: policy.draft_limit() > 0 and room > 0)
        self._asked = not copied
        if self._asked:
            draft = self.model.draft(sequence, budget)
            copied = chaining.behind(draft.tokens, draft.stop, budget)
        else:
            draft = Draft([], None, (), None, policy.current_threshold)
        if not copied:
            return draft
        steps, stop = with_copy(draft.steps, copied, budget, self._eos)
        tokens = [step.token for step in steps]
        return replace(draft, tokens=tokens, steps=steps, stop=stop, copied=len(tokens) - len(draft.tokens))

    def observe(self, round_: Round) -> None:
        self._chaining.observe(round_)
        if self._asked:
            self.model.policy.observe(self._chaining.of_model(round_))
            self.model.keep(round_)  # a draft head was shown the states of accepted copies too

    def rollback(self, length: int) -> None:
        self._chaining.rollback(length)
        self.model.rollback(length)
