"""Draft heads in the loop: the states they are shown, and what they draft from them."""

from collections.abc import Callable, Sequence

import pytest
import torch
from law_table import CASES, ENDS, FEW, SAMPLINGS, Case, enumerate_decode, error, expected_law

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.loop import decode, read_prompt
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.chain_runner import ChainPasses, GraphChainPasses
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.passes.compilation import Compiler, missing_compiler
from specctl.models.passes.watching import States
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import GraphPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.running.transforms import FixedWidthPasses
from specctl.policies.published import Constant, SelfVerify
from specctl.records import ExtraToken, Round
from tests.support.toy_heads import random_eagle3
from tests.support.toys import (
    LAYER,
    WITHOUT_FORESIGHT,
    Replays,
    Script,
    StateTable,
    TableRunner,
    ToyDraftHead,
    head_for,
    random_model,
    random_predictor,
    related_table,
    table,
)

EXACT = 3e-7
PROMPT = [5, 9, 2, 40, 33, 7, 12, 60]
LAYERS = (0, 1, -1)
SHAPE = LayerShape(hidden_size=16, intermediate_size=24, heads=2, kv_heads=1, head_dim=8)

TARGETS: dict[str, Callable[..., Slot]] = {
    "eager": lambda model: Slot(EagerPasses(model, 64)),
    "static": lambda model: Slot(StaticPasses(model, 64)),
    "graph": lambda model: Slot(GraphPasses(model, 64, Replays())),
    "fixed width": lambda model: Slot(FixedWidthPasses(Slot(StaticPasses(model, 64)))),
}
HEADS: dict[str, Callable[..., Slot]] = {
    "uncompiled": lambda head: Slot(ChainPasses(head, 64)),
    "graph": lambda head: Slot(GraphChainPasses(head, 64, Replays())),
}


def head_drafter(layers: Sequence[int] = LAYERS, length: int = 4, engine: str = "uncompiled") -> ModelDrafter:
    head = random_eagle3(layers=tuple(layers), states=32, vocabulary=64, shape=SHAPE, spread=0.5)
    return ModelDrafter(HEADS[engine](head), Constant(draft_length=length))


class Noting(ModelDrafter):
    """Notes the states that it is shown."""

    def __init__(self, drafter: ModelDrafter) -> None:
        super().__init__(drafter.runner, drafter.policy)
        self.shown: dict[int, torch.Tensor] = {layer: torch.empty(0, 32) for layer in LAYERS}

    def observe_states(self, start: int, states: States) -> None:
        assert start <= len(self.shown[LAYERS[0]]), "a place was left out"
        self.shown = {layer: torch.cat([rows[:start], states[layer]]) for layer, rows in self.shown.items()}
        super().observe_states(start, states)

    def rollback(self, length: int) -> None:
        self.shown = {layer: rows[:length] for layer, rows in self.shown.items()}
        super().rollback(length)


def play(target: Slot, drafter: Drafter, prompt: Sequence[int], limit: int) -> tuple[list[int], list[Round]]:
    target.rollback(0)
    drafter.rollback(0)
    tokens: list[int] = []
    rounds = []
    with torch.inference_mode():
        prefill(target, drafter, prompt)
        for round_ in decode(target, drafter, prompt, limit, Sampling()):
            tokens += round_.emitted
            rounds.append(round_)
    return tokens, rounds


class Rests(Script):
    """Never drafts, and need not be told of rounds."""

    def __init__(self) -> None:
        super().__init__(0)

    def rests(self) -> int:
        return 5


