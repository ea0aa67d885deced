"""Chains of a lookup and a model: how they draft in turn, what each learns, and that the text is the target's own."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from law_table import DRAFT, LENGTH, MID, SAMPLINGS, TARGET, enumerate_decode, error, expected_law

from specctl.decoding import round as one_round
from specctl.decoding.chained import LONGEST_REST, SHORTEST_REST, ChainedDrafter, Chaining, with_copy
from specctl.decoding.composition import build_drafter
from specctl.decoding.draft import Draft
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import HostGenerator
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.logits.device import DeviceLogits
from specctl.decoding.logits.judging import judge, verify
from specctl.decoding.logits.logits import Verdict
from specctl.decoding.lookup import Follower
from specctl.decoding.loop import decode
from specctl.decoding.sampling import Sampling
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import Setting
from specctl.policies.cost_optimal import CostOptimal
from specctl.policies.published import Constant, Svip
from specctl.policies.source_choice import SourceChoice
from specctl.records import DraftStep, ExtraToken, Round, StopReason
from tests.support.toys import (
    EOS,
    LAYER,
    Script,
    StateTable,
    TableRunner,
    ToyDraftHead,
    noisy_copy,
    random_model,
    round_of,
    seeded,
)
from tests.support.verdicts import verdict_on

EXACT, BIASED = 3e-7, 1e-2
GREEDY = Sampling()
MODELS: dict[str, Callable[[], ModelDrafter | PreVerifiedDrafter]] = {
    "constant": lambda: ModelDrafter(TableRunner(DRAFT), Constant(1)),
    "svip": lambda: ModelDrafter(TableRunner(DRAFT), Svip(c=1.0, threshold=0.87, max_draft=2)),
    "dropping": lambda: ModelDrafter(TableRunner(DRAFT), Svip(c=1.0, threshold=0.87, max_draft=2, keep_trigger=False)),
    "cost-optimal": lambda: ModelDrafter(TableRunner(DRAFT), CostOptimal(max_draft=2)),
    "hierarchy": lambda: PreVerifiedDrafter(
        ModelDrafter(TableRunner(DRAFT), Constant(1)), TableRunner(MID), Constant(2)
    ),
    "head": lambda: ModelDrafter(ToyDraftHead(DRAFT, 3, noise=0.8), Constant(1)),
}


class Noting(ChainedDrafter):
    """Notes which sources wrote its drafts, and which of their tokens were accepted."""

    def __init__(self, model: ModelDrafter | PreVerifiedDrafter, seen: set[tuple[str, bool]]) -> None:
        super().__init__(model)
        self.seen = seen

    def observe(self, round_: Round) -> None:
        sources = "copy" if round_.copied == round_.drafted else "both" if round_.copied else "model"
        if round_.drafted:
            self.seen.add((sources, bool(round_.summary.accepted_copies)))
        super().observe(round_)


ALL = {("copy", False), ("copy", True), ("both", False), ("both", True), ("model", False)}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.representatives(
    "svip-T=1",
    "dropping-T=1]",
    "constant-T=0.7 top_k=2 top_p=0.95 by block",
    "head-T=1]",
    slow=("dropping", "hierarchy-T=1 by block", "cost-optimal-T=1"),
)
def test_output_has_the_law_of_the_target(model: str, sampling: str) -> None:
    seen: set[tuple[str, bool]] = set()
    layers = (LAYER,) if model == "head" else ()
    found = enumerate_decode(
        lambda: Noting(MODELS[model](), seen),
        SAMPLINGS[sampling],
        4,
        6,
        layers=layers,
        target=lambda: StateTable(TARGET),
    )
    assert error(found, expected_law(SAMPLINGS[sampling], 4)) < EXACT
    if model in ("svip", "cost-optimal", "head") and sampling in ("T=1", "T=1 by block"):
        assert seen == ALL


def claims_less(draft: Draft, forward: Forward, *more: Any) -> tuple[Verdict, Any]:
    """Unlawful on purpose: a copy behind a model's token is verified as if it had been drawn as that token was."""
    if draft.probs is None or not draft.copied:
        return judge(draft, forward, *more)
    rows = torch.as_tensor(draft.probs)
    probs = torch.cat([rows, rows[-1:].expand(draft.copied, -1)])
    return judge(Draft(draft.tokens, probs, draft.steps, draft.stop), forward, *more)


