"""Drafts that hold fewer tokens than their target: they draft up to there, and the target writes on."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from law_table import DRAFT as LAW_DRAFT
from law_table import PROMPT as LAW_PROMPT
from law_table import SAMPLINGS, enumerate_decode, error, expected_law

from specctl.decoding import round as one_round
from specctl.decoding.composition import build_drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.sampling import Sampling
from specctl.decoding.session import Session
from specctl.models.loading.assembly import load_pair
from specctl.models.passes.forward import Forward
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.running.transforms import ParallelPasses
from specctl.policies import Setting
from specctl.policies.published import Constant
from specctl.policies.setting import TreeSize
from specctl.profile.schema import Profile, SamplingTable
from specctl.records import Round, StopReason
from specctl.replay.play import play, players_of
from specctl.text_engine.pair_rows import passes_of, split
from tests.support.checkpoints import llama_config, save_model, tiny_tokenizer
from tests.support.toys import TableRunner, Ticks, generated, noisy_copy, random_model, seeded
from tests.support.traced import live, pair_of, shape, trace_of

pytestmark = pytest.mark.usefixtures("inference_mode")
CONTEXT, LENGTH, MASK, DEPTH = 24, 40, 63, 6
PROMPTS = [torch.randint(1, 60, (width,), generator=seeded(width)).tolist() for width in (5, 20, 23, 24, 25, 33)]
"""The last two do not fit the draft, and one fills it."""
GREEDY = Sampling()


class Short(EagerPasses):
    """A model with a table of so many places: reading one more would be an error of a real one."""

    def __init__(self, seed: int | None = None, context: int = CONTEXT) -> None:
        super().__init__(noisy_copy("llama") if seed is None else random_model("llama", 1, seed), 64)
        self.context = context
        self.read = 0

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        if requests[0].parents is None:
            assert self.length + len(requests[0].tokens) <= self.context, "it holds no more"
            self.read += len(requests[0].tokens)
        return super().forward(requests)

    def masked_pass(
        self, tokens: Sequence[int], positions: torch.Tensor, seen: torch.Tensor, *, hidden: bool = False
    ) -> Forward:
        assert int(positions.max()) < self.context, "it has no such place"
        self.read += len(tokens)
        return super().masked_pass(tokens, positions, seen, hidden=hidden)


class ShortStatic(StaticPasses):
    def __init__(self) -> None:
        super().__init__(noisy_copy("llama"), 64)
        self.context = CONTEXT


@pytest.fixture
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_round, "working_seconds", Ticks(2.0, 4.0, 0.0))


def still(*_: int) -> tuple[float, float]:
    return 2.0, 4.0


def chain(name: str = "constant", **values: object) -> Setting:
    return Setting.of({"name": name, **values})


FOUR = chain(draft_length=4)
KINDS: dict[str, tuple[Setting, int]] = {
    "chain": (FOUR, 1),
    "svip": (chain("svip", c=1.0, threshold=1.2), 1),
    "cost-optimal": (chain("cost-optimal", max_draft=DEPTH), 1),
    "tree": (replace(FOUR, tree=TreeSize(12, 3)), 1),
    "lookup": (replace(chain("svip", c=1.0, threshold=1.2), lookup=True), 1),
    "parallel": (replace(FOUR, parallel="force"), 1),
    "hierarchy": (replace(chain(draft_length=6), below=chain(draft_length=2)), 2),
}


def drafts_of(number: int, contexts: Sequence[int] = (CONTEXT, CONTEXT)) -> list[Slot]:
    return [
        Slot(Short(None if not level else 1, context)) for level, context in zip(range(number), contexts, strict=False)
    ]


def written(pair: Pair, setting: Setting, prompt: Sequence[int], sampling: Sampling = GREEDY) -> list[Round]:
    return live(pair, setting, prompt, LENGTH, sampling)


def assert_stopped_drafting(rounds: Sequence[Round], prompt: Sequence[int], context: int = CONTEXT) -> None:
    """Some tokens are drafted where the prompt leaves room, and none behind the context, which is no policy's doing."""
    own = [(one, one.drafted - one.copied) for one in rounds]
    assert any(count for _, count in own) == (len(prompt) <= context)
    for one, count in own:
        assert count <= max(0, context + 1 - one.context)
    late = [one for one, count in own if one.context > context and not one.copied]
    assert late
    assert StopReason.BUDGET in {one.stop for one in late}
    assert {one.stop for one in late} <= {StopReason.BUDGET, StopReason.MAX_DRAFT}  # where its policy wants none


