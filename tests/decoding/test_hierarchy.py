from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.policies import StoppingPolicy
from specctl.policies.base import Rule, Signal
from specctl.policies.published import Constant, SelfVerify, SpecDecPlusPlus, Svip
from specctl.records import DraftStep, ExtraToken, Round, StopReason
from tests.support.toys import (
    EOS,
    FAMILIES,
    Script,
    TableRunner,
    assert_raw_signals,
    noisy_copy,
    random_model,
    related_table,
    seeded,
    table,
    toy_head,
)

GREEDY, PLAIN, FILTERED = Sampling(), Sampling(temperature=1.0), Sampling(0.7, 3, 0.9)
TARGET = table(seed=21)
MID = related_table(TARGET, seed=22, noise=0.6)
LOW = related_table(TARGET, seed=23)
NOTHING_ENDS: frozenset[int] = frozenset()


class StopsAt(Rule):
    """Stops at the n-th token of a block, or never; notes what it is asked and what it observes."""

    signals: frozenset[Signal] = frozenset({"entropy", "top_prob", "token_prob"})

    def __init__(self, place: int | None = None, limit: int = 9, *, keep_trigger: bool = True) -> None:
        self.place, self.limit = place, limit
        self.keep_trigger = keep_trigger
        self.asked: list[DraftStep] = []
        self.rounds: list[Round] = []

    def draft_limit(self) -> int:
        return self.limit

    def should_stop(self, step: DraftStep) -> bool:
        self.asked.append(step)
        return step.index == self.place

    def observe(self, round_: Round) -> None:
        self.rounds.append(round_)


class Play:
    """One decoded sequence over three models, or more; the caches are checked against the text on the way."""

    def __init__(
        self,
        upper: StoppingPolicy,
        *lower: StoppingPolicy,
        tables: Sequence[torch.Tensor] = (TARGET, MID, LOW),
        once: bool = False,
        prompt: Sequence[int] = (1, 2),
        limit: int = 24,
        sampling: Sampling = GREEDY,
        eos: frozenset[int] = NOTHING_ENDS,
        seed: int = 0,
        prefilled: bool = False,
    ) -> None:
        sequence = list(prompt)
        self.target, *self.drafts = (TableRunner(logits) for logits in tables)
        policies = (upper, *lower)
        drafter: Drafter = ModelDrafter(self.drafts[-1], policies[-1])
        for runner, policy in zip(self.drafts[-2::-1], policies[-2::-1], strict=True):
            drafter = PreVerifiedDrafter(drafter, runner, policy, once=once)
        if prefilled:
            prefill(self.target, drafter, prompt)
            assert self.target.tokens == list(prompt[:-1])
            wanted = True
            for runner, policy in zip(self.drafts, policies, strict=True):
                wanted = wanted and policy.draft_limit() > 0  # what is not wanted reads nothing
                assert runner.tokens == (list(prompt[:-1]) if wanted else [])
        self.rounds: list[Round] = []
        for round_ in decode(self.target, drafter, prompt, limit, sampling, eos, seeded(seed)):
            sequence.extend(round_.emitted)
            self.rounds.append(round_)
            for runner in (self.target, *self.drafts):
                assert runner.tokens == sequence[: runner.length], "a cache holds refused tokens"
        self.tokens = sequence[len(prompt) :]


def alone(limit: int = 24, prompt: Sequence[int] = (1, 2), logits: torch.Tensor = TARGET) -> list[int]:
    return [round_.emitted[0] for round_ in decode(TableRunner(logits), None, prompt, limit, GREEDY)]


def block(round_: Round) -> list[int]:
    return [step.token for step in round_.steps]


