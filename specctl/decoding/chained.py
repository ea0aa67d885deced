"""A chain of a lookup and a draft model: in each round the source expected to bring more tokens drafts."""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import DrawGenerator
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.lookup import Follower
from specctl.decoding.sampling import Sampling
from specctl.models.passes.watching import States
from specctl.policies.source_choice import SourceChoice
from specctl.records import DraftStep, ExtraToken, Round, StopReason

REPEATED, RARE = 2, 0.1
"""A token counts as repeated if the lookup predicted it after a match of at least REPEATED tokens. If fewer than RARE
of the last tokens are repeated, there is little to copy: the share is 2% in stories sampled at temperature 1, and half
in a text that repeats itself.
"""
MEMORY, FIRST = 15 / 16, 0.2
"""The factor on the weight of earlier tokens in that share, and its initial value."""
SHORTEST_REST, LONGEST_REST, QUICK = 2, 8, 5e-3
"""The lengths of the first and the longest rest of the lookup, in rounds. Each rest is twice as long as the last one,
until repetition is found. Rounds of at least QUICK seconds have no rests: the lookup takes less than 1% of their time,
and where a pass of any width takes as long, even a rarely right copy pays. After a rest, the tokens written meanwhile
are looked up at once.
"""


class Chaining:
    """Follows a text and its rounds. Chooses the tokens to copy, either instead of a model's draft or after it.

    Where a text hardly repeats itself and rounds are short, the lookup soon takes part in only one round of nine. A
    lookup costs 2% of a small model's time, and a copy that is rarely right displaces better drafts.

    Args:
        earlier: the number of tokens from answers to earlier prompts that may be copied too.
    """

    def __init__(self, earlier: int = 0) -> None:
        self._choice = SourceChoice()
        self._text = Follower(earlier)
        self._before = self._after = 0  # lengths of the matches before the round and after the model's tokens
        self._wrote = False  # whether the target has added tokens to the text
        self._share = FIRST  # fading share of repeated tokens
        self._rest, self._pause = 0, SHORTEST_REST  # rounds left in the current rest, and rounds in the next one
        self._looks = True  # whether the lookup takes part in this round

    @property
    def length(self) -> int:
        """How many tokens of the text have been read."""
        return len(self._text)

    def begin(self) -> None:
        """A new text begins."""
        self._choice.begin()
        self._text.answer_begins()
        self._wrote = False
        self._share, self._rest, self._pause = FIRST, 0, SHORTEST_REST

    def read_prompt(self, tokens: Sequence[int]) -> None:
        """Add tokens that the target did not generate."""
        self._text.read(tokens)

    def instead(self, written: Sequence[int], budget: int, *, model: Callable[[], bool]) -> list[int]:
        """Tokens to copy instead of the model's draft; called first in a round. Empty where the model is to draft.

        Args:
            written: tokens added to the text since the last round; before the first round, the rest of the prompt.
            budget: the most tokens to draft.
            model: returns whether the model would draft; called only where the lookup takes part in the round.
        """
        self._looks = not self._rest
        if not self._looks:
            self._rest -= 1
            return []
        if self._wrote:
            self._share *= MEMORY ** len(written)
            self._text.read(written, self._learn)
        else:  # the prompt's last tokens
            self._text.read(written)
        self._wrote = True
        match = self._text.match
        self._before = self._after = 0 if match is None else match.length
        count = self._choice.instead(self._before, budget, model=model())
        return self._text.copied(match, (), count) if match is not None and count else []

    def behind(self, drafted: Sequence[int], stop: StopReason | None, budget: int) -> list[int]:
        """Tokens to copy after the model's draft.

        Args:
            drafted: the draft.
            stop: why the draft ended.
            budget: the most tokens to draft, these included.
        """
        if not self._looks or not drafted or stop not in (StopReason.POLICY, StopReason.MAX_DRAFT):
            return []
        match = self._text.after(drafted)
        self._after = 0 if match is None else match.length
        count = self._choice.behind(len(drafted), self._after, budget - len(drafted))
        return self._text.copied(match, drafted, count) if match is not None and count else []

    def observe(self, round_: Round) -> None:
        """Learn from a round in which the lookup took part."""
        if not self._looks:
            return
        self._choice.observe(round_, self._before, self._after)
        if self._share >= RARE:
            self._pause = SHORTEST_REST
        elif round_.total_seconds < QUICK:
            self._rest, self._pause = self._pause, min(2 * self._pause, LONGEST_REST)

    def _learn(self, length: int, hit: bool) -> None:
        self._choice.learn(length, hit)
        if hit and length >= REPEATED:
            self._share += 1 - MEMORY

    def of_model(self, round_: Round) -> Round:
        """A round without its copied tokens, as the model's policy sees it."""
        if not round_.copied:
            return round_
        drafted = round_.drafted - round_.copied
        widening = min(self._choice.widening(drafted, round_.copied), round_.verify_seconds / 2)
        return replace(
            round_,
            steps=round_.steps[:drafted],
            accepted=min(round_.accepted, drafted),
            extra=round_.extra if round_.accepted <= drafted else round_.emitted[drafted],
            extra_kind=round_.extra_kind if round_.accepted < drafted else ExtraToken.BONUS,
            chances=None if round_.chances is None else round_.chances[:drafted],
            verify_seconds=round_.verify_seconds - widening,
            total_seconds=round_.total_seconds - widening,
            copied=0,
        )

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the text."""
        self._text.rollback(length)


def with_copy(
    drafted: Sequence[DraftStep], copied: Sequence[int], budget: int, eos: Set[int]
) -> tuple[tuple[DraftStep, ...], StopReason]:
    """A draft followed by copied tokens up to an end of sequence, and the reason why it ends.

    Args:
        drafted: the model's tokens.
        copied: at least one id.
        budget: the most tokens of both.
        eos: ids that end the sequence.
    """
    end = next((number for number, token in enumerate(copied, start=1) if token in eos), None)
    steps = (*drafted, *(DraftStep(index, token) for index, token in enumerate(copied[:end], len(drafted) + 1)))
    if end is not None:
        return steps, StopReason.EOS
    return steps, StopReason.BUDGET if len(steps) == budget else StopReason.POLICY


class ChainedDrafter(Drafter):
    """In each round copies from the text, or lets a model draft and perhaps appends a copy.

    Where the lookup drafts, the model does not run; it reads the missed tokens when it next drafts. The model's own
    policy stops its drafts, and sees these rounds without the copied tokens. `SourceChoice` decides how long copies
    are. The model never drafts after a copy. One more copied token costs only a wider pass; where even that does not
    pay, a drafted token does not either, since it also costs a draft step and is as rarely reached.

    The choice of a token's source depends on the tokens before it and on times, never on the token drawn. So each token
    carries the distribution that it was drawn from, one-hot for a copied token, and verification is exact.

    Args:
        model: drafts where the lookup does not.
        earlier: the number of tokens from answers to earlier prompts that may be copied too.
    """

    def __init__(self, model: ModelDrafter | PreVerifiedDrafter, earlier: int = 0) -> None:
        self.model = model
        self._chaining = Chaining(earlier)
        self._eos: Set[int] = frozenset()
        self._asked = False  # whether the model was asked in this round

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
            self.model.keep(round_)  # a draft head has received the states of accepted copies too

    def rollback(self, length: int) -> None:
        self._chaining.rollback(length)
        self.model.rollback(length)