@pytest.mark.usefixtures("drafts_at_will", "timeless")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives("chain", "tree", "parallel", "hierarchy", slow=("svip", "cost-optimal", "lookup"))
def test_the_target_writes_on_where_a_draft_holds_no_more(kind: str) -> None:
    setting, count = KINDS[kind]
    target = Slot(EagerPasses(random_model("llama"), 64))
    for prompt in PROMPTS:
        pair = pair_of(target, *drafts_of(count))
        rounds = written(pair, setting, prompt)
        tokens = [token for one in rounds for token in one.emitted]
        assert tokens == generated(random_model("llama"), tuple(prompt), LENGTH)
        if kind != "parallel":  # whose rounds say nothing of where they began
            assert_stopped_drafting(rounds, prompt)
        if len(prompt) > CONTEXT:
            assert not any(draft.passes.read for draft in pair.drafts if isinstance(draft.passes, Short)), (
                "it is not read at all"
            )


@pytest.mark.parametrize("contexts", [(CONTEXT, 10), (10, CONTEXT), (CONTEXT, 22)])
def test_each_level_of_a_hierarchy_stops_at_its_own_context(contexts: tuple[int, int]) -> None:
    setting, _ = KINDS["hierarchy"]
    pair = pair_of(Slot(EagerPasses(random_model("llama"), 64)), *drafts_of(2, contexts))
    rounds = written(pair, setting, PROMPTS[0])
    assert [token for one in rounds for token in one.emitted] == generated(
        random_model("llama"), tuple(PROMPTS[0]), LENGTH
    )
    assert_stopped_drafting(rounds, PROMPTS[0], contexts[0])
    inner = [each for one in rounds for each in one.inner]
    assert any(each.drafted for each in inner)
    assert any(not each.drafted for each in inner) or contexts[0] < contexts[1]


@pytest.mark.parametrize("prompt", PROMPTS[:5], ids=len)
def test_masks_of_a_parallel_draft_fit_too(prompt: list[int]) -> None:
    draft = Slot(ParallelPasses(Slot(Short(context=CONTEXT + 3)), MASK, 4))
    assert draft.context == CONTEXT
    rounds = written(pair_of(Slot(EagerPasses(random_model("llama"), 64)), draft), FOUR, prompt)
    assert [token for one in rounds for token in one.emitted] == generated(random_model("llama"), tuple(prompt), LENGTH)
    assert_stopped_drafting(rounds, prompt)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_texts_follow_the_target(name: str) -> None:
    """The prompt is as long as what the draft holds, less a token: it drafts in some rounds, and in others not."""

    def short() -> ModelDrafter:
        draft = TableRunner(LAW_DRAFT)
        draft.context = len(LAW_PROMPT) + 1
        return ModelDrafter(draft, Constant(2))

    sampling = SAMPLINGS[name]
    found = enumerate_decode(short, sampling)
    assert error(found, expected_law(sampling)) < 1e-6
    assert found.stops >= {StopReason.BUDGET}


# In batches