@given(
    upper=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    lower=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    limit=st.integers(1, 20),
    sampling=st.sampled_from([GREEDY, PLAIN, FILTERED]),
    eos=st.frozensets(st.integers(0, 4), max_size=2),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    once=st.booleans(),
    prefilled=st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_blocks_are_what_the_inner_rounds_emitted(
    upper: list[int],
    lower: list[int],
    limit: int,
    sampling: Sampling,
    eos: frozenset[int],
    prompt: list[int],
    seed: int,
    once: bool,
    prefilled: bool,
) -> None:
    top, bottom = Script(*upper), Script(*lower)
    play = Play(
        top, bottom, prompt=prompt, limit=limit, sampling=sampling, eos=eos, seed=seed, once=once, prefilled=prefilled
    )
    assert len(play.tokens) == limit or play.tokens[-1] in eos
    assert not eos & set(play.tokens[:-1])
    assert top.rounds == play.rounds
    assert bottom.rounds == [inner for round_ in play.rounds for inner in round_.inner]
    left, caps = limit, iter([upper[place % len(upper)] for place in range(limit)])
    for round_ in play.rounds:
        room = min(next(caps), left - 1)
        assert block(round_) == [token for inner in round_.inner for token in inner.emitted]
        assert [step.index for step in round_.steps] == list(range(1, round_.drafted + 1))
        assert [inner.index for inner in round_.inner] == list(range(len(round_.inner)))
        assert round_.drafted <= room
        assert not eos & set(block(round_)[:-1])
        filled = 0
        for inner in round_.inner:
            assert inner.drafted <= room - filled - 1, "no place was left for the middle model's token"
            filled += len(inner.emitted)
        if once:
            assert len(round_.inner) == min(room, 1)
        elif round_.stop is not StopReason.EOS:
            assert round_.drafted == room
        left -= len(round_.emitted)
    mid_passes = sum(len(round_.inner) for round_ in play.rounds)
    assert len(play.drafts[0].extended) == mid_passes + (prefilled and len(prompt) > 1 and upper[0] > 0)


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("upper", [Constant(1), Constant(6), SelfVerify(), Svip(c=1.0, keep_trigger=False)], ids=str)
@pytest.mark.parametrize("limit", [1, 2, 3, 24])
def test_greedy_text_is_the_targets_own(upper: StoppingPolicy, limit: int, once: bool) -> None:
    assert Play(upper, SelfVerify(), limit=limit, once=once).tokens == alone(limit)


def test_a_block_is_the_middle_models_own_text() -> None:
    """In greedy decoding whatever leaves the middle model is its argmax, wherever the draft below stood."""
    play = Play(Constant(7), Constant(3), tables=(TARGET, MID, LOW))
    text = [1, 2]
    for round_ in play.rounds:
        assert block(round_) == alone(round_.drafted, text, MID) if round_.drafted else not round_.steps
        text += round_.emitted
    kinds = {inner.extra_kind for round_ in play.rounds for inner in round_.inner}
    assert kinds == {ExtraToken.CORRECTION, ExtraToken.BONUS}


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, FILTERED], ids=["greedy", "plain", "filtered"])
def test_signals_are_the_middle_models_raw_softmax(sampling: Sampling) -> None:
    policy = StopsAt(5)
    play = Play(policy, Constant(3), sampling=sampling, limit=40)
    text = [1, 2]
    checked = 0
    for round_ in play.rounds:
        context = list(text)
        for step in round_.steps:
            assert_raw_signals(step, MID[context[-2], context[-1]])
            assert step.accept_prob is None
            context.append(step.token)
            checked += 1
        text += round_.emitted
    assert checked > 20


@pytest.mark.parametrize("reads_signals", [False, True])
def test_a_head_judges_the_token_fed_before(reads_signals: bool) -> None:
    """Across inner rounds too: the first row of one is the last token of the one before."""
    head, policy = toy_head(MID, 9, reads_signals=reads_signals), SpecDecPlusPlus(threshold=1.0, max_draft=9)
    drafter = PreVerifiedDrafter(
        ModelDrafter(TableRunner(LOW), Constant(2)), TableRunner(MID), policy, predictor=head, record={"token_prob"}
    )
    text, checked = [1, 2], 0
    for round_ in decode(TableRunner(TARGET), drafter, text.copy(), 60, PLAIN, generator=seeded(8)):
        context = [*text, *block(round_)]
        for place, step in enumerate(round_.steps, start=len(text)):
            assert step.entropy is None
            if step.index == 1:
                assert step.accept_prob == 1.0
                continue
            hidden = MID[context[place - 2], context[place - 1]]
            before = MID[context[place - 3], context[place - 2]].softmax(-1)
            chance = before[context[place - 1]]
            signals = torch.stack([torch.special.entr(before).sum(), before.max(), chance])
            assert step.accept_prob == pytest.approx(head.accept_prob(hidden, signals).item(), abs=1e-6)
            checked += 1
        text += round_.emitted
    assert checked > 20


