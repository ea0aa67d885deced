"""Trees that a draft head grows: a token is read with the row that the head itself wrote after the token's parent."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.trees import TreeDrafter
from specctl.models.draft_heads.chain_runner import ChainPasses, GraphChainPasses
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.passes.compilation import Compiler, missing_compiler
from specctl.models.passes.tree_sight import path_to
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.policies.published import Constant
from specctl.policies.setting import TreeSize
from specctl.records import Round
from tests.support.eagle_references import reference
from tests.support.toy_heads import random_eagle3, random_glide
from tests.support.toys import Replays, random_model, seeded

LAYERS = (0, 1, -1)
SHAPE = LayerShape(hidden_size=16, intermediate_size=24, heads=2, kv_heads=1, head_dim=8)
TEXT = [5, 9, 2, 40, 33, 7, 12, 60]
LEVELS = [([3, 8, 20], [0, 0, 0]), ([1, 8, 50], [1, 1, 3]), ([2, 4, 2, 9], [6, 4, 4, 5]), ([7], [9])]
HEADS: dict[str, Callable[..., Slot]] = {
    "uncompiled": lambda head: Slot(ChainPasses(head, 64)),
    "graph": lambda head: Slot(GraphChainPasses(head, 64, Replays())),
}


def head(tokens: list[int] | None = None) -> torch.nn.Module:
    return random_eagle3(layers=LAYERS, states=32, vocabulary=64, tokens=tokens, shape=SHAPE, spread=0.5)


def glide() -> torch.nn.Module:
    return random_glide(random_model("llama"), vocabulary=64, depth=1, shape=SHAPE, spread=0.5)


KINDS: dict[str, Callable[[], torch.nn.Module]] = {"EAGLE-3": head, "GliDe": glide}


def observed(runner: Slot, count: int) -> Slot:
    """After the states of so many places of the text, the same for every runner."""
    states = torch.randn(len(TEXT), 32, generator=seeded(2))
    if count:
        runner.observe_states(0, {layer: states[:count] + layer for layer in LAYERS})
    return runner


@pytest.mark.parametrize("known", [len(TEXT) - 1, len(TEXT) - 2, 0])
@pytest.mark.parametrize("length", [1, len(TEXT)])
@pytest.mark.parametrize("engine", HEADS)
@pytest.mark.representatives("1-7", "8-6")
def test_every_token_is_read_as_in_a_chain(engine: str, length: int, known: int) -> None:
    """Also after a single token, to which no other attends, and where states of the text are missing."""
    text, seen = TEXT[:length], min(known, length - 1)
    runner, again = (observed(HEADS[engine](head()), seen) for _ in range(2))
    assert runner.no_trees is None
    with torch.inference_mode():
        runner.extend(text, keep=1)
        tokens, parents = text[-1:], list[int]()
        for some, above in LEVELS:
            found = runner.extend_tree(some, above, before=len(tokens), hidden=True)
            tokens, parents = [*tokens, *some], [*parents, *above]
            assert found.hidden is not None
            for place in range(len(some)):
                path = [tokens[number] for number in path_to(parents, len(tokens) - len(some) + place)]
                chain = again.extend([*text[:-1], *path], keep=1, hidden=True)
                torch.testing.assert_close(found.logits[place], chain.logits[0], atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(found.hidden[place], chain.hidden[0], atol=1e-5, rtol=1e-4)  # type: ignore[index]
                again.rollback(0)
                observed(again, seen)
        runner.keep_path([0, 1])
        assert runner.length == seen + 1, "what came from the head's own rows is forgotten"


@pytest.mark.parametrize("name", ["eagle1-safeailab", "eagle1-qwen2", "eagle3-safeailab", "eagle3-speculators-normed"])
def test_published_heads_read_trees(name: str) -> None:
    data = reference(name)
    text = data.ids[:9].tolist()
    runner, again = (Slot(ChainPasses(data.build(), 96)) for _ in range(2))
    with torch.inference_mode():
        runner.observe_states(0, {layer: rows[:8] for layer, rows in data.states.items()})
        runner.extend(text, keep=1)
        first, second = (runner.extend_tree(*LEVELS[number], before=1 + 3 * number).logits for number in range(2))
        for found, path in ((first[1], [8]), (second[0], [3, 1]), (second[2], [20, 50])):
            again.rollback(0)
            again.observe_states(0, {layer: rows[:8] for layer, rows in data.states.items()})
            chain = again.extend([*text, *path], keep=1).logits[0]
            torch.testing.assert_close(found, chain, atol=1e-4, rtol=1e-4)


def test_a_tree_is_read_level_by_level() -> None:
    runner = Slot(ChainPasses(head(), 64))
    runner.extend(TEXT, keep=1)
    with pytest.raises(AssertionError, match="an earlier pass"):
        runner.extend_tree([1, 2], [0, 1], before=1)


def played(drafter: ModelDrafter, prompt: Sequence[int], limit: int = 40) -> tuple[list[int], list[Round]]:
    target = Slot(EagerPasses(random_model("llama"), 64))
    assert isinstance(drafter.runner.passes, ChainPasses)
    target.watch(drafter.runner.layers)
    with torch.inference_mode():
        prefill(target, drafter, prompt)
        rounds = list(decode(target, drafter, prompt, limit, Sampling()))
    return [token for round_ in rounds for token in round_.emitted], rounds


@pytest.mark.parametrize("prompt", [TEXT[:1], TEXT])
@pytest.mark.parametrize("engine", HEADS)
@pytest.mark.representatives("uncompiled-prompt1")
def test_the_text_is_the_targets_own(engine: str, prompt: list[int]) -> None:
    drafter = TreeDrafter(HEADS[engine](head([*range(1, 64, 2)])), Constant(4), TreeSize(30, 5))
    target = Slot(EagerPasses(random_model("llama"), 64))
    with torch.inference_mode():
        rounds = list(decode(target, None, prompt, 40, Sampling()))
    tokens, trees = played(drafter, prompt)
    assert tokens == [token for round_ in rounds for token in round_.emitted]
    assert any(round_.accepted for round_ in trees)
    assert max(round_.nodes for round_ in trees) == 29


@pytest.mark.parametrize("engine", HEADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives("EAGLE-3-graph")
def test_a_tree_of_one_beam_is_the_chain(kind: str, engine: str) -> None:
    chain = played(ModelDrafter(HEADS[engine](KINDS[kind]()), Constant(4)), TEXT)
    tree = played(TreeDrafter(HEADS[engine](KINDS[kind]()), Constant(4), TreeSize(30, 1)), TEXT)
    assert tree[0] == chain[0]
    bare = [
        [replace(one, tree=(), path=(), draft_seconds=0, verify_seconds=0, total_seconds=0) for one in rounds]
        for _, rounds in (chain, tree)
    ]
    assert bare[0] == bare[1]


@pytest.mark.parametrize("engine", HEADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives("GliDe-uncompiled", slow=("EAGLE-3-graph",))
def test_what_a_head_drafts_does_not_depend_on_earlier_rounds(kind: str, engine: str) -> None:
    def new() -> TreeDrafter:
        return TreeDrafter(HEADS[engine](KINDS[kind]()), Constant(3), TreeSize(20, 4))

    _, rounds = played(new(), TEXT)
    text = list(TEXT)
    target = Slot(EagerPasses(random_model("llama"), 64))
    target.watch([*LAYERS, *range(2)])
    for round_ in rounds:
        anew = new()
        target.rollback(0)
        with torch.inference_mode():
            prefill(target, anew, text)
            assert tuple(anew.draft(text, 40 - (len(text) - len(TEXT)) - 1).steps) == round_.steps
        text += round_.emitted


@pytest.mark.exhaustive
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="there is no C++ compiler")
def test_compiled_trees_are_the_same() -> None:
    heard: list[str] = []
    compiled = Slot(ChainPasses(head(), 64, compiler=Compiler("the head", heard.append)))
    tokens, rounds = played(TreeDrafter(compiled, Constant(3), TreeSize(20, 4)), TEXT)
    again, plain = played(TreeDrafter(Slot(ChainPasses(head(), 64)), Constant(3), TreeSize(20, 4)), TEXT)
    assert tokens == again
    assert [one.path for one in rounds] == [one.path for one in plain]
    assert heard == []
