"""A tree read in one pass says of each token what its path says as a chain, and what is kept of it is that path."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, GPT2Config, Phi3Config, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from specctl.errors import ModelError
from specctl.models.passes.compilation import Compiler, missing_compiler
from specctl.models.passes.tree_sight import WIDEST, TreeSight, path_to
from specctl.models.running.config_rules import TokenRules
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import GraphPasses
from specctl.models.running.ruled import RuledPasses
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.models.running.transforms import CheckedPasses, FixedWidthPasses
from tests.support.toys import FAMILIES, Replays, random_model, seeded

pytestmark = pytest.mark.usefixtures("inference_mode")

VOCABULARY = 60  # the models have four more, as padding
TOKENS: list[int] = torch.randint(0, VOCABULARY, (200,), generator=seeded(9)).tolist()
OTHERS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3),
    "phi3": Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        pad_token_id=0,
    ),
}
READ = ("llama", "qwen3", "gpt-neox", *OTHERS)
ENGINES: dict[str, Callable[[PreTrainedModel], Slot]] = {
    "eager": lambda model: Slot(EagerPasses(model, VOCABULARY)),
    "static": lambda model: Slot(StaticPasses(model, VOCABULARY, capacity=8)),
    "graph": lambda model: Slot(GraphPasses(model, VOCABULARY, Replays())),
}
ONE_LAYER = "llama of one layer"
LAYERS = (0, 1, -1)
# The root, a chain below it, and tokens beside and below the chain's.
PARENTS = (0, 1, 2, 0, 0, 1, 5, 6, 6)


@cache
def model_of(family: str) -> PreTrainedModel:
    if family in FAMILIES:
        return random_model(family)
    if family == ONE_LAYER:
        return random_model("llama", layers=1)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(OTHERS[family])]
        model: PreTrainedModel = kind(OTHERS[family]).float().eval()
    return model


def chain(family: str, tokens: Sequence[int]) -> torch.Tensor:
    """Logits ``(T, V)`` of a text read without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model_of(family)(torch.tensor([[*tokens]]), use_cache=False).logits
    return logits[0, :, :VOCABULARY]