@pytest.mark.parametrize("sampling", ["T=1", "T=1 by block"])
def test_copies_verified_with_the_models_distribution_are_caught(sampling: str) -> None:
    with patch.object(one_round, "judge", claims_less):
        found = enumerate_decode(lambda: ChainedDrafter(MODELS["constant"]()), SAMPLINGS[sampling], LENGTH, 6)
    assert error(found, expected_law(SAMPLINGS[sampling], LENGTH)) > BIASED


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("ids", [None, [1, 2, 4]])
def test_rows_that_lack_are_one_hot_on_the_host_and_on_a_device(verification: Any, ids: list[int] | None) -> None:
    """Also of copied tokens that the draft's vocabulary has no column for."""
    generator = np.random.default_rng(0)
    target = generator.dirichlet(np.ones(5), 5).astype(np.float32)
    drawn = generator.dirichlet(np.ones(5 if ids is None else 3), 2).astype(np.float32)
    vocabulary = None if ids is None else DraftVocabulary(ids, 5)
    whole = drawn if vocabulary is None else vocabulary.widened(drawn, 0.0)
    tokens = [1, 4, 0, 3]
    full = np.concatenate([np.asarray(whole), np.eye(5, dtype=np.float32)[tokens[2:]]])
    for seed in range(20):
        told = verify(tokens, full, target, HostGenerator(seed), verification)
        assert verify(tokens, drawn, target, HostGenerator(seed), verification, vocabulary) == told
        on_device = DeviceLogits(torch.from_numpy(target))
        of_torch = [
            verdict_on(on_device, tokens, torch.from_numpy(probs), seeded(seed), verification, known)
            for probs, known in ((full, None), (drawn, vocabulary))
        ]
        assert of_torch[0] == of_torch[1]


def test_the_model_is_left_alone_where_the_lookup_drafts_and_catches_up_later() -> None:
    runner = TableRunner(MID)
    policy = Script(1)
    chain = ChainedDrafter(ModelDrafter(runner, policy))
    text = [1, 2, 2, 1] * 6
    chain.prefill(text)
    chain.begin(GREEDY, frozenset({EOS}), None)
    first = chain.draft(text, 9)
    assert first.copied < len(first.tokens)  # nothing is known of the model yet
    lengths = []
    for number in range(12):
        draft = chain.draft(text, 9) if number else first
        lengths.append((len(draft.tokens), draft.copied, runner.length))
        following = [(1, 2, 2, 1)[(len(text) + place) % 4] for place in range(len(draft.tokens) + 1)]
        kept = next(
            (n for n, pair in enumerate(zip(draft.tokens, following, strict=False)) if pair[0] != pair[1]), None
        )
        count = len(draft.tokens) if kept is None else kept
        kind = ExtraToken.BONUS if kept is None else ExtraToken.CORRECTION
        chain.observe(
            Round(
                number, draft.steps, count, following[count], kind, draft.stop, None, 1.0, 3.0, 4.0,
                context=len(text), copied=draft.copied,
            )
        )  # fmt: skip
        text = [*text, *following[: count + 1]]
    alone = [(drafted, length) for drafted, copied, length in lengths if copied == drafted > 1]
    assert alone
    assert len({length for _, length in alone[-2:]}) == 1  # the model reads nothing meanwhile
    assert all(not round_.copied and round_.drafted == 1 for round_ in policy.rounds)
    for round_ in policy.rounds:
        assert len(round_.emitted) == round_.accepted + 1


def test_a_policy_sees_its_own_tokens_alone() -> None:
    steps, stop = with_copy([DraftStep(1, 5, entropy=0.5)], [6, 7], 9, frozenset({7}))
    assert ([step.token for step in steps], [step.index for step in steps], stop) == (
        [5, 6, 7],
        [1, 2, 3],
        StopReason.EOS,
    )
    assert with_copy([], [6, 7], 2, frozenset())[1] is StopReason.BUDGET
    for accepted, extra, seen in ((0, 8, (0, 8)), (1, 8, (1, 8)), (2, 8, (1, 6)), (3, None, (1, 6))):
        kind = None if extra is None else ExtraToken.CORRECTION
        round_ = Round(0, steps, accepted, extra, kind, stop, chances=(0.5,) * min(3, accepted + 1), copied=2)
        of_model = Chaining().of_model(round_)
        assert (of_model.accepted, of_model.extra, of_model.drafted, of_model.copied) == (*seen, 1, 0)
        assert of_model.chances == (0.5,)
        assert round_.summary.accepted_copies == max(0, accepted - 1)
    assert round_.summary.draft_forwards == 1


