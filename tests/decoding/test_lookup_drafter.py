"""Drafts copied from the text: what they are, what is learned from them, and that the text stays the target's own."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from law_table import LENGTH, MID, PROMPT, SAMPLINGS, TARGET, enumerate_decode, error, expected_law
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specctl.decoding import round as one_round
from specctl.decoding.composition import Stage, build_drafter, compose, readable
from specctl.decoding.draft import Draft, Drafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.logits.judging import judge
from specctl.decoding.logits.logits import Verdict
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.loop import decode
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.errors import ProfileError
from specctl.models.passes.forward import Forward
from specctl.models.running.eager import EagerPasses
from specctl.models.running.lookup import LONGEST_MATCH, LookupPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import POLICIES, Setting, StoppingPolicy
from specctl.policies.cost_optimal import CostOptimal
from specctl.policies.published import ConfidentPrefix, Constant, Heuristic, Svip
from specctl.policies.source_choice import MatchRates
from specctl.profile.schema import SamplingTable
from specctl.records import ExtraToken, Round, StopReason
from tests.support.checkpoints import tiny_tokenizer
from tests.support.enumeration import steady_clocks
from tests.support.toys import EOS, Script, TableRunner, noisy_copy, random_model

EXACT, BIASED = 3e-7, 1e-2
GREEDY = Sampling()
READS_NO_DISTRIBUTION: list[Callable[[], StoppingPolicy]] = [
    lambda: Constant(3),
    lambda: Heuristic(draft_length=2, carry_over=True),
    lambda: ConfidentPrefix(threshold=0.45),
    lambda: CostOptimal(use_foresight=True, cost_ratio=0.5),
]


def lookup(policy: StoppingPolicy | None = None, **more: Any) -> LookupDrafter:
    return LookupDrafter(Slot(LookupPasses(64)), policy or Constant(5), **more)


def drafted(text: Sequence[int], *, budget: int = 99, policy: StoppingPolicy | None = None) -> Draft:
    drafter = lookup(policy)
    drafter.begin(GREEDY, frozenset({EOS}), None)
    return drafter.draft(text, budget)


# What is drafted.


def test_the_tokens_after_the_latest_longest_match_are_copied() -> None:
    # 1 2 3 occurs twice, 2 3 once more behind them.
    text = [1, 2, 3, 4, 4, 1, 2, 3, 5, 6, 7, 8, 9, 2, 3, 9, 9, 1, 2, 3]
    assert drafted(text).tokens == [5, 6, 7, 8, 9]
    assert drafted(text).probs is None
    assert drafted(text, budget=2).stop is StopReason.BUDGET
    assert drafted(text, budget=2).tokens == [5, 6]


def test_a_copy_that_reaches_the_texts_end_goes_on_with_the_draft() -> None:
    assert drafted([7, 1, 2, 1, 2]).tokens == [1, 2, 1, 2, 1]
    assert drafted([7, 3, 3]).tokens == [3] * 5


def test_nothing_is_drafted_behind_a_new_token() -> None:
    for text in ([5], [1, 2, 3]):
        draft = drafted(text)
        assert draft.tokens == []
        assert draft.steps == ()
        assert draft.stop is StopReason.MAX_DRAFT


def test_an_end_of_sequence_ends_the_copy() -> None:
    draft = drafted([1, 2, EOS, 3, 1, 2])
    assert draft.tokens == [EOS]
    assert draft.stop is StopReason.EOS


@given(st.lists(st.integers(0, 9), min_size=2, max_size=40), st.integers(1, 8))
def test_drafts_are_those_of_transformers_where_both_have_one_choice(text: list[int], count: int) -> None:
    """Of several occurrences transformers takes the first, and it stops at the text's end."""
    occurrences = [
        [end for end in range(size, len(text)) if text[end - size : end] == text[-size:]]
        for size in range(1, LONGEST_MATCH + 1)
    ]
    longest = next((ends for ends in reversed(occurrences) if ends), [])
    assume(len(longest) <= 1)
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=count, max_matching_ngram_size=LONGEST_MATCH, max_length=1000
    )
    found, _ = theirs.get_candidates(torch.tensor([text]))
    ours = LookupDrafter(Slot(LookupPasses(10)), Constant(count))
    ours.begin(GREEDY, frozenset(), None)
    draft = ours.draft(text, 99)
    end = len(text) - longest[0] if longest else 0
    assert draft.tokens[:end] == found[0, len(text) :].tolist()


# What is indexed: tokens of the text and no others.


class NeverForgets(LookupDrafter):
    """Wrong on purpose: what was taken back stays in the index, the new text behind it."""

    def rollback(self, length: int) -> None:
        del length

    def _index(self, sequence: Sequence[int]) -> None:
        known = getattr(self, "known", 0)
        self.runner.extend(sequence[known:], keep=0)
        self.known = len(sequence)


