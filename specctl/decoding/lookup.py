"""Copying from the text so far: following the text, drafting by copying, and the signal of agreement with a copy."""

from collections.abc import Callable, Sequence, Set
from typing import cast

from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.draws import DrawGenerator
from specctl.decoding.sampling import Sampling
from specctl.models.running.lookup import Match, SuffixIndex
from specctl.models.running.slot import Slot
from specctl.policies import LOOKUP_SIGNALS, Resting, Rule, Signal, StoppingPolicy, draft_phase, rests
from specctl.policies.source_choice import MatchRates
from specctl.records import DraftStep, Round, StopReason


class LookupDrafter(Drafter):
    """Copies what followed the latest occurrence of the text's last tokens, until its stopping policy ends the block.

    The longest match counts (`SuffixIndex`). Where the copy reaches the text's end, it goes on with the draft's own
    tokens, so that a repeated phrase is repeated further. Where the last token is new to the text, the round drafts
    nothing. Only tokens of the sequence are indexed, never drafted ones.

    Each token is determined by the text, so its distribution is one-hot. Token by token, the verifier accepts token x
    with its own probability p(x), and draws from the rest of p after a rejection. Rates are learned anew in each
    sequence.

    Args:
        runner: its cache holds the text.
        policy: asked after each token.
        record: signals to record even if the policy does not read them.

    Raises:
        ValueError: a wanted signal is one that a lookup does not have.
    """

    observed: int | None = None

    def __init__(self, runner: Slot, policy: StoppingPolicy, record: Set[Signal] = frozenset()) -> None:
        if unknown := (policy.signals | record) - LOOKUP_SIGNALS:
            raise ValueError(f"a lookup does not have {', '.join(sorted(unknown))}")
        assert runner.index is not None, "only a lookup's text is looked up"
        self.runner, self._places = runner, runner.index
        self.policy = policy
        self._foresees = "next_accept_prob" in policy.signals | record
        self._expects = policy if isinstance(policy, Rule) and type(policy).expect is not Rule.expect else None
        self._rates = MatchRates()
        self._eos: Set[int] = frozenset()
        self._matched = 0  # length of the round's match
        self._first: int | None = None  # the round's first token, if there is a match

    def begin(self, sampling: Sampling, eos: Set[int], generator: DrawGenerator | None) -> None:  # noqa: ARG002
        self._eos = eos
        self._rates = MatchRates()
        self.policy.reset()

    def prefill(self, sequence: Sequence[int], *, begins: bool = True, first: bool = True) -> None:  # noqa: ARG002
        if begins:
            self.policy.reset()
        if self._expects is not None or self.policy.draft_limit():
            self._index(sequence[:-1])

    def _index(self, sequence: Sequence[int]) -> None:
        if pending := sequence[self.runner.length :]:
            self.runner.extend(pending, keep=0)

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        threshold = self.policy.current_threshold
        if self._expects is None and not self.policy.draft_limit():
            self._first = None
            return Draft([], None, (), StopReason.MAX_DRAFT, threshold)
        self._index(sequence)
        text, match = self._places.tokens, self._places.match
        self._matched, self._first = (0, None) if match is None else (match.length, text[match.end])
        if self._expects is not None:
            self._expects.expect(0.0 if match is None else self._rates.rate(self._matched))
        copied: list[int] = []

        def copy(index: int) -> DraftStep:
            assert match is not None
            # From 0 on the copy has passed the text's end and goes on with the draft.
            behind = match.end + len(copied) - len(text)
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
        elif self._first is not None and round_.extra is not None:
            self._rates.learn(self._matched, float(round_.extra == self._first))
        self.policy.observe(round_)

    def rests(self) -> int:
        return rests(self.policy)

    def rested(self, rounds: int) -> None:
        cast("Resting", self.policy).rested(rounds)

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)


LONGEST_GRAM = 3  # Suffixes up to this length are looked up again; a match that stays right grows longer
BETWEEN = -1  # Separates texts, and is never copied