def test_a_follower_goes_on_where_it_was_right_and_else_looks_anew() -> None:
    follower, told = Follower(), []
    follower.read([1, 2, 3, 4, 9, 1, 2])
    assert follower.match == (2, 2)
    follower.read([3, 4, 9], lambda *one: told.append(one))
    assert told == [(2, True), (3, True), (4, True)]
    assert follower.match == (5, 5)
    assert follower.copied(follower.match, (), 8) == [1, 2, 3, 4, 9, 1, 2, 3]
    assert follower.after([1, 2]) == (7, 7)
    assert follower.after([7]) is None
    assert follower.after([7, 3]) == (1, 8)  # the latest one
    follower.read([8], lambda *one: told.append(one))
    assert told[-1] == (5, False)
    assert follower.match is None
    follower.rollback(3)
    assert len(follower) == 3
    assert follower.match is None
    follower.rollback(5)
    assert len(follower) == 3


def test_answers_to_earlier_prompts_are_copied_and_no_more_than_those() -> None:
    follower = Follower(earlier=8)
    follower.read([9, 5, 5])
    follower.answer_begins()
    follower.read([7])  # the prompt's last
    follower.read([1, 2, 3, 4])
    follower.rollback(0)
    assert len(follower) == 0
    assert follower.match is None
    follower.read([6, 5])  # in the earlier prompt alone
    assert follower.match is None
    follower.read([1, 2])
    assert follower.match is not None
    assert follower.copied(follower.match, (), 9) == [3, 4]  # never beyond the answer's end
    assert follower.after([3]) == (3, 3)
    assert follower.after([3, 4]) is None
    told: list[tuple[int, bool]] = []
    follower.read([3, 4, 8], lambda *one: told.append(one))
    assert told == [(2, True), (3, True)]
    follower.rollback(2)
    assert (len(follower), follower.match) == (2, None)
    for _ in range(20):
        follower.rollback(0)
        follower.read([1])
        follower.answer_begins()
        follower.read([1, 2, 3, 4, 5])
    assert len(follower._index) <= 2 * 8 + 7


@pytest.mark.parametrize("sampling", ["T=1", "T=1 by block"])
def test_the_second_text_has_the_law_of_the_target_whatever_is_kept_of_the_first(sampling: str) -> None:
    seen: set[tuple[str, bool]] = set()

    class Remembering(Noting):
        def __init__(self) -> None:
            ChainedDrafter.__init__(self, MODELS["constant"](), 16)
            self.seen = seen

    sequences = (([1, 2], 2), ([2, 1], 2))
    found = enumerate_decode(Remembering, SAMPLINGS[sampling], 2, 3, sequences=sequences)
    assert error(found, expected_law(SAMPLINGS[sampling], sequences=sequences)) < EXACT
    assert any(source != "model" for source, _ in seen)


def played(choice: SourceChoice, count: int, *, model: int, copied: int, accepted: int, length: int = 4) -> None:
    """Rounds of one kind."""
    steps = tuple(DraftStep(index, 1) for index in range(1, model + copied + 1))
    for number in range(count):
        kind = ExtraToken.BONUS if accepted == len(steps) else ExtraToken.CORRECTION
        seconds = 1.0 * model, 10.0 + 0.5 * len(steps)
        round_ = Round(number, steps, accepted, 1, kind, StopReason.POLICY, None, *seconds, sum(seconds), copied=copied)
        choice.observe(round_, length, length)


def test_the_source_is_that_of_which_more_is_expected() -> None:
    choice = SourceChoice()
    assert choice.instead(4, 9, model=True) == 0  # what the model brings has to be seen first
    assert choice.instead(4, 9, model=False) > 0
    assert choice.instead(0, 9, model=False) == 0
    for model in (1, 5):
        played(choice, 20, model=model, copied=0, accepted=1)
    for _ in range(40):
        for length in range(4, 12):
            choice.learn(length, True)
    assert choice.instead(4, 9, model=True) == 9
    for _ in range(200):
        choice.learn(1, False)
    assert choice.instead(1, 9, model=True) == 0
    assert choice.instead(1, 9, model=False) == 0
    choice.begin()
    assert choice.instead(1, 9, model=True) == 0  # another text begins with what was learned of all