class IndexesItsDrafts(LookupDrafter):
    """Wrong on purpose: drafted tokens are indexed, and stay when they are rejected."""

    def draft(self, sequence: Sequence[int], budget: int) -> Draft:
        draft = super().draft(sequence, budget)
        self.runner.extend(draft.tokens, keep=0)
        return draft

    def _index(self, sequence: Sequence[int]) -> None:
        self.runner.extend(sequence[-1:], keep=0)


def differs(drafter: LookupDrafter, tokens: int = 60) -> bool:
    """Whether a drafter below a middle model ever drafts otherwise than a new one would after the same text.

    The middle model's blocks are often rejected, so that the drafter must take text back.
    """
    texts: list[bool] = []
    original = drafter.draft

    def compared(sequence: Sequence[int], budget: int) -> Draft:
        draft = original(sequence, budget)
        fresh = lookup(Constant(3))
        fresh.begin(GREEDY, frozenset(), None)
        texts.append(fresh.draft(sequence, budget).tokens != draft.tokens)
        return draft

    generator = torch.Generator().manual_seed(0)
    with patch.object(drafter, "draft", compared):
        middle = PreVerifiedDrafter(drafter, TableRunner(MID), Script(4, 2, 5))
        rounds = list(decode(TableRunner(TARGET), middle, PROMPT, tokens, SAMPLINGS["T=1"], generator=generator))
    assert any(not round_.fully_accepted for round_ in rounds)
    assert any(inner.rejected for round_ in rounds for inner in round_.inner)
    return any(texts)


def test_a_used_drafter_drafts_as_a_new_one_would() -> None:
    assert not differs(lookup(Constant(3)))


@pytest.mark.parametrize("wrong", [NeverForgets, IndexesItsDrafts])
def test_an_index_that_has_seen_rejected_tokens_is_caught(wrong: type[LookupDrafter]) -> None:
    assert differs(wrong(Slot(LookupPasses(3)), Constant(3)))


# What is learned.


def test_rates_begin_with_a_guess_by_length_and_follow_what_is_accepted() -> None:
    rates = MatchRates()
    assert [rates.rate(length) for length in (1, 2, 8)] == [1 / 3, 1 / 2, 0.8]
    for _ in range(4):
        rates.learn(2, 1.0)
    assert rates.rate(2) == (4 + 4 / 2) / 8
    assert rates.rate(3) == 3 / 5
    rates.learn(1000, 0.0)
    assert rates.rate(500) == rates.rate(24) < 24 / 26


def test_a_step_tells_how_likely_the_next_token_is() -> None:
    drafter = lookup(ConfidentPrefix(threshold=0.0))
    drafter.begin(GREEDY, frozenset(), None)
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    draft = drafter.draft(text, 3)
    # The match has two tokens, so the second drafted token continues a match of three.
    assert [step.next_accept_prob for step in draft.steps] == [3 / 5, 4 / 6, 5 / 7]
    drafter.observe(Round(0, draft.steps, 1, 9, ExtraToken.CORRECTION, draft.stop))
    text = [*text, 3, 9, 1]
    again = drafter.draft([*text, 2], 2)
    # Of the match of two the token was accepted, of the one of three it was not, of four none was verified.
    assert [step.next_accept_prob for step in again.steps] == [(3 / 5 * 4 + 0) / 5, 4 / 6]


def test_outcomes_are_chances_where_they_are_known() -> None:
    drafter = lookup(ConfidentPrefix(threshold=0.0))
    drafter.begin(GREEDY, frozenset(), None)
    draft = drafter.draft([1, 2, 3, 1], 2)
    drafter.observe(Round(0, draft.steps, 0, 9, ExtraToken.CORRECTION, draft.stop, chances=(0.25,)))
    assert drafter._rates.rate(1) == (4 / 3 + 0.25) / 5


def test_a_new_sequence_begins_without_what_was_learned() -> None:
    drafter = lookup(ConfidentPrefix(threshold=0.0))
    for _ in range(2):
        drafter.rollback(0)
        drafter.begin(GREEDY, frozenset(), None)
        draft = drafter.draft([1, 2, 1], 2)
        assert draft.steps[0].next_accept_prob == 2 / 4
        drafter.observe(Round(0, draft.steps, 2, 9, ExtraToken.BONUS, draft.stop))


def test_a_policy_begins_anew_only_where_a_text_does() -> None:
    drafter = lookup()
    with patch.object(Constant, "reset") as reset:
        drafter.prefill([1, 2, 3], begins=False)
        assert not reset.called
        drafter.prefill([1, 2, 3])
    assert reset.call_count == 1


def test_a_policy_that_reads_a_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="does not have entropy"):
        lookup(Svip())


def test_signals_to_record_are_those_that_there_are() -> None:
    drafter = compose([Stage(Slot(LookupPasses(64)), Constant(2))], frozenset({"entropy", "next_accept_prob"}))
    assert drafter is not None
    drafter.begin(GREEDY, frozenset(), None)
    step = drafter.draft([1, 2, 1], 2).steps[0]
    assert step.next_accept_prob is not None
    assert step.entropy is None


# The text stays the target's own.