def test_accept_prob_needs_a_head() -> None:
    with pytest.raises(ValueError, match="needs a head"):
        PreVerifiedDrafter(ModelDrafter(TableRunner(LOW), Constant(2)), TableRunner(MID), SpecDecPlusPlus())


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_every_token_carries_the_middle_models_distribution(sampling: Sampling) -> None:
    unlike = TableRunner(table(seed=24, spread=3.0))
    drafter = PreVerifiedDrafter(ModelDrafter(unlike, Constant(2)), TableRunner(MID), Constant(12))
    drafter.begin(sampling, NOTHING_ENDS, seeded(3))
    draft = drafter.draft([1, 2], 20)
    assert draft.probs is not None
    text = [1, 2, *draft.tokens]
    expected = torch.stack([sampling.probs(MID[text[place], text[place + 1]]) for place in range(len(draft.tokens))])
    assert torch.equal(torch.as_tensor(draft.probs), expected)
    assert any(inner.extra_kind is ExtraToken.CORRECTION for inner in draft.inner)


def test_each_token_is_asked_about_once_and_the_block_is_whole() -> None:
    """Inner rounds of three tokens each; the trigger is the fourth, in the middle of the second."""
    policy = StopsAt(4)
    play = Play(policy, Constant(2), tables=(TARGET, TARGET, TARGET), limit=21)
    assert [round_.drafted for round_ in play.rounds] == [6, 6, 6]
    assert {round_.stop for round_ in play.rounds} == {StopReason.POLICY}
    assert [step.index for step in policy.asked] == [1, 2, 3, 4] * 3
    assert policy.rounds == play.rounds


def test_a_dropped_trigger_takes_what_is_behind_it_along() -> None:
    policy = StopsAt(5, keep_trigger=False)
    play = Play(policy, Constant(2), tables=(TARGET, TARGET, TARGET), limit=10)
    assert [round_.drafted for round_ in play.rounds] == [4, 4]
    assert [len(round_.inner) for round_ in play.rounds] == [2, 2]
    assert play.tokens == alone(10)


def test_a_first_token_that_is_dropped_leaves_the_target_alone() -> None:
    play = Play(StopsAt(1, keep_trigger=False), Constant(2), limit=4)
    assert [(round_.drafted, round_.stop) for round_ in play.rounds[:-1]] == [(0, StopReason.POLICY)] * 3
    assert play.tokens == alone(4)


def test_once_means_one_inner_round_whatever_the_policy_says() -> None:
    policy = StopsAt(1, limit=9)
    play = Play(policy, Constant(3), tables=(TARGET, TARGET, TARGET), once=True, limit=11)
    assert [(round_.drafted, round_.stop) for round_ in play.rounds[:2]] == [(4, StopReason.POLICY)] * 2
    assert policy.asked == []


def test_the_cap_counts_the_middle_models_own_token() -> None:
    play = Play(Constant(4), Constant(4), tables=(TARGET, TARGET, TARGET), once=True, limit=10)
    assert [(round_.drafted, round_.inner[0].drafted) for round_ in play.rounds] == [(4, 3), (4, 3)]
    assert {round_.stop for round_ in play.rounds} == {StopReason.MAX_DRAFT}


def test_windows_move_with_their_own_verifier() -> None:
    """tau1 is the mean entropy of what the middle model refused, tau2 of what the target refused."""
    upper, lower = SelfVerify(), SelfVerify()
    play = Play(upper, lower, limit=60, sampling=PLAIN, seed=4)

    def mean(rounds: Sequence[Round]) -> float:
        refused = [round_.rejected.entropy for round_ in rounds if round_.rejected is not None]
        assert refused
        return sum(entropy for entropy in refused if entropy is not None) / len(refused)

    assert upper.current_threshold == pytest.approx(mean(play.rounds))
    assert lower.current_threshold == pytest.approx(mean([inner for r in play.rounds for inner in r.inner]))
    assert upper.current_threshold != pytest.approx(lower.current_threshold)
    for round_ in play.rounds:
        looked = [step.entropy for step in round_.steps]
        assert round_.threshold is not None
        hesitant = [place for place, entropy in enumerate(looked) if entropy is not None and entropy > round_.threshold]
        lengths = [len(inner.emitted) for inner in round_.inner]
        if round_.stop is StopReason.POLICY:
            assert sum(lengths[:-1]) <= hesitant[0]
        else:
            assert not hesitant


