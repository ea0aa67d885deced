"""Trees of block heads: of products of marginals, and of what a sequential head says behind each beam."""

from collections.abc import Sequence

import pytest
import torch
from law_table import SAMPLINGS, enumerate_decode, error, expected_law

from specctl.decoding.composition import Stage, compose
from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.decoding.trees import TreeDrafter
from specctl.models.draft_heads.block import SequentialKind
from specctl.models.draft_heads.block_runner import BlockPasses
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.policies import StoppingPolicy
from specctl.policies.published import ConfidentPrefix, Constant, Svip
from specctl.policies.setting import TreeSize
from specctl.records import Round
from tests.support.onnx_heads import HEADS, sure_head, torch_runner
from tests.support.onnx_models import needs_onnx
from tests.support.toy_heads import random_block
from tests.support.toys import random_model, seeded

LAYERS = (0, 1, -1)
SHAPE = LayerShape(hidden_size=32, intermediate_size=24, heads=2, kv_heads=1, head_dim=8)
TOY = LayerShape(hidden_size=3, intermediate_size=6, heads=2, kv_heads=1, head_dim=4)
PROMPT = [5, 9, 2, 40, 33, 7, 12, 60]
KINDS: list[SequentialKind | None] = [None, "rnn", "selector"]


def runner_of(kind: SequentialKind | None, spread: float = 0.3) -> Slot:
    head = random_block(layers=LAYERS, block_size=5, vocabulary=64, markov=kind, shape=SHAPE, spread=spread)
    return Slot(BlockPasses(head, 64))


def play(drafter: Drafter | None, count: int) -> list[Round]:
    target = Slot(EagerPasses(random_model("llama"), 64))
    target.watch(LAYERS)
    with torch.inference_mode():
        if drafter is not None:
            prefill(target, drafter, PROMPT)
        return list(decode(target, drafter, PROMPT, count, Sampling()))


def text_of(rounds: Sequence[Round]) -> list[int]:
    return [token for round_ in rounds for token in round_.emitted]


def paths(tokens: Sequence[int], parents: Sequence[int]) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@pytest.mark.parametrize("count", [3, 24, 64])
def test_a_tree_has_the_best_products_of_marginals(count: int) -> None:
    """The set that a search with the best first would find, whatever `beams`; nothing follows the end of a text."""
    runner, depth, ends = runner_of(None, spread=0.9), 4, {6, 47}
    drafter = TreeDrafter(runner, Constant(depth), TreeSize(count, 2))
    drafter.begin(Sampling(), ends, None)
    draft = drafter.draft(PROMPT, 10)
    assert draft.parents is not None
    runner.rollback(0)
    rows = [runner.extend(tokens, keep=1).logits[0] for tokens in (PROMPT, *[[1]] * (depth - 1))]
    laws = [torch.as_tensor(row).double().log_softmax(-1).tolist() for row in rows]
    open_, expected = [(0.0, ())], list[tuple[int, ...]]()
    scored: list[tuple[float, tuple[int, ...]]] = []
    while len(expected) < count - 1:
        for score, path in open_:
            if len(path) < depth and not ends & set(path):
                scored += [(score + log, (*path, token)) for token, log in enumerate(laws[len(path)])]
        best = max(scored)
        scored.remove(best)
        expected.append(best[1])
        open_ = [best]
    assert paths(draft.tokens, draft.parents) == set(expected)
    assert count < 24 or max(map(len, expected)) > 1