ALONE: list[Callable[[], Drafter]] = [lambda make=make: lookup(make()) for make in READS_NO_DISTRIBUTION]  # type: ignore[misc]
BELOW: list[Callable[[], Drafter]] = [
    lambda: PreVerifiedDrafter(lookup(Constant(2)), TableRunner(MID), Constant(3)),
    lambda: PreVerifiedDrafter(lookup(Constant(1)), TableRunner(MID), Svip(c=1.0, threshold=0.87, max_draft=3)),
    lambda: PreVerifiedDrafter(
        lookup(CostOptimal(use_foresight=True)), TableRunner(MID), CostOptimal(max_draft=2), once=True
    ),
]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("drafter", [*ALONE, *BELOW])
@pytest.mark.representatives(
    "<lambda>0", "<lambda>1", "<lambda>2", "<lambda>3-T=1", "<lambda>4-T=1 by block", "<lambda>5-T=1"
)
def test_output_has_the_law_of_the_target(drafter: Callable[[], Drafter], sampling: Sampling) -> None:
    found = enumerate_decode(drafter, sampling, 4, 5)
    assert error(found, expected_law(sampling, 4)) < EXACT
    assert found.extras >= {ExtraToken.BONUS, ExtraToken.CORRECTION}


def claims_less(draft: Draft, forward: Forward, *more: Any) -> tuple[Verdict, torch.Tensor | None]:
    """Unlawful on purpose: copied tokens are verified as if they had been drawn from a uniform distribution."""
    vocabulary = forward.logits.shape[-1]
    uniform = torch.full((len(draft.tokens), vocabulary), 1 / vocabulary)
    return judge(Draft(draft.tokens, uniform, draft.steps, draft.stop), forward, *more)


def test_copied_tokens_verified_with_another_distribution_are_caught() -> None:
    with patch.object(one_round, "judge", claims_less):
        found = enumerate_decode(ALONE[0], SAMPLINGS["T=1"], LENGTH, LENGTH)
    assert error(found, expected_law(SAMPLINGS["T=1"], LENGTH)) > BIASED


@pytest.mark.usefixtures("drafts_at_will")
@pytest.mark.parametrize("make", READS_NO_DISTRIBUTION)
@pytest.mark.parametrize("below", [False, True], ids=["alone", "below a draft"])
@pytest.mark.representatives("alone-<lambda>0", "below a draft-<lambda>1")
def test_greedy_tokens_are_those_of_the_target_alone(make: Callable[[], StoppingPolicy], below: bool) -> None:
    target = Slot(EagerPasses(random_model("llama"), 64))
    drafter: Drafter = lookup(make())
    if below:
        drafter = PreVerifiedDrafter(drafter, Slot(EagerPasses(noisy_copy("llama"), 64)), Constant(4))
    rounds: list[Round] = []
    with torch.inference_mode(), steady_clocks():  # a policy that weighs times may else find that no draft pays
        for prompt in ([1, 5, 9], [3, 4, 3, 4, 5, 3]):
            alone = [token for one in decode(target, None, prompt, 60, GREEDY) for token in one.emitted]
            target.rollback(0)
            drafter.rollback(0)
            here = list(decode(target, drafter, prompt, 60, GREEDY))
            assert [token for one in here for token in one.emitted] == alone
            rounds += here
            target.rollback(0)
    assert any(one.accepted for one in rounds)


def test_every_policy_either_fits_a_lookup_or_is_refused() -> None:
    fitting = {name for name, rule in POLICIES.items() if not rule.signals_of({}) - {"next_accept_prob"}}
    assert fitting == {"none", "constant", "heuristic", "confidence"}


def test_a_conversation_is_searched_as_far_as_it_stands() -> None:
    lookup = Slot(LookupPasses(64))
    pair = Pair(
        Slot(EagerPasses(random_model("llama"), 64)), (lookup,), tiny_tokenizer(), frozenset(), 1 << 31, (), ({},)
    )
    session = Session(pair, build_drafter(pair, Setting("constant")), keep_caches=True)
    settings = SamplingTable(max_new_tokens=20)
    opening = [9, 8, 7, 6, 5]
    for prompt in (opening, [*opening, 3, 9, 8], [4, 9, 8]):  # the second turn is taken back, another takes its place
        answer = session.generate(prompt, settings).tokens
        known = list(lookup.index.tokens)
        assert known == [*prompt, *answer][: len(known)]
        assert len(known) >= len(prompt)
        fresh = Slot(LookupPasses(64))
        fresh.extend(known, keep=0)
        assert vars(lookup.index) == vars(fresh.index)


def test_build_drafter_names_the_policies_that_fit() -> None:
    pair = Pair(TableRunner(TARGET), (Slot(LookupPasses(3)),), tiny_tokenizer(), frozenset(), 1 << 31, (), ({},))
    with pytest.raises(ProfileError, match="svip reads signals that a lookup does not have; choose constant"):
        build_drafter(pair, Setting("svip"))
    assert readable(pair) >= {"next_accept_prob"}
