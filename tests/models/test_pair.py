from dataclasses import replace

import pytest
import torch

from specctl.errors import ModelError
from specctl.models.loading.assembly import load_pair
from specctl.profile.schema import DraftTable, Profile
from tests.support.checkpoints import llama_config, save_model


def profile(target, *drafts):
    table = {"model": str(target), "device": "cpu"}
    inner = None
    for draft in reversed(drafts):
        inner = {"model": str(draft), "device": "cpu"} | ({"draft": inner} if inner else {})
    return Profile.model_validate({"target": table} | ({"draft": inner} if inner else {}))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Rows of the embedding are padded differently, contexts and layers differ: all else agrees."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "target": save_model(folder / "target", llama_config(320, num_hidden_layers=3, max_position_embeddings=64)),
        "draft": save_model(folder / "draft", llama_config(258, max_position_embeddings=48)),
        "small": save_model(folder / "small", llama_config(272, num_hidden_layers=1, max_position_embeddings=96)),
    }


def test_a_pair_shares_the_real_vocabulary_and_holds_what_its_target_holds(checkpoints):
    heard = []
    pair = load_pair(profile(checkpoints["target"], checkpoints["draft"]), progress=heard.append)
    assert sorted(heard) == sorted(str(checkpoints[name]) for name in ("target", "draft"))
    assert [runner.extend([1, 2], keep=1).logits.shape for runner in (pair.target, *pair.drafts)] == [(1, 258)] * 2
    assert (pair.context, pair.shared_context, pair.eos) == (64, 48, frozenset({0}))


def test_a_draft_is_where_it_runs_and_where_its_weights_are(checkpoints):
    pair = load_pair(profile(checkpoints["target"], checkpoints["draft"]))
    pair.drafts[0].device = torch.device("cuda:1")
    assert pair.devices(0) == {"cuda:1", "cpu"}
    assert pair.devices(None) == {"cpu"}


def test_models_of_a_hierarchy_come_from_the_target_down(checkpoints):
    pair = load_pair(profile(*(checkpoints[name] for name in ("target", "draft", "small"))))
    assert [model.config.num_hidden_layers for model in pair.models] == [3, 2, 1]
    assert len(pair.drafts) == 2


def test_lookups_take_their_places_among_the_drafts(checkpoints):
    lookup = {"kind": "lookup", "model": "prompt:lookup", "policy": {"name": "constant"}}
    names = checkpoints["target"], checkpoints["draft"]
    single = profile(*names)
    below = single.draft.model_copy(update={"draft": DraftTable.model_validate(lookup)})
    pair = load_pair(single.model_copy(update={"draft": below}))
    assert [draft.engine for draft in pair.drafts] == ["eager", "lookup"]
    assert (pair.above, pair.predictors, len(pair.models), pair.context) == ((None, 0), (None, None), 2, 64)
    # In a benchmark: a lookup first, then the draft, then the lookup below a model of its own.
    tables = [below.draft, single.draft, single.draft, below.draft]
    pair = load_pair(single, drafts=tables, above=(None, None, 1, 2), heads=[[], [], [], []])
    assert [draft.engine for draft in pair.drafts] == ["lookup", "eager", "eager", "lookup"]
    assert pair.verifiers == (None, None, 1, 2)
    assert [len(pair.models), len(pair.predictors)] == [3, 4]
    assert load_pair(single.model_copy(update={"draft": below.draft})).context == 64


def test_the_target_alone_has_its_own_context(checkpoints):
    pair = load_pair(profile(checkpoints["target"], checkpoints["draft"]), drafts=[])
    assert (pair.drafts, len(pair.models), pair.context) == ((), 1, 64)


def test_a_draft_with_another_tokenizer_drafts_what_both_have_unless_one_is_asked_for(checkpoints, tmp_path):
    other = save_model(tmp_path / "other", llama_config(258), merges=[("o", "n")])
    found = profile(checkpoints["target"], other)
    assert load_pair(found).drafts[0].translates
    draft = found.draft.model_copy(update={"vocabulary": "shared"})
    with pytest.raises(ModelError, match="tokenizer"):
        load_pair(found.model_copy(update={"draft": draft}))


def test_below_the_target_each_draft_keeps_its_predictors(checkpoints):
    pair = load_pair(profile(checkpoints["target"], checkpoints["draft"], checkpoints["small"]))
    lower = replace(pair, named_predictors=({"of the draft": None}, {"of the small one": None})).lower
    assert (lower.target, *lower.drafts) == pair.drafts
    assert lower.named_predictors == ({"of the small one": None},)