def close(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents, and a path from the root."""
    count = draw(st.integers(1, 14))
    parents = [draw(st.integers(0, token)) for token in range(count)]
    return parents, path_to(parents, draw(st.integers(0, count)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", READ)
@given(prompt=st.integers(1, 40), rounds=st.lists(trees(), min_size=1, max_size=3), seed=st.integers(0, 99))
@settings(deadline=None, derandomize=True, max_examples=5)
@pytest.mark.representatives("llama", "gpt2-eager")
def test_every_token_is_read_as_in_a_chain_and_a_path_is_kept(
    engine: str, family: str, prompt: int, rounds: list[tuple[list[int], list[int]]], seed: int
) -> None:
    draws = seeded(seed)
    runner, text = ENGINES[engine](model_of(family)), TOKENS[:prompt]
    runner.extend(text, keep=0)
    for parents, path in rounds:
        tokens = torch.randint(0, VOCABULARY, (len(parents) + 1,), generator=draws).tolist()
        logits = runner.extend_tree(tokens, parents).logits
        for place in range(len(tokens)):
            own = [tokens[ancestor] for ancestor in path_to(parents, place)]
            close(logits[place], chain(family, [*text, *own])[-1])
        runner.keep_path(path)
        text = text + [tokens[place] for place in path]
        assert runner.length == len(text)
        # A chain over what is kept, as the next round reads it.
        close(runner.extend([5, 9], keep=2).logits, chain(family, [*text, 5, 9])[-2:])
        runner.rollback(len(text))


@pytest.mark.parametrize("rooted", [True, False], ids=["root in the tree", "root in the chain"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", READ)
@given(prompt=st.integers(2, 40), pieces=st.lists(trees(), min_size=1, max_size=3), seed=st.integers(0, 99))
@settings(deadline=None, derandomize=True, max_examples=3)
@pytest.mark.representatives(
    "llama-graph-root in the tree",
    "llama-static-root in the chain",
    "gpt2-static-root in the tree",
    "phi3-eager-root in the chain",
    slow=("gpt-neox-static-root in the chain", "llama-eager-root in the tree", "gpt-neox-graph-root in the tree"),
)
def test_a_tree_that_grows_pass_by_pass_is_the_tree_of_one_pass(
    engine: str, family: str, rooted: bool, prompt: int, pieces: list[tuple[list[int], list[int]]], seed: int
) -> None:
    draws = seeded(seed)
    runner, text = ENGINES[engine](model_of(family)), TOKENS[:prompt]
    runner.extend(text[:-1] if rooted else text, keep=0)
    tokens, parents = text[-1:], []
    for number, (some, _) in enumerate(pieces):
        before = 0 if rooted and not number else len(tokens)
        # What was drawn is a tree by itself; here its tokens hang on any that were read before.
        more = [min(parent * 3, len(tokens) + place - 1) for place, parent in enumerate(some)]
        fresh = torch.randint(0, VOCABULARY, (len(more),), generator=draws).tolist()
        tokens, parents = [*tokens, *fresh], [*parents, *more]
        found = runner.extend_tree(tokens[before:], more, before=before, hidden=True)
        assert found.hidden is not None
        for place in range(before, len(tokens)):
            own = [tokens[ancestor] for ancestor in path_to(parents, place)]
            close(found.logits[place - before], chain(family, [*text[:-1], *own])[-1])
        close(model_of(family).get_output_embeddings()(found.hidden)[:, :VOCABULARY], found.logits)  # type: ignore[no-untyped-call]
    path = path_to(parents, len(parents))
    runner.keep_path(path)
    kept = [*text[:-1], *(tokens[place] for place in path)]
    assert runner.length == len(kept)
    close(runner.extend([5, 9], keep=2).logits, chain(family, [*kept, 5, 9])[-2:])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_states_of_watched_layers_are_those_of_each_path(engine: str, family: str) -> None:
    runner, again = (ENGINES[engine](random_model(family)) for _ in range(2))
    for one in (runner, again):
        one.watch(LAYERS)
        one.extend(TOKENS[:20], keep=0)
    tokens = TOKENS[30 : 31 + len(PARENTS)]
    states = runner.extend_tree(tokens, PARENTS).states
    assert states is not None
    for place in range(len(tokens)):
        path = path_to(PARENTS, place)
        expected = again.extend([tokens[ancestor] for ancestor in path], keep=1).states
        assert expected is not None
        for layer in LAYERS:
            close(states[layer][path], expected[layer])
        again.rollback(20)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_prefix_stays_where_no_path_is_kept(engine: str) -> None:
    runner = ENGINES[engine](random_model("llama"))
    runner.extend(TOKENS[:20], keep=0)
    runner.extend_tree(TOKENS[30 : 31 + len(PARENTS)], PARENTS)
    runner.rollback(20)
    close(runner.extend(TOKENS[20:23], keep=3).logits, chain("llama", TOKENS[:23])[-3:])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_widest_tree_as_the_first_pass_of_all(engine: str) -> None:
    """Before there are buffers or a prefix."""
    runner = ENGINES[engine](random_model("llama"))
    tokens, parents = TOKENS[:WIDEST], [0] * (WIDEST - 1)
    logits = runner.extend_tree(tokens, parents).logits
    for place in (0, 1, WIDEST - 1):
        close(logits[place], chain("llama", [tokens[other] for other in path_to(parents, place)])[-1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_wide_tree_at_the_end_of_the_context(engine: str, family: str) -> None:
    """It takes more slots than there are positions."""
    runner = ENGINES[engine](model_of(family))
    text = [TOKENS[place % len(TOKENS)] for place in range(runner.context - 2)]
    runner.extend(text, keep=0)
    logits = runner.extend_tree(TOKENS[:WIDEST], [0] * (WIDEST - 1)).logits
    close(logits[-1], chain(family, [*text, TOKENS[0], TOKENS[WIDEST - 1]])[-1])
    runner.keep_path([0, WIDEST - 1])
    assert runner.length == runner.context


def test_a_class_of_trees_is_captured_once() -> None:
    capture = Replays()
    runner = Slot(GraphPasses(random_model("llama"), VOCABULARY, capture))
    runner.extend(TOKENS[:9], keep=0)
    for parents in ([0, 1, 0, 0, 3, 3, 3, 3, 3], [0, 0, 0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]):
        tokens = TOKENS[20 : 21 + len(parents)]
        logits = runner.extend_tree(tokens, parents).logits
        for place in range(len(tokens)):
            path = [tokens[other] for other in path_to(parents, place)]
            close(logits[place], chain("llama", [*TOKENS[:9], *path])[-1])
        runner.rollback(9)
    assert capture.captured == 1


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="there is no C++ compiler")
def test_compiled_trees() -> None:
    heard: list[str] = []
    runner = Slot(StaticPasses(model_of(ONE_LAYER), VOCABULARY, compiler=Compiler("it", heard.append)))
    text = TOKENS[:9]
    runner.extend(text, keep=0)
    for count in (3, 9, 5):
        runner.extend_tree(TOKENS[20 : 21 + count], PARENTS[:count])
        runner.keep_path(path_to(PARENTS, count))
        text = text + [TOKENS[20 + place] for place in path_to(PARENTS, count)]
        close(runner.extend([5, 9], keep=2).logits, chain(ONE_LAYER, [*text, 5, 9])[-2:])
        runner.rollback(len(text))
    runner.extend([5], keep=1)
    runner.extend_tree([1, 2, 3], [0, 0, 0], before=1)
    close(runner.extend_tree([4, 6], [2, 1], before=4).logits[0], chain(ONE_LAYER, [*text, 5, 2, 4])[-1])
    assert heard == []


def test_token_rules_hold_along_each_path() -> None:
    config: Any = GenerationConfig(repetition_penalty=1.3, no_repeat_ngram_size=2)
    runner, again = (
        Slot(RuledPasses(one, TokenRules.of(config, frozenset(), VOCABULARY, one.device)))
        for one in (Slot(EagerPasses(random_model("llama"), VOCABULARY)) for _ in range(2))
    )
    assert runner.no_trees is None
    tokens = [7, 7, 3, 7, 9, 7, 3, 3, 9, 7]
    for one in (runner, again):
        one.extend([3, 7, 3, 9], keep=0)
    logits = runner.extend_tree(tokens, PARENTS).logits
    for place in range(len(tokens)):
        path = [tokens[ancestor] for ancestor in path_to(PARENTS, place)]
        close(logits[place], again.extend(path, keep=1).logits[0])
        again.rollback(4)
    kept = path_to(PARENTS, 8)
    runner.keep_path(kept)
    again.extend([tokens[place] for place in kept], keep=0)
    close(runner.extend([9, 7], keep=2).logits, again.extend([9, 7], keep=2).logits)


def test_token_rules_hold_along_each_path_of_a_growing_tree() -> None:
    config: Any = GenerationConfig(repetition_penalty=1.3, no_repeat_ngram_size=2)
    runner, again = (
        Slot(RuledPasses(one, TokenRules.of(config, frozenset(), VOCABULARY, one.device)))
        for one in (Slot(EagerPasses(random_model("llama"), VOCABULARY)) for _ in range(2))
    )
    text, tokens, parents = [3, 7, 3, 9], [9, 7, 3, 7, 3, 9], [0, 0, 1, 2, 3]
    runner.extend(text, keep=1)
    logits = [runner.extend_tree(tokens[1:3], parents[:2], before=1).logits]
    logits.append(runner.extend_tree(tokens[3:], parents[2:], before=3).logits)
    for place, row in enumerate(torch.cat(logits), start=1):
        path = [tokens[ancestor] for ancestor in path_to(parents, place)]
        close(row, again.extend([*text[:-1], *path], keep=1).logits[0])
        again.rollback(0)
    runner.keep_path([0, 1, 3])
    again.extend([*text, 7, 7], keep=0)
    close(runner.extend([9, 7], keep=2).logits, again.extend([9, 7], keep=2).logits)


class MovesNothing(EagerPasses):
    """Keeps the first tokens of the tree instead of those of the path."""

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> int:
        return self.rollback(slot, start + len(path))


@pytest.mark.parametrize("engine", [EagerPasses, MovesNothing])
@pytest.mark.parametrize("then", ["a tree", "a chain"])
def test_a_checked_target_is_compared_after_a_path_was_kept(engine: type[EagerPasses], then: str) -> None:
    model = random_model("llama")
    runner = Slot(CheckedPasses(Slot(engine(model, VOCABULARY)), lambda: Slot(EagerPasses(model, VOCABULARY)), "it"))
    assert runner.no_trees is None
    runner.extend(TOKENS[:20], keep=0)
    runner.extend_tree(TOKENS[30 : 31 + len(PARENTS)], PARENTS)
    runner.keep_path(path_to(PARENTS, 8))

    def go_on() -> None:
        if then == "a tree":
            runner.extend_tree([1, 2, 3], [0, 0])
        else:
            runner.extend([1, 2, 3], keep=3)

    if engine is MovesNothing:
        with pytest.raises(ModelError, match="does not forget"):
            go_on()
    else:
        go_on()
        assert runner.passes.difference is not None
        assert runner.passes.difference < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_read_trees(family: str) -> None:
    why = Slot(EagerPasses(random_model(family), VOCABULARY)).no_trees
    assert why is None if family in READ else "sliding window" in str(why)


def test_a_runner_that_reads_chains_says_so() -> None:
    runner = Slot(FixedWidthPasses(Slot(EagerPasses(random_model("llama"), VOCABULARY))))
    assert runner.no_trees == "deterministic passes read chains"


def test_who_sees_whom() -> None:
    assert TreeSight().grown([0, 1, 0], 0).astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 0, 0, 1],
    ]
    assert path_to([0, 1, 0], 2) == [0, 1, 2]
    assert path_to([0, 1, 0], 0) == [0]