def test_a_copy_behind_a_draft_is_as_long_as_pays() -> None:
    sure, doubtful = SourceChoice(), SourceChoice()
    for choice, accepted in ((sure, 3), (doubtful, 0)):
        for model in (3, 9):
            played(choice, 40, model=model, copied=0, accepted=accepted * model // 3)
        for length in range(1, 24):
            for _ in range(20):
                choice.learn(length, True)
    assert sure.behind(3, 4, 5) == 5
    assert sure.behind(3, 0, 5) == 0
    assert doubtful.behind(3, 4, 5) == 0
    assert sure.widening(3, 2) > 0
    assert SourceChoice().widening(3, 2) == 0


@pytest.mark.usefixtures("drafts_at_will")
@patch("specctl.decoding.chained.QUICK", 0.0)
def test_greedy_tokens_are_those_of_the_target_alone() -> None:
    target = Slot(EagerPasses(random_model("llama"), 64))
    pair = Pair(target, (Slot(EagerPasses(noisy_copy("llama"), 64)),), None, frozenset(), 1 << 31, (), ({},))  # type: ignore[arg-type]
    chain = build_drafter(pair, Setting("cost-optimal", lookup=True))
    assert isinstance(chain, ChainedDrafter)
    rounds: list[Round] = []
    with torch.inference_mode():
        for prompt in ([1, 5, 9], [3, 4, 3, 4, 5, 3]):
            target.rollback(0)
            alone = [token for one in decode(target, None, prompt, 60, GREEDY) for token in one.emitted]
            target.rollback(0)
            chain.rollback(0)
            here = list(decode(target, chain, prompt, 60, GREEDY))
            assert [token for one in here for token in one.emitted] == alone
            rounds += here
    assert any(one.copied and one.summary.accepted_copies for one in rounds)


def test_no_model_no_chain() -> None:
    pair = Pair(TableRunner(TARGET), (TableRunner(DRAFT),), None, frozenset(), 1 << 31, (), ({},))  # type: ignore[arg-type]
    assert build_drafter(pair, Setting("none", lookup=True)) is None


def looks(chaining: Chaining, text: list[int]) -> bool:
    """Whether the lookup has a part in the round behind a text: then it asks for the model."""
    asked = []
    chaining.instead(text[chaining.length :], 0, model=lambda: asked.append(True) is None)
    assert chaining.behind([], None, 0) == []
    return bool(asked)


def test_where_little_repeats_itself_the_lookup_looks_now_and_then() -> None:
    """And from the first look on that finds repetition, always."""
    chaining = Chaining()
    chaining.read_prompt([1, 2, 3])
    chaining.begin()
    text, looked = [1, 2, 3], []
    for number in range(60):
        new = [100 + number] if number < 40 else [7, 8, 9, 10, 11]
        text += new
        looked.append(looks(chaining, text))
        chaining.observe(round_of(1, 1))
    first = looked.index(False)
    assert 5 < first < 15
    rests = [len(list(some)) for looks_, some in groupby(looked[first:]) if not looks_]
    assert rests[:3] == [SHORTEST_REST, 2 * SHORTEST_REST, LONGEST_REST]
    again = next(number for number in range(40, 60) if looked[number])
    assert again <= 40 + LONGEST_REST
    assert all(looked[again + LONGEST_REST + 1 :])
    for seconds, expected in ((0.0, False), (0.02, True)):
        chaining.rollback(0)
        chaining.read_prompt([4])
        chaining.begin()
        text = [4, *range(200, 240)]
        assert looks(chaining, [4])
        assert looks(chaining, text)
        chaining.observe(replace(round_of(1, 1), total_seconds=seconds))
        assert looks(chaining, text) == expected, "of a long round looking takes next to nothing"


@pytest.mark.parametrize(("said", "rests"), [((1, 2, 3), False), ((1, 2), True)], ids=["two", "one"])
def test_what_counts_as_repetition_is_right_behind_two_tokens(said: tuple[int, ...], rests: bool) -> None:
    chaining = Chaining()
    chaining.read_prompt([*said])
    chaining.begin()
    text, looked = [*said], []
    for number in range(40):
        text += [100 + number, *said]  # right behind as many of them as there are but one, and wrong behind all
        looked.append(looks(chaining, text))
        chaining.observe(round_of(1, 1))
    assert (False in looked) == rests


def test_the_model_reads_the_prompt_in_the_pass_of_its_first_draft() -> None:
    model = TableRunner(DRAFT)
    chain = ChainedDrafter(ModelDrafter(model, Constant(2)))
    chain.begin(GREEDY, frozenset(), None)
    chain.prefill([1, 2, 3])
    assert model.extended == []
    draft = chain.draft([1, 2, 3], 4)
    assert (len(draft.tokens) - draft.copied, model.extended) == (2, [3, 1])
    assert draft.prompt_seconds > 0