@pytest.mark.parametrize("draft", [Short, ShortStatic])
def test_some_texts_of_a_batch_draft_while_others_do_not(draft: type[EagerPasses] | type[StaticPasses]) -> None:
    pair = replace(pair_of(Slot(EagerPasses(random_model("llama"), 64)), Slot(draft())), tokenizer=tiny_tokenizer())
    hub, pairs = split(pair, passes_of(pair, 3))
    for setting in (FOUR, chain("cost-optimal", max_draft=DEPTH)):
        sessions = [Session(own, build_drafter(own, setting)) for own in pairs]
        found: dict[int, list[int]] = {}
        for group in ([0, 3, 5], [4, 1, 2]):
            for row, number in enumerate(group):
                hub.begin(row, partial(answered, sessions[row], number))
            while hub.busy:
                found |= dict(answer for _, answer in hub.advance())
        for number, prompt in enumerate(PROMPTS):
            assert found[number] == generated(random_model("llama"), tuple(prompt), LENGTH)


def answered(session: Session, number: int) -> tuple[int, list[int]]:
    done = session.generate(PROMPTS[number], SamplingTable(max_new_tokens=LENGTH))
    return number, list(done.tokens)


# In replay


REPLAYED = {
    **{kind: KINDS[kind] for kind in ("chain", "svip", "cost-optimal", "lookup", "hierarchy")},
    "agreement": (chain("cost-optimal", max_draft=DEPTH, use_agreement=True), 1),
}


@pytest.mark.usefixtures("drafts_at_will", "timeless")
@pytest.mark.parametrize("kind", REPLAYED)
@pytest.mark.representatives("svip", "lookup", slow=("chain", "cost-optimal", "hierarchy", "agreement"))
def test_replayed_rounds_are_those_of_a_live_run(kind: str) -> None:
    setting, count = REPLAYED[kind]
    for prompt in PROMPTS:
        for contexts in ((CONTEXT, CONTEXT), (CONTEXT, 26), (40, CONTEXT)):
            pair = pair_of(Slot(EagerPasses(random_model("llama"), 64)), *drafts_of(count, contexts))
            rounds = written(pair, setting, prompt)
            tokens = [token for one in rounds for token in one.emitted]
            trace = trace_of(pair, prompt, tokens, LENGTH, 2 * DEPTH, GREEDY)
            players = players_of(setting, [still] * count)
            assert [*map(shape, play(players, trace, frozenset()))] == [*map(shape, rounds)]
            assert trace.draft.reach == max(0, contexts[0] + 1 - len(prompt))


def test_so_are_those_of_a_draft_that_writes_blocks() -> None:
    for prompt in PROMPTS[:5]:
        draft = Slot(ParallelPasses(Slot(Short(context=CONTEXT + 3)), MASK, 4))
        pair = pair_of(Slot(EagerPasses(random_model("llama"), 64)), draft)
        rounds = written(pair, FOUR, prompt)
        tokens = [token for one in rounds for token in one.emitted]
        trace = trace_of(pair, prompt, tokens, LENGTH, DEPTH, GREEDY)
        assert [*map(shape, play(players_of(FOUR, [None]), trace, frozenset()))] == [*map(shape, rounds)]


# Loaded from files


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("short")
    target = save_model(folder / "target", llama_config(max_position_embeddings=128))
    draft = save_model(folder / "draft", llama_config(max_position_embeddings=32, num_hidden_layers=1))
    return str(target), str(draft)


def test_a_loaded_pair_holds_what_its_target_holds(folders: tuple[str, str]) -> None:
    target, draft = folders
    tables = {"target": {"model": target, "device": "cpu"}, "draft": {"model": draft, "device": "cpu"}}
    pair = load_pair(Profile.model_validate({"schema_version": 1, "engine": "eager", "threads": 1, **tables}))
    assert (pair.context, pair.shared_context, pair.lower.context) == (128, 32, 32)
    prompt = torch.randint(1, 250, (40,), generator=seeded(0)).tolist()
    drafter = build_drafter(pair, FOUR)
    done = [Session(pair, one).generate(prompt, SamplingTable(max_new_tokens=200)) for one in (drafter, None)]
    assert done[0].tokens == done[1].tokens
    assert len(done[0].tokens) == 88
