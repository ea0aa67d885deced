"""GliDe heads in the loop: what they draft, and the law of the output."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from law_table import FEW, SAMPLINGS, Case, Enumeration, enumerate_decode, error, expected_law
from test_draft_heads import PROMPT, play

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.chain_runner import ChainPasses, GraphChainPasses
from specctl.models.draft_heads.glide import GlideHead
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.passes.compilation import Compiler, missing_compiler
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.policies.published import Constant, SelfVerify, Svip
from specctl.records import ExtraToken
from tests.support.toy_heads import random_glide
from tests.support.toys import Replays, TableRunner, random_model, random_predictor, related_table, table

EXACT = 3e-7
SHAPE = LayerShape(hidden_size=16, intermediate_size=24, heads=2, kv_heads=1, head_dim=8)
LIMIT = 40


class StaysWhereItIs(ChainPasses):
    """Wrong on purpose: it keeps what it read before the verifier's keys were known."""

    def rollback(self, slot: int, length: int) -> int:
        super().rollback(slot, length)
        return min(self.length, length)


ENGINES: dict[str, Callable[[GlideHead], Slot]] = {
    "uncompiled": lambda head: Slot(ChainPasses(head, 64, capacity=4)),
    "graph": lambda head: Slot(GraphChainPasses(head, 64, Replays())),
}


def head_of(family: str = "llama", depth: int = 2) -> GlideHead:
    return random_glide(random_model(family), vocabulary=64, depth=depth, shape=SHAPE, spread=0.5)


def watched(head: GlideHead, family: str = "llama") -> Slot:
    target = Slot(EagerPasses(random_model(family), 64))
    target.watch(head.layers)
    return target


def alone(family: str, prompt: Sequence[int]) -> list[int]:
    with torch.inference_mode():
        runner = Slot(EagerPasses(random_model(family), 64))
        return [round_.emitted[0] for round_ in decode(runner, None, prompt, LIMIT, Sampling())]


def differing_drafts(runner_of: Callable[[GlideHead], Slot]) -> int:
    """Of how many rounds a drafter that has just read the text would have drafted others."""
    head, differ = head_of(), 0
    target = watched(head)
    _, rounds = play(target, ModelDrafter(runner_of(head), Constant(draft_length=4)), PROMPT, LIMIT)
    assert sum(round_.accepted < round_.drafted for round_ in rounds) > 3, "nothing was ever taken back"
    text = list(PROMPT)
    for round_ in rounds:
        anew = ModelDrafter(Slot(ChainPasses(head, 64)), Constant(draft_length=4))
        target.rollback(0)
        with torch.inference_mode():
            prefill(target, anew, text)
            drafted = anew.draft(text, LIMIT - (len(text) - len(PROMPT)) - 1).tokens
        differ += drafted != [step.token for step in round_.steps]
        text += round_.emitted
    return differ


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.representatives("graph")
def test_what_a_head_drafts_does_not_depend_on_earlier_rounds(engine: str) -> None:
    assert differing_drafts(ENGINES[engine]) == 0


def test_a_head_that_does_not_read_again_is_caught() -> None:
    assert differing_drafts(lambda head: Slot(StaysWhereItIs(head, 64))) > 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-neox", "mistral"])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["prompt", "one token"])
@pytest.mark.representatives("prompt-llama", "one token-gemma2", slow=("one token-qwen3", "prompt-mistral"))
def test_greedy_text_is_the_targets_own(family: str, prompt: list[int]) -> None:
    head = head_of(family)
    drafter = ModelDrafter(Slot(ChainPasses(head, 64)), Constant(draft_length=4))
    assert play(watched(head, family), drafter, prompt, LIMIT)[0] == alone(family, prompt)


def test_the_verifiers_keys_matter_and_so_does_their_place() -> None:
    head = head_of()
    states = watched(head).extend(PROMPT, keep=0).states
    assert states is not None
    drafts = []
    for shift in (0, 1, None):
        drafter = ModelDrafter(Slot(ChainPasses(head, 64)), Constant(draft_length=8))
        with torch.inference_mode():
            if shift is not None:
                drafter.observe_states(0, {layer: rows.roll(shift, 0)[:-1] for layer, rows in states.items()})
            drafter.prefill(PROMPT)
            drafts.append(tuple(drafter.draft(PROMPT, 8).tokens))
    assert len(set(drafts)) == 3


