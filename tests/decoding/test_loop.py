import pytest
import torch
from scripted_rounds import scripted_rounds

from specctl.decoding.composition import build_drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode, read_prompt
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.running.pair import Pair
from specctl.policies import POLICIES, Setting, StoppingPolicy
from specctl.policies.base import Rule, Signal
from specctl.policies.published import Constant, NoDraft, Svip
from specctl.records import DraftStep, ExtraToken, Round, StopReason
from tests.support.toys import (
    EOS,
    Script,
    StateTable,
    TableRunner,
    ToyDraftHead,
    assert_raw_signals,
    head_for,
    related_table,
    seeded,
    table,
    toy_head,
)

pytestmark = pytest.mark.crossed

GREEDY, PLAIN = Sampling(), Sampling(temperature=1.0)
TARGET = table(seed=21)
DRAFT = related_table(TARGET, seed=22)
HEAD = toy_head(DRAFT, seed=23)
NOTHING_ENDS: frozenset[int] = frozenset()


class Play:
    """One decoded sequence with everything the tests look at; cache bookkeeping is checked on the way."""

    def __init__(
        self,
        policy: StoppingPolicy | None,
        *,
        prompt: list[int] | None = None,
        limit: int = 12,
        sampling: Sampling = GREEDY,
        eos: frozenset[int] = NOTHING_ENDS,
        target: torch.Tensor = TARGET,
        draft: torch.Tensor = DRAFT,
        seed: int = 0,
        prefilled: bool = False,
    ) -> None:
        prompt = prompt or [1, 2]
        sequence = list(prompt)
        self.target = TableRunner(target, sequence)
        self.draft = TableRunner(draft, sequence)
        drafter = ModelDrafter(self.draft, policy, predictor=head_for(policy, HEAD)) if policy is not None else None
        if prefilled:
            prefill(self.target, drafter, prompt)
            assert self.target.tokens == prompt[:-1]
            assert self.draft.tokens == (prompt[:-1] if policy is not None and policy.draft_limit() else [])
        self.rounds: list[Round] = []
        for round_ in decode(self.target, drafter, prompt, limit, sampling, eos, seeded(seed)):
            sequence.extend(round_.emitted)
            self.rounds.append(round_)
            for runner in (self.target, self.draft):
                assert runner.tokens == sequence[: runner.length], "the cache holds refused tokens"
        self.tokens = sequence[len(prompt) :]


def chain(*steps: int, otherwise: int = 1) -> torch.Tensor:
    """A table that is certain: token ``steps[i]`` follows token ``i``."""
    logits = torch.full((6, 6, 5), -50.0)
    for last in range(6):
        logits[:, last, steps[last] if last < len(steps) else otherwise] = 50.0
    return logits


COUNTING = chain(1, 2, 3, 4, 0)  # 1 2 3 4 0 1 2 ...
WRONG = chain(2, 3, 4, 0, 1)


@scripted_rounds()
def test_rounds_add_up(
    lengths: list[int],
    limit: int,
    sampling: Sampling,
    eos: frozenset[int],
    prompt: list[int],
    seed: int,
    prefilled: bool,
) -> None:
    """Whatever is drafted: the limit holds, the sequence ends at its first EOS, and the counts agree."""
    policy = Script(*lengths)
    play = Play(policy, prompt=prompt, limit=limit, sampling=sampling, eos=eos, seed=seed, prefilled=prefilled)
    assert len(play.tokens) <= limit
    assert len(play.tokens) == limit or play.tokens[-1] in eos
    assert not eos & set(play.tokens[:-1])
    assert policy.rounds == play.rounds
    left = limit
    for index, round_ in enumerate(play.rounds):
        asked = lengths[index % len(lengths)]
        assert round_.index == index
        assert [step.index for step in round_.steps] == list(range(1, round_.drafted + 1))
        assert round_.drafted <= min(asked, left - 1)
        assert 0 <= round_.accepted <= round_.drafted
        if round_.stop is StopReason.EOS:
            assert round_.steps[-1].token in eos
        else:
            assert round_.drafted == min(asked, left - 1)
            assert round_.stop == (StopReason.MAX_DRAFT if asked <= left - 1 else StopReason.BUDGET)
        if round_.extra is None:
            assert (round_.stop, round_.extra_kind) == (StopReason.EOS, None)
            assert round_.fully_accepted
        else:
            assert round_.extra_kind == (ExtraToken.BONUS if round_.fully_accepted else ExtraToken.CORRECTION)
        assert min(round_.draft_seconds, round_.verify_seconds, round_.total_seconds) >= 0
        left -= len(round_.emitted)
    assert len(play.target.extended) == len(play.rounds) + (prefilled and len(prompt) > 1)