def test_a_head_that_is_not_wanted_at_first_is_shown_the_prompt_with_the_first_tokens() -> None:
    target = Slot(EagerPasses(random_model("llama"), 64))
    target.watch(LAYERS)
    found = []
    for early, policy in ((0, Script(0, 0, 3)), (3, Script(3, 0, 3)), (0, Rests())):
        drafter = Noting(ModelDrafter(head_drafter().runner, policy))
        for runner in (target, drafter):
            runner.rollback(0)
        with torch.inference_mode():
            read_prompt(target, drafter, PROMPT)
            assert target.length == (len(PROMPT) - 1 if early else 0)
            found.append([token for one in decode(target, drafter, PROMPT, 20, Sampling()) for token in one.emitted])
        assert len(drafter.shown[-1]) >= len(PROMPT) + 18
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("engine", TARGETS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-neox"])
@pytest.mark.representatives("llama-eager", "llama-fixed width", "gemma2-eager")
def test_a_head_is_shown_the_states_of_the_text_and_of_nothing_else(family: str, engine: str) -> None:
    model = random_model(family)
    if family == "gemma2" and engine != "eager":
        pytest.skip("it has a sliding window")
    target, drafter = TARGETS[engine](model), Noting(head_drafter())
    target.watch(LAYERS)
    tokens, rounds = play(target, drafter, PROMPT, 40)
    assert sum(round_.accepted < round_.drafted for round_ in rounds) > 3, "nothing was ever taken back"
    text = [*PROMPT, *tokens]
    with torch.inference_mode():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    for layer, rows in drafter.shown.items():
        assert len(rows) >= len(text) - 2
        torch.testing.assert_close(rows, states[layer][0, : len(rows)], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("engine", HEADS)
@pytest.mark.representatives("graph")
def test_what_a_head_drafts_does_not_depend_on_earlier_rounds(engine: str) -> None:
    model = random_model("llama")
    target, drafter = Slot(EagerPasses(model, 64)), head_drafter(engine=engine)
    target.watch(LAYERS)
    _, rounds = play(target, drafter, PROMPT, 40)
    text = list(PROMPT)
    fresh = Slot(EagerPasses(model, 64))
    fresh.watch(LAYERS)
    for round_ in rounds:
        anew = head_drafter(engine=engine)
        fresh.rollback(0)
        with torch.inference_mode():
            prefill(fresh, anew, text)
            budget = 40 - (len(text) - len(PROMPT)) - 1
            assert anew.draft(text, budget).tokens == [step.token for step in round_.steps]
        text += round_.emitted


@pytest.mark.exhaustive
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="there is no C++ compiler")
def test_compiled_passes_show_states_and_draft_the_same() -> None:
    heard: list[str] = []
    model, layers = random_model("llama", layers=1), (0, -1)
    head = random_eagle3(layers=layers, states=32, vocabulary=64, shape=SHAPE, spread=0.5)
    plain = Slot(EagerPasses(model, 64))
    plain.watch(layers)
    tokens, rounds = play(plain, ModelDrafter(Slot(ChainPasses(head, 64)), Constant(draft_length=4)), PROMPT, 40)
    target = Slot(StaticPasses(model, 64, compiler=Compiler("the target", heard.append)))
    target.watch(layers)
    drafter = ModelDrafter(
        Slot(ChainPasses(head, 64, compiler=Compiler("the head", heard.append))), Constant(draft_length=4)
    )
    for _ in range(2):
        again, compiled = play(target, drafter, PROMPT, 40)
        assert again == tokens
        assert [[step.token for step in one.steps] for one in compiled] == [
            [step.token for step in one.steps] for one in rounds
        ]
    assert heard == []


def test_a_kept_cache_gives_the_same_drafts_as_a_fresh_one() -> None:
    model = random_model("llama")
    target, drafter = Slot(EagerPasses(model, 64)), head_drafter()
    target.watch(LAYERS)
    play(target, drafter, PROMPT, 30)
    # Another draft takes part for a while: the head misses what the target reads then.
    target.rollback(4)
    drafter.rollback(4)
    prompt = [*PROMPT, 3, 3, 3, 8, 1, 20]
    with torch.inference_mode():
        target.extend([*PROMPT[4:], 3, 3, 3, 8], keep=0)
        prefill(target, drafter, prompt)
        again = [round_.steps for round_ in decode(target, drafter, prompt, 20, Sampling())]
    _, rounds = play(target, drafter, prompt, 20)
    assert [round_.steps for round_ in rounds] == again


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-neox", "mistral"])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["prompt", "one token"])
@pytest.mark.representatives("prompt-llama", "one token-gemma2", "prompt-gpt-neox")
def test_greedy_text_is_the_targets_own(family: str, prompt: list[int]) -> None:
    model = random_model(family)
    target, drafter = Slot(EagerPasses(model, 64)), head_drafter()
    target.watch(LAYERS)
    alone = Slot(EagerPasses(model, 64))
    with torch.inference_mode():
        expected = [round_.emitted[0] for round_ in decode(alone, None, prompt, 40, Sampling())]
    assert play(target, drafter, prompt, 40)[0] == expected


def test_a_head_that_reads_its_own_output_too_soon_drafts_otherwise() -> None:
    """The states matter, and so does their place: a shift by one changes the drafts."""
    model = random_model("llama")
    drafts = []
    for shift in (0, 1):
        target, drafter = Slot(EagerPasses(model, 64)), head_drafter()
        target.watch(LAYERS)
        with torch.inference_mode():
            states = target.extend(PROMPT, keep=0).states
            assert states is not None
            moved = {layer: torch.roll(rows, shift, 0) for layer, rows in states.items()}
            drafter.observe_states(0, {layer: rows[:-1] for layer, rows in moved.items()})
            drafter.prefill(PROMPT)
            drafts.append(drafter.draft(PROMPT, 8).tokens)
    assert drafts[0] != drafts[1]


HEAD_CASES = [
    case for case in CASES if case.sampling == "T=1" and case.name in WITHOUT_FORESIGHT and case.name != "none"
]
HEAD_CASES = [*{case.name: case for case in HEAD_CASES}.values(), Case("constant", FEW, {"draft_length": 2})]


def toy_drafter(case: Case) -> ModelDrafter:
    head = random_eagle3(states=3, vocabulary=3, tokens=[0, 2] if case.sampling == FEW else None, seed=4)
    policy = case.policy()
    return ModelDrafter(
        Slot(ChainPasses(head, 3, capacity=16)), policy, predictor=head_for(policy, random_predictor(8, seed=3))
    )


SHORT = [case for case in HEAD_CASES if case.name in ("svip", "cost-optimal")]


@pytest.mark.parametrize(
    ("case", "lengths"), [*((case, (3, 4)) for case in HEAD_CASES), *((case, (2, 3)) for case in SHORT)], ids=str
)
@pytest.mark.representatives("(2, 3)", "constant: draft_length=2; T=0.7 top_k=2 top_p=0.95", slow=("constant", "svip"))
def test_output_has_the_law_of_the_target(case: Case, lengths: tuple[int, int]) -> None:
    sampling = SAMPLINGS[case.sampling]
    found = enumerate_decode(lambda: toy_drafter(case), sampling, *lengths, layers=(0,))
    assert sum(found.law.values()) == pytest.approx(1)
    assert error(found, expected_law(sampling, lengths[0])) < EXACT
    assert found.extras >= {ExtraToken.CORRECTION, ExtraToken.BONUS}


@pytest.mark.exhaustive
def test_output_of_a_hierarchy_over_a_head_has_the_law_of_the_target() -> None:
    case = Case("constant", "T=1", {"draft_length": 2})
    middle = related_table(table(8, eos_logit=-0.5, spread=1.0, vocabulary=3), seed=5, noise=0.6)

    def drafter() -> Drafter:
        runner = TableRunner(middle)
        runner.watch((0,))
        return PreVerifiedDrafter(toy_drafter(case), runner, SelfVerify(max_draft=3))

    found = enumerate_decode(drafter, SAMPLINGS["T=1"], 3, 4, ENDS)
    assert error(found, expected_law(SAMPLINGS["T=1"], 3)) < EXACT


def test_a_head_below_a_draft_that_sat_out_a_round_is_shown_what_it_missed() -> None:
    """After a whole block was accepted it lacks one state; without a block in the next round it would lack two."""
    prompt = [1, 2, 4]

    def model() -> StateTable:
        return StateTable(table(21))

    def hierarchy(policy: Script) -> PreVerifiedDrafter:
        middle = model()
        middle.watch((LAYER,))
        head = ToyDraftHead(related_table(middle.table, seed=23), seed=5, noise=4.0)
        return PreVerifiedDrafter(ModelDrafter(head, Constant(draft_length=2)), middle, policy)

    _, rounds = play(model(), hierarchy(Script(3, 0)), prompt, 40)
    assert [round_.drafted for round_ in rounds[:4]] == [3, 0, 3, 0]
    assert all(round_.fully_accepted for round_ in rounds)
    text = list(prompt)
    for round_, before in zip(rounds, [None, *rounds], strict=False):
        if before is not None and not before.drafted:
            fresh = hierarchy(Script(3))
            fresh.prefill(text)
            drafted = fresh.draft(text, 40 - (len(text) - len(prompt)) - 1)
            assert [inner.steps for inner in drafted.inner] == [inner.steps for inner in round_.inner]
        text += round_.emitted


def test_a_head_cannot_be_a_middle_draft() -> None:
    with pytest.raises(ValueError, match="one pass"):
        PreVerifiedDrafter(head_drafter(), head_drafter().runner, Constant(draft_length=2))