@pytest.mark.exhaustive
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="there is no C++ compiler")
def test_compiled_passes_draft_the_same() -> None:
    heard: list[str] = []
    head = head_of(depth=1)
    _, rounds = play(watched(head), ModelDrafter(Slot(ChainPasses(head, 64)), Constant(draft_length=4)), PROMPT, LIMIT)
    runner = Slot(ChainPasses(head, 64, compiler=Compiler("the head", heard.append)))
    for _ in range(2):
        _, again = play(watched(head), ModelDrafter(runner, Constant(draft_length=4)), PROMPT, LIMIT)
        assert [[step.token for step in one.steps] for one in again] == [
            [step.token for step in one.steps] for one in rounds
        ]
    assert heard == []


# The law of the output, over tables.

DEPTH, LAYERS = 1, (1,)


# Rules that look at nothing, drop what they looked at, learn from rounds, or read the head's hidden state.
CASES = [
    Case("constant", "T=1", {"draft_length": 2}),
    Case("constant", FEW, {"draft_length": 2}, length=3, limit=4),
    Case("svip", "T=1", {"c": 1.0, "threshold": 0.9, "keep_trigger": False}),
    Case("adaedl", "T=1", {"threshold": 0.6, "eps": 0.3, "beta2": 0.0, "carry_over": True}),
    Case("self-verify", "T=1", {"carry_over": True}),
    Case("specdec++", "T=1", {"threshold": 0.45}),
]
CASES = [replace(case, length=2, limit=3) if case.sampling == "T=1" else case for case in CASES]


def toy_drafter(case: Case) -> ModelDrafter:
    head = random_glide(vocabulary=3, depth=DEPTH, seed=4, spread=0.7)
    predictor = random_predictor(8, seed=3) if "accept_prob" in case.policy().signals else None
    return ModelDrafter(Slot(ChainPasses(head, 3, capacity=16)), case.policy(), predictor=predictor)


def law_of(make: Callable[[], Drafter], case: Case, layers: Sequence[int] = LAYERS) -> Enumeration:
    """The law of the output, once it is sure that it is the target's."""
    sampling = SAMPLINGS[case.sampling]
    found = enumerate_decode(make, sampling, case.length, case.limit, layers=layers)
    assert sum(found.law.values()) == pytest.approx(1)
    assert error(found, expected_law(sampling, case.length)) < EXACT
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.representatives("constant: draft_length=2; T=1", "svip", "specdec++")
def test_output_has_the_law_of_the_target(case: Case) -> None:
    assert law_of(lambda: toy_drafter(case), case).extras >= {ExtraToken.CORRECTION, ExtraToken.BONUS}


@pytest.mark.slow
def test_output_of_a_hierarchy_over_a_head_has_the_law_of_the_target() -> None:
    middle = related_table(table(8, eos_logit=-0.5, spread=1.0, vocabulary=3), seed=5, noise=0.6)

    def drafter() -> Drafter:
        runner = TableRunner(middle)
        runner.watch(LAYERS)
        return PreVerifiedDrafter(toy_drafter(CASES[0]), runner, SelfVerify(max_draft=3))

    assert law_of(drafter, CASES[0], ()).inner_extras >= {ExtraToken.CORRECTION, ExtraToken.BONUS}


@pytest.mark.parametrize("engine", ["eager", "static"])
def test_greedy_text_under_svip_is_the_targets_own(engine: str) -> None:
    head = head_of()
    target = watched(head) if engine == "eager" else Slot(StaticPasses(random_model("llama"), 64))
    target.watch(head.layers)
    drafter = ModelDrafter(Slot(ChainPasses(head, 64)), Svip(threshold=0.75))
    tokens, rounds = play(target, drafter, PROMPT, LIMIT)
    assert tokens == alone("llama", PROMPT)
    assert {round_.drafted for round_ in rounds} > {1, 2}