@pytest.mark.parametrize("policy", [None, NoDraft()], ids=["no drafter", "none"])
@pytest.mark.parametrize("sampling", [GREEDY, PLAIN])
def test_without_drafts_every_round_is_one_token(policy: NoDraft | None, sampling: Sampling) -> None:
    play = Play(policy, sampling=sampling)
    assert [len(round_.emitted) for round_ in play.rounds] == [1] * 12
    assert play.draft.extended == []


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("limit", [1, 2, 7, 30])
def test_greedy_text_is_the_targets_own(name: str, limit: int) -> None:
    assert Play(POLICIES[name](), limit=limit).tokens == Play(None, limit=limit).tokens


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, Sampling(0.7, 3, 0.9)])
def test_a_model_drafting_for_itself_accepts_everything(sampling: Sampling) -> None:
    play = Play(Constant(4), draft=TARGET, limit=23, sampling=sampling)
    assert all(round_.fully_accepted for round_ in play.rounds)
    assert [round_.drafted for round_ in play.rounds] == [4, 4, 4, 4, 2]


def test_a_draft_that_is_always_wrong_costs_one_target_pass_a_token() -> None:
    play = Play(Constant(4), target=COUNTING, draft=WRONG, prompt=[0], limit=10)
    assert play.tokens == [1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    assert len(play.rounds) == len(play.target.extended) == 10
    assert all(round_.accepted == 0 for round_ in play.rounds)


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN])
@pytest.mark.parametrize(
    ("draft", "length", "emitted", "extra"),
    [
        (COUNTING, 6, [(1, 2, 3)], None),  # drafted and accepted
        (COUNTING, 2, [(1, 2, 3)], ExtraToken.BONUS),  # the bonus token
        (chain(1, 2, 4, 4, 0), 4, [(1, 2, 3)], ExtraToken.CORRECTION),  # the correction token
        (chain(1, 3, 3, 3, 3), 4, [(1, 2), (3,)], None),  # drafted and refused, then drafted again and accepted
    ],
    ids=["accepted", "bonus", "correction", "refused"],
)
def test_generation_ends_at_the_first_eos(
    draft: torch.Tensor,
    length: int,
    emitted: list[tuple[int, ...]],
    extra: ExtraToken | None,
    sampling: Sampling,
) -> None:
    play = Play(
        Constant(length), target=COUNTING, draft=draft, prompt=[0], limit=10, eos=frozenset({3, 4}), sampling=sampling
    )
    assert [round_.emitted for round_ in play.rounds] == emitted
    assert play.rounds[-1].extra_kind == extra


def test_a_drafted_eos_ends_drafting_only() -> None:
    play = Play(Constant(4), target=COUNTING, draft=chain(1, 2, 4, 4, 0), prompt=[0], limit=6, eos=frozenset({4}))
    first, second = play.rounds
    assert ([step.token for step in first.steps], first.stop) == ([1, 2, 4], StopReason.EOS)
    assert first.emitted == (1, 2, 3)
    assert second.emitted == (4,)


def test_eos_in_the_prompt_ends_nothing() -> None:
    play = Play(Constant(2), target=COUNTING, draft=COUNTING, prompt=[0, 3, 0], limit=3, eos=frozenset({3}))
    assert play.tokens == [1, 2, 3]


def test_the_draft_catches_up_after_a_fully_accepted_round() -> None:
    """The last draft and the bonus token were never fed to the draft: both go in with the next forward pass."""
    play = Play(Constant(3), target=COUNTING, draft=COUNTING, prompt=[0], limit=8)
    assert play.draft.extended == [1, 1, 1, 2, 1, 1]
    assert play.target.extended == [4, 4]


def test_forward_passes_carry_only_what_is_new() -> None:
    play = Play(Constant(3), target=COUNTING, draft=chain(1, 2, 4, 4, 0), prompt=[0, 1, 2, 3, 4, 0], limit=7)
    assert play.target.extended[0] == 6 + 3
    assert play.draft.extended[:3] == [6, 1, 1]
    assert play.target.extended[1] == 1 + 3


def test_prefill_continues_what_is_cached() -> None:
    target, drafter = TableRunner(TARGET), ModelDrafter(TableRunner(DRAFT), Constant())
    prefill(target, drafter, [1, 2, 3])
    prefill(target, drafter, [1, 2, 3, 4, 1])
    prefill(target, drafter, [1, 2])  # nothing to do, and nothing is forgotten
    for runner in (target, drafter.runner):
        assert isinstance(runner, TableRunner)
        assert (runner.tokens, runner.extended) == ([1, 2, 3, 4], [2, 2])


def test_a_cached_part_of_the_prompt_is_reused() -> None:
    sequence = [1, 2, 3, 4]
    target, drafted = TableRunner(TARGET, sequence), TableRunner(DRAFT, sequence)
    target.extend([1, 2, 3], keep=0)
    drafted.extend([1], keep=0)
    rounds = decode(target, ModelDrafter(drafted, Constant(2)), sequence.copy(), 5, GREEDY)
    tokens: list[int] = []
    for round_ in rounds:
        tokens.extend(round_.emitted)
        sequence.extend(round_.emitted)
    assert tokens == Play(None, prompt=[1, 2, 3, 4], limit=5).tokens