class Follower:
    """Follows a growing text in an earlier part of it while the two agree, else looks its last tokens up again.

    So the copy at a position depends only on the text before it and on the stored earlier answers.

    Args:
        earlier: how many of the latest tokens from answers to earlier prompts are stored. There may be twice as many
            for a while.
    """

    def __init__(self, earlier: int = 0) -> None:
        self._index = SuffixIndex(LONGEST_GRAM)
        self._earlier = earlier
        self._begin = 0  # where the text begins in the index, after the earlier answers
        self._prompt = 0  # number of leading tokens that the target did not generate
        self.match: Match | None = None

    def __len__(self) -> int:
        return len(self._index) - self._begin

    def answer_begins(self) -> None:
        """After the next token, the prompt's last, all tokens are the target's."""
        self._prompt = len(self) + 1

    def read(self, tokens: Sequence[int], learn: Callable[[int, bool], None] | None = None) -> None:
        """Append tokens to the text.

        Args:
            tokens: ids.
            learn: called for each predicted token with the match length and whether the prediction was right.
        """
        index = self._index
        text = index.tokens
        for token in tokens:
            match = self.match
            hit = match is not None and text[match.end] == token
            if match is not None and learn is not None:
                learn(match.length, hit)
            index.append([token])
            longer = Match(match.length + 1, match.end + 1) if match is not None and hit else index.match
            self.match = self._told(longer)

    def after(self, drafted: Sequence[int]) -> Match | None:
        """The match after drafted tokens that follow the text and are not part of it."""
        match, text = self.match, self._index.tokens
        for token in drafted:
            if match is None or _token(text, drafted, match.end) != token:
                # Drafted tokens are few, so the text is searched once, after all of them.
                return self._told(self._index.found([*text[-LONGEST_GRAM:], *drafted][-LONGEST_GRAM:]))
            match = Match(match.length + 1, match.end + 1)
        return self._told(match)

    def _told(self, match: Match | None) -> Match | None:
        """A match that predicts a token: there is none at the end of an earlier answer."""
        text = self._index.tokens
        return None if match is not None and match.end < len(text) and text[match.end] == BETWEEN else match

    def copied(self, match: Match, drafted: Sequence[int], count: int) -> list[int]:
        """The tokens after a match; past the text's end, the drafted tokens and the copy itself."""
        text, all_ = self._index.tokens, [*drafted]
        for place in range(match.end, match.end + count):
            if (token := _token(text, all_, place)) == BETWEEN:
                break
            all_.append(token)
        return all_[len(drafted) :]

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens. The answer of a fully removed text may be stored."""
        if length >= len(self):
            return
        index, begin = self._index, self._begin
        answer = [*index.tokens[begin + self._prompt :]] if self._earlier and not length else []
        index.truncate(begin + length)
        if answer:
            index.append([*answer, BETWEEN])
            if len(index) > 2 * self._earlier:
                kept = [*index.tokens[-self._earlier :]]
                index.truncate(0)
                index.append(kept)
            self._begin = len(index)
        self.match = self._told(index.match) if length else None


def _token(text: Sequence[int], behind: Sequence[int], place: int) -> int:
    return text[place] if place < len(text) else behind[place - len(text)]


LONGEST, SHORTEST = 4, 2  # The longest suffix that is looked up, and the shortest match that counts


class Agreement:
    """Compares drafted tokens with those that followed the latest earlier occurrence of the text before them.

    It indexes the text and the tokens of the round's draft, which the next round removes.
    """

    def __init__(self) -> None:
        self._index = SuffixIndex(LONGEST)
        self._text = 0  # length of the index without the draft's tokens

    def begin(self, text: Sequence[int]) -> None:
        """A draft begins after a text: the last text and what was appended to it since."""
        self._index.truncate(self._text)
        self._index.append(text[self._text :])
        self._text = len(text)

    def of(self, token: int) -> float:
        """`DraftStep.agreement` for the draft's next token."""
        index = self._index
        match = index.match
        index.append([token])
        if match is None or match.length < SHORTEST:
            return 0.0
        agrees = index.tokens[match.end] == token
        return match.length / LONGEST if agrees else -match.length / LONGEST

    def telling(self, text: Sequence[int], draw: Callable[[int], DraftStep]) -> Callable[[int], DraftStep]:
        """Wraps a function that draws a draft after a text, so that its steps have the agreement too."""
        self.begin(text)

        def with_signal(index: int) -> DraftStep:
            step = draw(index)
            step.agreement = self.of(step.token)
            return step

        return with_signal

    def rollback(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the text."""
        self._text = min(self._text, length)