def test_windows_restart_with_the_sequence() -> None:
    upper, lower = SelfVerify(), SelfVerify()
    drafter = PreVerifiedDrafter(ModelDrafter(TableRunner(LOW), lower), TableRunner(LOW.flip(0)), upper)
    first = list(decode(TableRunner(TARGET), drafter, [1, 2], 20, GREEDY))
    assert min(upper.current_threshold, lower.current_threshold) > 0
    drafter.rollback(0)
    again = list(decode(TableRunner(TARGET), drafter, [1, 2], 20, GREEDY))
    assert [(r.steps, r.threshold) for r in again] == [(r.steps, r.threshold) for r in first]


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN])
def test_a_drafted_end_of_sequence_ends_the_block(sampling: Sampling) -> None:
    plays = [Play(Constant(8), Constant(3), eos=frozenset({EOS}), sampling=sampling, seed=seed) for seed in range(40)]
    ended = [round_ for play in plays for round_ in play.rounds if round_.stop is StopReason.EOS]
    assert ended
    assert all(block(round_)[-1] == EOS and EOS not in block(round_)[:-1] for round_ in ended)
    below = [round_.inner[-1] for play in plays for round_ in play.rounds if round_.stop is StopReason.EOS]
    assert all((inner.extra is None) is (inner.emitted[-1] != inner.extra) for inner in below)


def test_three_models_that_agree_accept_everything() -> None:
    play = Play(Constant(8), Constant(3), tables=(TARGET, TARGET, TARGET), sampling=PLAIN, limit=27)
    for round_ in play.rounds:
        assert round_.fully_accepted
        assert all(inner.fully_accepted for inner in round_.inner)
    assert [[len(inner.emitted) for inner in round_.inner] for round_ in play.rounds] == [[4, 4]] * 3


def test_four_levels_nest_their_rounds() -> None:
    policies = Constant(9), Constant(4), Constant(1)
    play = Play(*policies, tables=(TARGET, MID, LOW, related_table(LOW, seed=9)), sampling=PLAIN, limit=30)
    for round_ in play.rounds:
        assert block(round_) == [token for inner in round_.inner for token in inner.emitted]
        for inner in round_.inner:
            assert block(inner) == [token for lowest in inner.inner for token in lowest.emitted]
            assert all(lowest.inner == () for lowest in inner.inner)
    assert any(inner.inner for round_ in play.rounds for inner in round_.inner)


def test_forward_passes_carry_only_what_is_new() -> None:
    """Three agreeing models: each inner round is 1 + 3 tokens of the middle model, the first brings the prompt too."""
    play = Play(Constant(8), Constant(3), tables=(TARGET, TARGET, TARGET), limit=18)
    assert play.target.extended == [2 + 8, 1 + 8]
    assert play.drafts[0].extended == [2 + 3, 1 + 3, 2 + 3, 1 + 3]
    assert play.drafts[1].extended == [2, 1, 1, 2, 1, 1, 3, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.representatives("llama", "gemma2")
def test_greedy_tokens_are_the_targets_on_real_caches(family: str) -> None:
    """Sliding windows and rollback at two levels, past the window."""
    target = Slot(EagerPasses(random_model(family), 64))
    lowest = ModelDrafter(Slot(EagerPasses(random_model(family, layers=1, seed=1), 64)), Constant(2))
    middle = PreVerifiedDrafter(lowest, Slot(EagerPasses(noisy_copy(family, 0.02), 64)), Svip(c=1.0, threshold=1.2))
    drafter = PreVerifiedDrafter(middle, Slot(EagerPasses(noisy_copy(family), 64)), SelfVerify(max_draft=6))
    prompt = [1, 5, 9]
    with torch.inference_mode():
        alone = [token for r in decode(target, None, prompt, 40, GREEDY) for token in r.emitted]
        target.rollback(0)
        rounds = list(decode(target, drafter, prompt, 40, GREEDY))
    assert [token for round_ in rounds for token in round_.emitted] == alone
    inner = [one for round_ in rounds for one in round_.inner]
    assert any(not round_.fully_accepted for round_ in rounds)
    assert any(not one.fully_accepted for one in inner)
