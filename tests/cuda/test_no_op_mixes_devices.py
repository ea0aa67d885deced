"""Decoding, recording and training on several cards: no operation mixes devices, and the text is that of one card."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from specctl.decoding.composition import Stage, build_drafter, compose
from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.trees import TreeDrafter
from specctl.models.draft_heads.training import Teacher
from specctl.models.loading.draft_heads import build_head_runner
from specctl.models.running.eager import EagerPasses
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.observing.pass_times import PassMeter
from specctl.policies import POLICIES, Setting
from specctl.policies.published import Constant
from specctl.policies.setting import TreeSize
from specctl.replay.recording import metering
from specctl.replay.recording.sequence_recording import read_sequence
from specctl.training.predictor_examples import Example, ModelStates, acceptance, last_hidden_states, signals
from specctl.training.predictor_learner import weighted_loss
from tests.support.pretend_cuda import Devices
from tests.support.pretend_cuda.pairs import HEADS, TEXT, VOCABULARY, on, runner_of, spread, unexpected
from tests.support.toys import noisy_copy, random_model, random_predictor, toy_disco

GREEDY, FILTERED = Sampling(), Sampling(0.8, top_k=20, top_p=0.9, min_p=0.01)
BLOCKS = Sampling(1.0, verification="block")
PROMPT, LENGTH = TEXT[:12], 5


pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def cuda() -> Iterator[Devices]:
    with Devices(3) as devices:
        yield devices


def said(target: Slot, drafter: Drafter | None, sampling: Sampling = GREEDY) -> list[int]:
    """The text of a pair; its rounds have drafted."""
    target.rollback(0)
    if drafter is not None:
        drafter.rollback(0)
    prefill(target, drafter, PROMPT)
    draws = torch.Generator(target.device).manual_seed(0)
    rounds = list(decode(target, drafter, PROMPT, LENGTH, sampling, frozenset(), draws))
    assert drafter is None or sum(round_.drafted for round_ in rounds)
    return [token for round_ in rounds for token in round_.emitted]


def models(cuda: Devices, *devices: str, engine: str = "eager") -> list[Slot]:
    """A target and drafts of it, each on its device."""
    kinds = [random_model("llama"), noisy_copy("llama"), noisy_copy("llama", 0.03)]
    return [runner_of(engine, on(cuda, kind, device)) for kind, device in zip(kinds, devices, strict=False)]


@pytest.fixture(scope="module")
def text() -> list[int]:
    """What the target says by itself, on the CPU."""
    with torch.inference_mode():
        return said(Slot(EagerPasses(random_model("llama"), VOCABULARY)), None)


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")], ids="-".join)
@pytest.mark.representatives(slow=("cuda:0-cuda:1",))
def test_pairs(cuda: Devices, devices: tuple[str, str], text: list[int]) -> None:
    sampled = []
    for engine in ("eager", "static", "graph"):
        target, draft = models(cuda, *devices, engine=engine)
        assert said(target, ModelDrafter(draft, Constant(4))) == text
        head = cuda.move(random_predictor(32, spread=0.15), devices[1])
        sampled.append(said(target, ModelDrafter(draft, POLICIES["specdec++"](), predictor=head), FILTERED))
    assert sampled[0] == sampled[1] == sampled[2]


def test_block_verification(cuda: Devices) -> None:
    texts = [
        said(target, ModelDrafter(draft, Constant(4)), BLOCKS)
        for target, draft in (models(cuda, "cuda:0", "cuda:1"), models(cuda, "cuda:0", "cuda:1", engine="graph"))
    ]
    assert texts[0] == texts[1]


def test_a_disco_head(cuda: Devices, text: list[int]) -> None:
    target, draft = models(cuda, "cuda:0", "cuda:1")
    assert said(target, ModelDrafter(draft, POLICIES["disco"](), predictor=toy_disco())) == text


@pytest.mark.parametrize("draft_on", ["cuda:0", "cuda:2"])
@pytest.mark.representatives("cuda:2")
def test_a_target_that_is_spread(cuda: Devices, draft_on: str, text: list[int]) -> None:
    target = Slot(EagerPasses(spread(cuda, random_model("llama"), "cuda:0", "cuda:1"), VOCABULARY))
    draft = Slot(EagerPasses(on(cuda, noisy_copy("llama"), draft_on), VOCABULARY))
    assert said(target, ModelDrafter(draft, Constant(4))) == text
    tree = TreeDrafter(draft, Constant(2), TreeSize(tokens=6, beams=2))
    assert said(target, tree) == text


def test_a_draft_that_is_spread_gives_its_head_one_state(cuda: Devices, text: list[int]) -> None:
    target = Slot(EagerPasses(on(cuda, random_model("llama"), "cuda:2"), VOCABULARY))
    draft = Slot(EagerPasses(spread(cuda, noisy_copy("llama"), "cuda:0", "cuda:1"), VOCABULARY))
    head = cuda.move(random_predictor(32, spread=0.15), "cuda:0")
    assert said(target, ModelDrafter(draft, POLICIES["specdec++"](), predictor=head)) == text
    draft.rollback(0)
    draft.extend(PROMPT, keep=1)
    cuda.ledger.clear()
    draft.extend([1], keep=1)
    plain = cuda.ledger.tally()
    draft.rollback(len(PROMPT))
    cuda.ledger.clear()
    draft.extend([1], keep=1, hidden=True)
    assert cuda.ledger.tally().copies == plain.copies + 1  # not the states of every layer


@pytest.mark.parametrize("sampling", [GREEDY, FILTERED], ids=["greedy", "sampled"])
@pytest.mark.representatives("sampled")
def test_a_hierarchy(cuda: Devices, sampling: Sampling, text: list[int]) -> None:
    target, middle, lowest = models(cuda, "cuda:0", "cuda:1", "cuda:2")
    head = cuda.move(random_predictor(32, spread=0.15), "cuda:1")
    stages = [Stage(middle, POLICIES["specdec++"](max_draft=4), predictor=head), Stage(lowest, Constant(2))]
    assert said(target, compose(stages), sampling) == text or sampling is FILTERED


@pytest.mark.parametrize("sampling", [GREEDY, FILTERED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.representatives(slow=("graph-sampled",))
def test_trees(cuda: Devices, engine: str, sampling: Sampling, text: list[int]) -> None:
    target, draft = models(cuda, "cuda:0", "cuda:1", engine=engine)
    drafter = TreeDrafter(draft, Constant(2), TreeSize(tokens=6, beams=2))
    assert said(target, drafter, sampling) == text or sampling is FILTERED


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.representatives("graph-block")
def test_draft_heads(cuda: Devices, engine: str, make: Callable[[], Any], text: list[int]) -> None:
    (target,) = models(cuda, "cuda:0", engine=engine)
    settings = EngineSettings(engine=engine, notice=unexpected)  # type: ignore[arg-type]
    head = build_head_runner(cuda.move(make(), "cuda:1"), VOCABULARY, "the head", settings)
    assert head.reads_states
    target.watch(head.layers)
    for sampling in (GREEDY, FILTERED):
        assert said(target, ModelDrafter(head, Constant(3)), sampling) == text or sampling is FILTERED
    if engine == "graph":
        # What stands on one card is captured there, and nowhere else.
        assert {one.stream.device.index for one in cuda.captures} == {0, 1}
        assert all(one.nodes for one in cuda.captures)


def pair_of(runners: Sequence[Slot], **more: Any) -> Pair:
    target, *drafts = runners
    return Pair(target, tuple(drafts), None, frozenset(), target.context, (), **more)  # type: ignore[arg-type]


def test_drafting_in_parallel(cuda: Devices, text: list[int]) -> None:
    pair = pair_of(models(cuda, "cuda:0", "cuda:1"))
    drafter = build_drafter(pair, Setting("constant", (("draft_length", 3),), parallel=True))
    assert said(pair.target, drafter) == text
    said(pair.target, drafter, FILTERED)


@pytest.mark.parametrize("sampling", [GREEDY, FILTERED, BLOCKS], ids=["greedy", "sampled", "in blocks"])
@pytest.mark.representatives("in blocks", "greedy")
def test_recording_for_replay(cuda: Devices, sampling: Sampling) -> None:
    """Branches that share a cache, and predictions along them."""
    head = cuda.move(random_predictor(32, spread=0.15), "cuda:1")
    pair = pair_of(models(cuda, "cuda:0", "cuda:1"), named_predictors=({"": head},))
    draws = torch.Generator("cuda:0").manual_seed(0)
    drafted = read_sequence(pair, PROMPT[:8], PROMPT[8:14], 20, 3, sampling, draws)
    assert drafted is not None


@pytest.mark.slow
def test_measuring_costs(cuda: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pair_of(models(cuda, "cuda:0", "cuda:1"), named_predictors=({},))
    times = PassMeter(pair, 16, 2).measure(1)
    assert set(times.target) == {1, 2}
    monkeypatch.setattr(metering, "PASSES", 2)
    monkeypatch.setattr(metering, "LENGTHS", (0, 2))
    monkeypatch.setattr(metering, "IN_A_ROW", 2)
    table = metering.measure(pair, [16], 2, [frozenset({"entropy"})], FILTERED, [0.1])
    assert table.draft_ms.shape == (1, 2)


def test_hidden_states_for_training(cuda: Devices) -> None:
    model = on(cuda, random_model("llama"), "cuda:1")
    sequences = [torch.tensor(TEXT[:9]), torch.tensor(TEXT[:5])]
    found = last_hidden_states(model, sequences)
    expected = last_hidden_states(random_model("llama"), sequences)
    for one, other in zip(found, expected, strict=True):
        assert one.device == torch.device("cuda:1")
        torch.testing.assert_close(one.cpu(), other)


def test_a_step_of_training_a_head_up_to_its_loss(cuda: Devices) -> None:
    """Gradients are no part of it: torch wants streams for them that are really there."""
    tokens = [torch.tensor(TEXT[start : start + 6]) for start in (0, 6, 12)]
    example = Example(0, *tokens, *torch.rand(4, 6, generator=torch.Generator().manual_seed(0)))
    losses = []
    for draft, device in ((random_model("llama"), "cpu"), (on(cuda, random_model("llama"), "cuda:1"), "cuda:1")):
        states, head = ModelStates(draft, 0.5), random_predictor(32, spread=0.15)
        assert states.device == torch.device(device)
        mixed = states.mix([example], "a seed")
        hidden = states.of([example], mixed)
        accepted, seen = (part.to(hidden.device) for part in (acceptance([example], mixed), signals([example], mixed)))
        head = head if device == "cpu" else cuda.move(head, device)
        losses.append(weighted_loss(head(hidden, seen), accepted, 2.0).item())
    assert losses[0] == pytest.approx(losses[1])


def test_lessons_for_training_a_draft_head(cuda: Devices) -> None:
    target = spread(cuda, random_model("llama"), "cuda:0", "cuda:1")
    lesson = Teacher(target, (0, 1, -1)).lesson(torch.tensor(TEXT[:5]), torch.tensor(TEXT[5:12]))
    assert {part.device for part in (lesson.ids, lesson.logits, *lesson.states.values())} == {torch.device("cuda:0")}


def test_embeddings_that_are_kept_in_main_memory(cuda: Devices, text: list[int]) -> None:
    """accelerate leaves their weights on meta between passes and computes with them on the first card."""
    model = on(cuda, random_model("llama"), "cuda:1")
    embeddings = model.get_input_embeddings()
    weight = embeddings.weight

    def there(*_: object) -> None:
        embeddings.weight = weight

    def gone(*_: object) -> None:
        embeddings.weight = torch.nn.Parameter(weight.inner.to("meta"), requires_grad=False)

    gone()
    embeddings.register_forward_pre_hook(there)
    embeddings.register_forward_hook(gone)
    target, (draft,) = Slot(EagerPasses(model, VOCABULARY)), models(cuda, "cuda:0")[:1]
    assert target.device == torch.device("cuda:1")
    assert said(target, ModelDrafter(draft, Constant(4))) == text
    assert last_hidden_states(model, [torch.tensor(TEXT[:4])])[0].device == target.device
