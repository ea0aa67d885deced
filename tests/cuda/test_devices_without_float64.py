"""Devices without float64, such as Apple's GPUs: the host draws, and texts are those of the processor by seed."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specctl.decoding.composition import Stage, compose
from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.session import Session
from specctl.decoding.trees import TreeDrafter
from specctl.models.loading.draft_heads import build_head_runner
from specctl.models.passes import inference
from specctl.models.passes.compilation import missing_compiler
from specctl.models.running.eager import EagerPasses
from specctl.models.running.engines import EngineSettings
from specctl.models.running.lookup import LookupPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.policies import POLICIES
from specctl.policies.published import Constant
from specctl.policies.setting import TreeSize
from specctl.profile.schema import SamplingTable
from specctl.records import Completion
from specctl.text_engine.dispatch import in_order
from specctl.text_engine.engine import whole
from specctl.text_engine.here import HereEngine, Rows
from specctl.text_engine.pair_rows import passes_of
from tests.support.pretend_cuda import Devices
from tests.support.pretend_cuda.pairs import HEADS, TEXT, VOCABULARY, Tokenizer
from tests.support.toys import noisy_copy, random_model, random_predictor, toy_disco

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "token": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "verification": "token"},
    "block": {"temperature": 1.0, "verification": "block"},
}
Put = Callable[[Any, str], Any]
"""Puts a copy of a network on one of two places, ``target`` or ``draft``."""


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    monkeypatch.setattr(inference, "WITHOUT_FLOAT64", frozenset({"cuda"}))
    inference.draws.cache_clear()
    with Devices(2, float64=False) as found:
        yield found
    inference.draws.cache_clear()


def test_the_pretence_has_no_float64(devices: Devices) -> None:
    here = torch.zeros(3, device="cuda:0")
    double = torch.ones(2).double()
    for wrong in (here.double, lambda: here.cumsum(0, dtype=torch.float64), lambda: double.to("cuda:0")):
        with pytest.raises(TypeError, match="float64"):
            wrong()
    assert [inference.draws(torch.device(name)) for name in ("cuda:1", "cpu")] == [False, True]
    assert devices.count == 2


def model(put: Put, where: str = "target", noise: float | None = None) -> Slot:
    return Slot(
        EagerPasses(put(random_model("llama") if noise is None else noisy_copy("llama", noise), where), VOCABULARY)
    )


def chain(policy: str, head: Any = None) -> Callable[[Put], tuple[Slot, Drafter]]:
    def make(put: Put) -> tuple[Slot, Drafter]:
        predictor = put(head(), "draft") if isinstance(head and head(), torch.nn.Module) else head and head()
        return model(put), ModelDrafter(model(put, "draft", 0.02), POLICIES[policy](), predictor=predictor)

    return make


def hierarchy(put: Put) -> tuple[Slot, Drafter]:
    stages = [Stage(model(put, "draft", 0.02), Constant(4)), Stage(model(put, "target", 0.03), Constant(2))]
    drafter = compose(stages)
    assert drafter is not None
    return model(put), drafter


def tree(put: Put) -> tuple[Slot, Drafter]:
    return model(put), TreeDrafter(model(put, "draft", 0.02), Constant(2), TreeSize(tokens=6, beams=2))


def lookup(put: Put) -> tuple[Slot, Drafter]:
    return model(put), LookupDrafter(Slot(LookupPasses(2)), Constant(3))


def head_of(kind: str) -> Callable[[Put], tuple[Slot, Drafter]]:
    def make(put: Put) -> tuple[Slot, Drafter]:
        target = model(put)
        head = build_head_runner(put(HEADS[kind](), "draft"), VOCABULARY, "the head", EngineSettings(engine="eager"))
        target.watch(head.layers)
        return target, ModelDrafter(head, Constant(3))

    return make


KINDS: dict[str, Callable[[Put], tuple[Slot, Drafter]]] = {
    "svip": chain("svip"),
    "specdec++": chain("specdec++", lambda: random_predictor(32, spread=0.15)),
    "disco": chain("disco", toy_disco),
    "hierarchy": hierarchy,
    "tree": tree,
    "lookup": lookup,
    **{kind: head_of(kind) for kind in HEADS},
}


def put_on(devices: Devices, **places: str) -> Put:
    return lambda network, where: network if where not in places else devices.move(deepcopy(network), places[where])


def pair_of(target: Slot, *drafts: Slot) -> Pair:
    tokenizer: Any = Tokenizer()
    return Pair(target, drafts, tokenizer, frozenset(), target.context, (), ({},) * len(drafts))


def told(completion: Completion) -> list[Any]:
    return [completion.tokens, [[step.token for step in round_.steps] for round_ in completion.rounds]]


def written(kind: str, put: Put, sampling: str) -> list[Any]:
    target, drafter = KINDS[kind](put)
    table = SamplingTable(max_new_tokens=8, seed=5, **SAMPLINGS[sampling])
    return told(Session(pair_of(target), drafter).generate(TEXT[:12], table))


PLACES = {
    "one": {"target": "cuda:0", "draft": "cuda:0"},
    "two": {"target": "cuda:0", "draft": "cuda:1"},
    "draft": {"draft": "cuda:0"},
}
CASES = [
    *("svip-token-one", "specdec++-block-two", "tree-token-draft", "block-greedy-one"),
    *("svip-greedy-draft", "disco-token-two", "hierarchy-block-one", "tree-greedy-one", "lookup-block-one"),
    "chain-token-two",
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.representatives(*CASES[:3])
def test_texts_are_those_of_the_processor(devices: Devices, case: str) -> None:
    kind, sampling, places = case.split("-")
    assert written(kind, put_on(devices, **PLACES[places]), sampling) == written(kind, put_on(devices), sampling)


@pytest.mark.parametrize("sampling", ["greedy", "block"])
@pytest.mark.representatives(slow=("block",))
def test_texts_of_a_batch_are_those_of_the_processor(devices: Devices, sampling: str) -> None:
    table = SamplingTable(max_new_tokens=6, seed=5, **SAMPLINGS[sampling])
    found = []
    for put in (put_on(devices, target="cuda:0", draft="cuda:0"), put_on(devices)):
        target, drafter = KINDS["svip"](put)
        assert isinstance(drafter, ModelDrafter)
        pair = pair_of(target, drafter.runner)

        def answer(row: Pair, _: Any) -> Any:
            session = Session(row, ModelDrafter(row.drafts[0], POLICIES["svip"]()))
            return whole(lambda text: told(session.generate(text, table)))

        with HereEngine(None, Rows.over(pair, passes_of(pair, 2), answer)) as rows:
            prompts = [TEXT[:12], TEXT[3:30], TEXT[5:9]]
            found.append([each for _, each in in_order(rows, [(prompt, prompt) for prompt in prompts])])
    assert found[0] == found[1]


def test_nothing_is_compiled_that_the_host_reads() -> None:
    assert "drawn on the host" in str(missing_compiler(torch.device("mps")))


@pytest.mark.parametrize("has", [True, False])
def test_some_of_intels_devices_have_float64(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: SimpleNamespace(has_fp64=has))
    inference.draws.cache_clear()
    assert inference.draws(torch.device("xpu:0")) is has
    inference.draws.cache_clear()