@pytest.mark.parametrize("kind", ["vanilla", "rnn", "selector"])
def test_a_row_follows_the_tokens_of_its_own_path(kind: SequentialKind) -> None:
    runner = runner_of(kind)
    with torch.inference_mode():
        runner.extend(PROMPT, keep=1)
        first = runner.extend_tree([3, 8], [0, 0], before=1, hidden=True)
        second = runner.extend_tree([4, 5, 6], [2, 1, 2], before=3)
        for found, ways in ((first, ([3], [8])), (second, ([8, 4], [3, 5], [8, 6]))):
            for place, path in enumerate(ways):
                runner.rollback(0)
                runner.extend(PROMPT, keep=1)
                rows = [runner.extend([token], keep=1, hidden=True) for token in path]
                torch.testing.assert_close(found.logits[place], rows[-1].logits[0])
        for _ in range(3, runner.longest):
            runner.extend_tree([1], [0], before=1)
        with pytest.raises(ValueError, match="the block drafts"):
            runner.extend_tree([1], [0], before=1)


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", pytest.param("rnn", marks=pytest.mark.exhaustive)])
def test_graphs_give_the_rows_of_the_network(kind: str) -> None:
    head = HEADS[kind]()
    states = torch.randn(12, 32, generator=seeded(3))
    found = []
    for runner in (sure_head(head), torch_runner(head)):
        runner.observe_states(0, {layer: states[:7] + layer for layer in runner.layers})
        with torch.inference_mode():
            runner.extend(PROMPT, keep=1)
            levels = [([4, 8], [0, 0]), ([4, 2, 6], [1, 0 + 2, 1])]
            rows, before = [], 1
            for tokens, parents in levels:
                forward = runner.extend_tree(tokens, parents, before=before, hidden=True)
                before += len(tokens)
                assert forward.hidden is not None
                rows += [torch.as_tensor(forward.logits), forward.hidden]
        runner.keep_path([0])
        assert runner.length == 7
        found.append(rows)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representatives("None", "rnn")
def test_greedy_text_is_the_targets_own(kind: SequentialKind | None) -> None:
    expected = text_of(play(None, 24))
    rounds = play(TreeDrafter(runner_of(kind), Constant(4), TreeSize(24, 3)), 24)
    assert text_of(rounds) == expected
    assert max(sum(round_.tree) for round_ in rounds if round_.tree) > 8
    assert len(rounds) <= len(play(ModelDrafter(runner_of(kind), Constant(4)), 24))


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        (None, Constant(2)),
        ("vanilla", Constant(2)),
        ("rnn", ConfidentPrefix(threshold=0.5)),
        ("selector", Svip(c=1.0, threshold=0.9, keep_trigger=False)),
    ],
    ids=str,
)
@pytest.mark.representatives("None-Constant(draft_length=2)", "rnn-ConfidentPrefix(threshold=0.5, max_draft=40)")
def test_output_has_the_law_of_the_target(kind: SequentialKind | None, policy: StoppingPolicy) -> None:
    def drafter() -> Drafter:
        head = random_block(vocabulary=3, markov=kind, shape=TOY, seed=6)
        return TreeDrafter(Slot(BlockPasses(head, 3, capacity=16)), type(policy)(**vars_of(policy)), TreeSize(4, 2))

    found = enumerate_decode(drafter, SAMPLINGS["T=1"], 2, 3, layers=(0,))
    assert sum(found.law.values()) == pytest.approx(1)
    assert True in found.paths
    assert error(found, expected_law(SAMPLINGS["T=1"], 2)) < 3e-7


def vars_of(policy: StoppingPolicy) -> dict[str, object]:
    names = {Constant: ["draft_length"], ConfidentPrefix: ["threshold"]}
    return {name: getattr(policy, name) for name in names.get(type(policy), ["c", "threshold", "keep_trigger"])}


def test_a_policy_of_predictions_is_asked_about_the_best_beam() -> None:
    (first, *_) = play(TreeDrafter(runner_of("vanilla"), ConfidentPrefix(threshold=1e-6), TreeSize(12, 3)), 8)
    (chain, *_) = play(ModelDrafter(runner_of("vanilla"), ConfidentPrefix(threshold=1e-6)), 8)
    assert [step.next_accept_prob for step in first.steps][:1] == [step.next_accept_prob for step in chain.steps][:1]
    assert all(step.next_accept_prob is not None for step in first.steps)


def test_a_profile_may_ask_for_trees_of_a_block_head() -> None:
    drafter = compose([Stage(runner_of("rnn"), ConfidentPrefix())], tree=TreeSize(8, 2))
    assert isinstance(drafter, TreeDrafter)
