"""The rounds replayed for transformers are those that its assisted generation runs with the exported file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GenerationConfig
from transformers.generation import candidate_generator

from specctl.decoding.sampling import Sampling
from specctl.export.engines import ENGINES, UNCAPPED, Pairing
from specctl.export.search import score_in
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.peers import assisted
from specctl.peers.assisted import AssistedPeer
from specctl.policies import Setting
from specctl.profile.schema import SamplingTable
from specctl.replay.trace_files import TraceHeader, TraceSet
from tests.support.checkpoints import tiny_tokenizer
from tests.support.made_traces import flat_costs
from tests.support.toys import noisy_copy, random_model
from tests.support.traced import trace_of

PROMPTS = {"a": [5, 9, 2, 7], "b": [3, 1, 4, 1, 5]}
LIMIT = 40
ENGINE = ENGINES["transformers"]
RULE = {"name": "max-confidence", "adapt": False, "keep_trigger": True}


@pytest.fixture(scope="module")
def pair() -> Pair:
    models = random_model("llama"), noisy_copy("llama")
    runners = [Slot(EagerPasses(model, 64)) for model in models]
    return Pair(runners[0], (runners[1],), tiny_tokenizer(), frozenset({17}), 1 << 10, models, ({},))


@pytest.fixture(scope="module")
def recorded(pair: Pair) -> TraceSet:
    settings = SamplingTable(max_new_tokens=LIMIT)
    alone = {name: AssistedPeer(pair, "hf-constant").generate(ids, settings).tokens for name, ids in PROMPTS.items()}
    traces = [
        replace(trace_of(pair, ids, alone[name], LIMIT, 39, Sampling()), prompt=name) for name, ids in PROMPTS.items()
    ]
    return TraceSet(TraceHeader(39, sorted(pair.eos), ["top_prob"], {}), traces)


@pytest.mark.parametrize(
    "table",
    [
        {"name": "constant", "draft_length": 1},
        {"name": "constant", "draft_length": 6},
        {"name": "heuristic", "draft_length": 2, "max_draft": UNCAPPED},
        {**RULE, "threshold": 0.15, "max_draft": 9},
        {**RULE, "threshold": 0.06, "max_draft": 20},
    ],
    ids=["K 1", "K 6", "growing", "threshold", "low threshold"],
)
@pytest.mark.representatives("growing")
def test_passes_are_those_of_assisted_generation(
    pair: Pair, recorded: TraceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: dict[str, object]
) -> None:
    setting = Setting.of(table)
    (tmp_path / "generation_config.json").write_text(ENGINE.write(Pairing("t", "d"), setting).text, encoding="utf-8")
    read = GenerationConfig.from_pretrained(tmp_path)
    keys = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    assert {key: getattr(read, key) for key in keys} == keys
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: False)
    monkeypatch.setitem(assisted.ASSISTED, "exported", keys)
    monkeypatch.setattr(assisted, "MOVING", frozenset())
    peer = AssistedPeer(pair, "exported")
    for ids in PROMPTS.values():
        peer.generate(ids, SamplingTable(max_new_tokens=LIMIT))
    found = score_in(ENGINE, setting, recorded, list(PROMPTS), flat_costs(1, 10))
    assert found is not None
    assert list(zip(found.passes, found.drafted, strict=True)) == peer.passes
    assert found.ms.tolist() == [10 * target + draft for target, draft in peer.passes]
    assert 0 < found.accepted.sum() < found.drafted.sum()
