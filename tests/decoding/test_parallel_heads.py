"""P-EAGLE: an EAGLE head that reads masks for the tokens to come, and so drafts a block in one pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from law_table import SAMPLINGS, enumerate_decode, error, expected_law

from specctl.decoding.draft import Drafter
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.sampling import Sampling
from specctl.decoding.trees import TreeDrafter
from specctl.errors import ModelError
from specctl.models.draft_heads.chain_runner import ChainPasses
from specctl.models.draft_heads.eagle3 import Eagle3Config, Eagle3Head
from specctl.models.draft_heads.file_layout import read_head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.draft_heads.kinds import recognise
from specctl.models.loading.draft_heads import build_head_runner
from specctl.models.onnx.export import CannotExport
from specctl.models.onnx_heads.engine import graphs_of
from specctl.models.running.eager import EagerPasses
from specctl.models.running.engines import EngineSettings
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import ParallelPasses
from specctl.policies import NONE, Setting
from specctl.policies.published import Constant
from specctl.policies.setting import TreeSize
from specctl.replay.play import rounds
from tests.support.eagle_references import reference
from tests.support.toy_heads import SHAPE
from tests.support.toys import random_model, seeded
from tests.support.traced import live, pair_of, shape, trace_of

NAME = "peagle-speculators"


def published() -> tuple[Eagle3Head, Any]:
    data = reference(NAME)
    head = read_head("peagle", data.config, data.weights, data.verifier(), "The draft head 'x'")
    assert isinstance(head, Eagle3Head)
    return head, data


def random_parallel(vocabulary: int, layers: tuple[int, ...], states: int, sizes: LayerShape = SHAPE) -> Slot:
    config = Eagle3Config(sizes, layers, vocabulary, vocabulary, states, mask_token=vocabulary - 1, block=3)
    head = Eagle3Head(config)
    with torch.no_grad():
        for number, weight in enumerate(head.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=seeded(number)))
    return Slot(ParallelPasses(Slot(ChainPasses(head.eval(), vocabulary)), vocabulary - 1, 3))


def test_rows_are_speculators_own_and_of_one_pass() -> None:
    head, data = published()
    assert (head.kind, head.longest) == ("peagle", 4)
    runner = build_head_runner(head, 96, "it", EngineSettings("static"))
    assert isinstance(runner.passes, ParallelPasses)
    text, read = [1, *data.ids.tolist()], 0
    for place in (2, 5):
        runner.observe_states(read, {layer: rows[read : place + 1] for layer, rows in data.states.items()})
        read = place + 1
        runner.rollback(read)
        found = [runner.extend(text[runner.length : place + 2], keep=1)]
        found += [runner.extend([token], keep=1) for token in (8, 9, 3)]
        rows = torch.cat([one.logits for one in found])[:, head.tokens]
        torch.testing.assert_close(rows, data.expected[f"block.{place}"], atol=1e-4, rtol=1e-4)


def test_files_are_told_from_eagle3s() -> None:
    _, data = published()
    assert recognise(data.config, ()) == recognise({}, data.weights) == "peagle"
    eagle3 = reference("eagle3-speculators")
    assert recognise(eagle3.config, eagle3.weights) == "eagle3"
    for changes, message in (
        ({"mask_token_id": None}, "has no mask_token_id"),
        ({"mask_token_id": 96}, "mask_token_id .* is 96, not an id below 96"),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}}, "speculative_tokens"),
    ):
        with pytest.raises(ModelError, match=message):
            read_head("peagle", data.config | changes, data.weights, data.verifier())
    again = read_head("peagle", data.config | {"speculators_config": {}}, dict(data.weights), data.verifier())
    assert again.longest == 8
    with pytest.raises(CannotExport, match="masks"):
        graphs_of(again)


@pytest.mark.parametrize("tree", [None, TreeSize(4, 2)], ids=["chain", "tree"])
def test_output_has_the_law_of_the_target(tree: TreeSize | None) -> None:
    def drafter() -> Drafter:
        runner = random_parallel(3, (0,), 3, replace(SHAPE, hidden_size=4))
        return ModelDrafter(runner, Constant(2)) if tree is None else TreeDrafter(runner, Constant(2), tree)

    found = enumerate_decode(drafter, SAMPLINGS["T=1"], 2, 3, layers=(0,))
    assert error(found, expected_law(SAMPLINGS["T=1"], 2)) < 3e-7


def test_replayed_rounds_are_those_of_a_live_run() -> None:
    prompt, layers, greedy = [5, 9, 2, 40, 33], (0, 1, -1), Sampling()
    target = Slot(EagerPasses(random_model("llama"), 64))
    target.watch(layers)
    pair = pair_of(target, random_parallel(64, layers, 32))
    tokens = [token for played in live(pair, NONE, prompt, 20, greedy) for token in played.emitted]
    trace = trace_of(pair, prompt, tokens, 20, 12, greedy)
    setting = Setting("svip", {"threshold": 0.8})
    played = [shape(one) for one in live(pair, setting, prompt, 20, greedy)]
    assert [shape(one) for one in rounds(setting.build(), trace, frozenset())] == played
    assert [token for one in live(pair, setting, prompt, 20, greedy) for token in one.emitted] == tokens
