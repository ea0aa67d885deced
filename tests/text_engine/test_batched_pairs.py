"""Whole pairs of real architectures: what a batch writes is what each text is alone."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import HostGenerator
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.trees import TreeDrafter
from specctl.models.running.eager import EagerPasses
from specctl.models.running.lookup import LookupPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.running.transforms import FixedWidthPasses
from specctl.policies import POLICIES
from specctl.policies.setting import TreeSize
from specctl.text_engine.pair_rows import passes_of, split, why_alone
from tests.support.onnx_heads import HEADS, KINDS, VOCABULARY, sure_head, torch_runner, verifier
from tests.support.onnx_models import needs_onnx, one_layer, sure_runner
from tests.support.toys import STOPPING, WITHOUT_FORESIGHT, head_for, noisy_copy, random_model, random_predictor, seeded

pytestmark = pytest.mark.usefixtures("inference_mode")
PROMPTS: list[list[int]] = [torch.randint(1, 64, (width,), generator=seeded(width)).tolist() for width in (3, 21, 9, 1)]
LENGTH = 24
HEAD = random_predictor(hidden_size=32)
GREEDY, SAMPLINGS = Sampling(), {"T=1": Sampling(1.0), "filtered": Sampling(0.8, top_k=9, top_p=0.9)}


@cache
def torch_pair(engine: type[EagerPasses] | type[StaticPasses]) -> Pair:
    return of(Slot(engine(random_model("llama"), 64)), Slot(engine(noisy_copy("llama"), 64)))


@cache
def onnx_pair() -> Pair:
    return of(sure_runner(one_layer(), 64), sure_runner(one_layer(seed=1), 64))


def of(target: Slot, *drafts: Slot) -> Pair:
    return Pair(target, drafts, None, frozenset(), 64, (), ({},))  # type: ignore[arg-type]


def drafter_of(pair: Pair, name: str) -> Drafter | None:
    if name == "none":
        return None
    if name == "tree":
        return TreeDrafter(pair.drafts[0], POLICIES["constant"](draft_length=3), TreeSize(12, 3))
    policy = POLICIES[name](**STOPPING.get(name, {}))
    if isinstance(pair.drafts[0].passes, LookupPasses):
        return LookupDrafter(pair.drafts[0], policy)
    drafter = ModelDrafter(pair.drafts[0], policy, predictor=head_for(policy, HEAD))
    if len(pair.drafts) == 1:
        return drafter
    return PreVerifiedDrafter(
        ModelDrafter(pair.drafts[1], policy), pair.drafts[0], POLICIES["constant"](draft_length=4)
    )


def written(pair: Pair, name: str, number: int, sampling: Sampling) -> list[int]:
    prompt, drafter = PROMPTS[number], drafter_of(pair, name)
    pair.target.rollback(0)
    if drafter is not None:
        drafter.rollback(0)
    prefill(pair.target, drafter, prompt)
    rounds = decode(pair.target, drafter, prompt, LENGTH, sampling, frozenset(), HostGenerator(number))
    return [token for played in rounds for token in played.emitted]


def batched(
    pair: Pair, name: str, sampling: Sampling, order: Sequence[int] = range(len(PROMPTS)), *, kept: bool = False
) -> list[list[int]]:
    """All texts in a batch of three, the last in the place of the first that ends."""
    assert why_alone(pair) is None
    hub, pairs = split(pair, passes_of(pair, 3), kept=kept)
    found: dict[int, list[int]] = {}
    todo = [*order]

    def begin(row: int) -> None:
        number = todo.pop(0)
        hub.begin(row, lambda: (number, written(pairs[row], name, number, sampling)))

    for row in range(min(3, len(todo))):
        begin(row)
    while hub.busy:
        for row, (number, tokens) in hub.advance():
            found[number] = tokens
            if todo:
                begin(row)
    found |= {number: tokens for _, (number, tokens) in hub.advance()}
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("name", ["none", *WITHOUT_FORESIGHT])
@pytest.mark.parametrize("engine", [EagerPasses, StaticPasses])
@pytest.mark.representatives(
    "EagerPasses-svip",
    "StaticPasses-specdec++",
    slow=("StaticPasses-constant", "EagerPasses-cost-optimal", "StaticPasses-self-verify"),
)
def test_greedy_texts_of_torch_are_those_of_each_alone(engine: Any, name: str) -> None:
    pair = torch_pair(engine)
    assert batched(pair, name, GREEDY) == [written(pair, name, number, GREEDY) for number in range(len(PROMPTS))]


@pytest.mark.parametrize("name", ["none", "constant", "svip"])
@pytest.mark.parametrize("engine", [EagerPasses, StaticPasses])
@pytest.mark.representatives("StaticPasses-constant")
def test_deterministic_texts_in_bfloat16_hang_on_neither_neighbours_nor_policy(engine: Any, name: str) -> None:
    target, draft = (deepcopy(model).bfloat16() for model in (random_model("llama"), noisy_copy("llama")))
    pair = of(Slot(FixedWidthPasses(Slot(engine(target, 64)))), Slot(engine(draft, 64)))
    found = batched(pair, "none", GREEDY)
    assert batched(pair, name, GREEDY, [3, 1, 0, 2]) == found
    assert batched(pair, name, GREEDY, [2]) == found[2:3], "one alone has passes of the same shape"


@pytest.mark.parametrize("kept", [False, True], ids=["read", "kept"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0)], ids=["greedy", "T=1"])
@pytest.mark.representatives("greedy-kept", "T=1-read")
def test_texts_with_trees_are_those_of_each_alone(sampling: Sampling, kept: bool) -> None:
    pair = torch_pair(EagerPasses)
    expected = [written(pair, "tree", number, sampling) for number in range(len(PROMPTS))]
    assert batched(pair, "tree", sampling, kept=kept) == expected
    if sampling.greedy:
        assert expected == [written(pair, "none", number, sampling) for number in range(len(PROMPTS))]


@pytest.mark.parametrize("kind", ["lookup", "hierarchy"])
def test_greedy_texts_with_other_drafts(kind: str) -> None:
    model, draft = random_model("llama"), noisy_copy("llama")
    target = Slot(EagerPasses(model, 64))
    drafts = (
        [Slot(LookupPasses(2))]
        if kind == "lookup"
        else [Slot(EagerPasses(draft, 64)), Slot(EagerPasses(random_model("llama", 1, 1), 64))]
    )
    pair = replace(of(target), drafts=tuple(drafts), named_predictors=({},) * len(drafts))
    assert batched(pair, "constant", GREEDY) == [written(pair, "none", number, GREEDY) for number in range(4)]


@pytest.mark.crossed
@needs_onnx
@pytest.mark.parametrize("name", ["none", *WITHOUT_FORESIGHT])
@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS.values()], ids=["greedy", *SAMPLINGS])
@pytest.mark.representatives("T=1-svip", "filtered-constant")
def test_texts_of_onnxruntime_are_those_of_each_alone_by_seed(sampling: Sampling, name: str) -> None:
    if name == "cost-optimal" and not sampling.greedy:
        pytest.skip("it reads clocks, so that its drafts differ from run to run")
    pair = onnx_pair()
    alone = [written(pair, name, number, sampling) for number in range(len(PROMPTS))]
    assert batched(pair, name, sampling) == alone
    assert batched(pair, name, sampling, [3, 1, 0, 2]) == alone, "whatever the neighbours"


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.representatives("eagle3", slow=("dflash", "mtp", "gated"))
def test_greedy_texts_with_draft_heads_on_torch_are_those_of_each_alone(kind: str) -> None:
    target, head = Slot(EagerPasses(verifier(), VOCABULARY)), torch_runner(HEADS[kind]())
    target.watch(head.layers)
    pair, name = of(target, head), "constant" if head.foresee is None else "confidence"
    assert batched(pair, name, GREEDY) == [written(pair, name, number, GREEDY) for number in range(4)]


def test_a_draft_head_of_a_middle_model_reads_its_states() -> None:
    target, middle = (Slot(EagerPasses(verifier(), VOCABULARY)) for _ in range(2))
    head = torch_runner(HEADS["eagle3"]())
    middle.watch(head.layers)
    pair = replace(of(target), drafts=(middle, head), named_predictors=({}, {}), above=(None, 0))
    assert batched(pair, "constant", GREEDY) == [written(pair, "none", number, GREEDY) for number in range(4)]


@needs_onnx
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLINGS["T=1"]], ids=["greedy", "T=1"])
@pytest.mark.representatives(slow=("greedy-eagle3", "greedy-dspark", "T=1-eagle3"))
def test_texts_with_draft_heads_on_onnxruntime_are_those_of_each_alone_by_seed(sampling: Sampling, kind: str) -> None:
    target, head = sure_runner(verifier(), VOCABULARY), sure_head(HEADS[kind]())
    target.watch(head.layers)
    pair, name = of(target, head), "constant" if head.foresee is None else "confidence"
    alone = [written(pair, name, number, sampling) for number in range(4)]
    assert batched(pair, name, sampling) == alone