@pytest.mark.parametrize("both", [True, False], ids=["target and draft", "target only"])
def test_a_wholly_cached_prompt_is_reused(both: bool) -> None:
    target, drafted = TableRunner(TARGET), TableRunner(DRAFT)
    target.extend([1, 2], keep=0)
    if both:
        drafted.extend([1, 2], keep=0)
    rounds = decode(target, ModelDrafter(drafted, Constant(2)), [1, 2], 5, GREEDY)
    assert [token for round_ in rounds for token in round_.emitted] == Play(None, limit=5).tokens


def test_caches_are_right_when_the_caller_stops_listening() -> None:
    target, drafter = TableRunner(TARGET), ModelDrafter(TableRunner(DRAFT), Constant(4))
    rounds = decode(target, drafter, [1, 2], 20, PLAIN, generator=seeded(3))
    text = [1, 2]
    for _, round_ in zip(range(3), rounds, strict=False):
        text += round_.emitted
    for runner in (target, drafter.runner):
        assert isinstance(runner, TableRunner)
        assert runner.tokens == text[: runner.length]


class Listener(Rule):
    """Notes the signals it is shown, and stops after two tokens."""

    def __init__(self, *signals: Signal) -> None:
        self.reads = frozenset(signals)
        self.steps: list[DraftStep] = []

    def draft_limit(self) -> int:
        return 9

    def should_stop(self, step: DraftStep) -> bool:
        self.steps.append(step)
        return step.index == 2


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN, Sampling(0.5, 2, 0.9, 0.1)], ids=["greedy", "plain", "filtered"])
def test_signals_are_the_raw_softmax_at_temperature_one(sampling: Sampling) -> None:
    listener = Listener("entropy", "top_prob", "token_prob")
    play = Play(listener, sampling=sampling, limit=20)
    for round_ in play.rounds[:-1]:
        assert round_.stop in (StopReason.POLICY, StopReason.BUDGET)
    text = [1, 2]
    checked = 0
    for round_ in play.rounds:
        context = list(text)
        for step in round_.steps:
            assert_raw_signals(step, DRAFT[context[-2], context[-1]])
            context.append(step.token)
            checked += 1
        text += round_.emitted
    assert checked == len(listener.steps) > 5


def test_only_the_signals_asked_for_are_computed() -> None:
    listener = Listener("top_prob")
    Play(listener)
    assert {(step.entropy, step.token_prob) for step in listener.steps} == {(None, None)}
    drafter = ModelDrafter(TableRunner(DRAFT), Constant(2), record={"entropy"})
    (step, *_) = next(decode(TableRunner(TARGET), drafter, [1], 5, GREEDY)).steps
    assert step.entropy is not None
    assert step.top_prob is None


@pytest.mark.parametrize("keep", [True, False])
def test_the_triggering_token_is_kept_unless_the_policy_says_otherwise(keep: bool) -> None:
    policy = Svip(threshold=0.0, c=1.0, keep_trigger=keep)  # every token triggers
    play = Play(policy, limit=6)
    assert [round_.drafted for round_ in play.rounds[:-1]] == [int(keep)] * (len(play.rounds) - 1)
    assert {round_.stop for round_ in play.rounds[:-1]} == {StopReason.POLICY}
    assert {round_.threshold for round_ in play.rounds} == {0.0}


def test_the_same_seed_gives_the_same_rounds() -> None:
    def told(seed: int) -> list[tuple[int, ...]]:
        return [round_.emitted for round_ in Play(Constant(3), sampling=PLAIN, seed=seed, limit=40).rounds]

    assert told(1) == told(1)
    assert told(1) != told(2)


def test_policies_restart_with_each_sequence() -> None:
    resets = 0

    class Counting(Constant):
        def reset(self) -> None:
            nonlocal resets
            resets += 1

    drafter = ModelDrafter(TableRunner(DRAFT), Counting(2))
    for _ in range(3):
        list(decode(TableRunner(TARGET), drafter, [1], 4, GREEDY, frozenset({EOS})))
        drafter.rollback(0)
    assert resets == 3


def test_only_a_policy_that_never_drafts_goes_without_a_drafter() -> None:
    pair = Pair(TableRunner(TARGET), (TableRunner(DRAFT),), None, frozenset(), 1 << 20, (), ({},))  # type: ignore[arg-type]
    assert build_drafter(pair, Setting("none")) is None
    assert build_drafter(pair, Setting("constant")) is not None
    rounds = Play(Script(0, 2), limit=12).rounds
    assert [round_.drafted for round_ in rounds[:4]] == [0, 2, 0, 2]
    assert Play(Script(0, 2), limit=12).tokens == Play(None, limit=12).tokens


def test_before_the_first_round_a_head_reads_what_the_target_has_read_and_other_drafts_nothing() -> None:
    prompt = [1, 2, 3, 4]
    for draft, read in ((TableRunner(table(2)), 0), (ToyDraftHead(table(2), 1), 3)):
        target = StateTable(table(1))
        target.watch(getattr(draft, "layers", ()))
        read_prompt(target, ModelDrafter(draft, Constant(2)), prompt)
        assert (target.length, draft.length) == (read, read)
