"""A pair whose graphs are stored is opened without its models, and writes what the loaded pair writes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.decoding.composition import build_drafter
from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import Session
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.files.tokenizer import BareTokenizer
from specctl.models.loading import assembly
from specctl.models.loading.assembly import load_pair
from specctl.models.loading.pair_members import StoredModel
from specctl.models.onnx import store
from specctl.models.onnx.store import (
    CHAINS,
    EAGER,
    FACTS_VERSION,
    ONNX,
    Store,
    Times,
    cache_folder,
    key_of,
    key_of_files,
)
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.models.running.threads import threads_of
from specctl.profile.schema import LOOKUP, PolicyTable, Profile
from tests.support.checkpoints import save_model
from tests.support.onnx_models import needs_onnx, small_config, small_pair
from tests.support.other_tokenizers import byte_level

pytestmark = needs_onnx


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Profile, Path]]:
    """A profile whose graphs were made by loading its pair, and the folder that they are in."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        profile = small_pair(folder)
        load_pair(profile, torch_weights=False)
        yield profile, cache_folder()


@pytest.fixture
def profile(made: tuple[Profile, Path]) -> Profile:
    return made[0]


class LoadsModelsError(Exception):
    """Models are loaded for a pair."""


def opened(profile: Profile, **settings: Any) -> Pair | None:
    """The pair of stored graphs; None where models would be loaded."""

    def load(*_: object) -> None:
        raise LoadsModelsError

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(assembly, "find_all", load)
        try:
            engines = replace(EngineSettings.of(profile), **settings)
            return load_pair(profile, with_predictors=False, engines=engines, models=False)
        except LoadsModelsError:
            return None


def written(pair: Pair, profile: Profile, **sampling: Any) -> list[tuple[str, tuple[int, ...]]]:
    assert profile.draft is not None
    session = Session(pair, build_drafter(pair, profile.draft.setting))
    table = profile.sampling.model_copy(update={"max_new_tokens": 20, **sampling})
    prompts = [PromptFormat(pair.tokenizer).prompt(text) for text in ("the", " a b", "é<eos>th")]
    return [(found.text, found.tokens) for each in prompts for found in [session.generate(each, table)]]


def test_it_is_the_loaded_pair(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_pair(profile, torch_weights=False)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    heard: list[str] = []
    told: list[str] = []
    pair = load_pair(
        profile, engines=EngineSettings.of(profile, notice=told.append), models=False, progress=heard.append
    )
    assert pair is not None
    assert heard == [profile.target.model, profile.draft and profile.draft.model]
    assert told == [
        "The draft model has 100% of the parameters of the target model; drafting pays off when the draft is many "
        "times smaller."
    ]
    assert isinstance(pair.tokenizer, BareTokenizer)
    for name in ("eos", "context", "vocabulary", "named_predictors", "above", "verifiers"):
        assert getattr(pair, name) == getattr(loaded, name), name
    for mine, theirs in zip((pair.target, *pair.drafts), (loaded.target, *loaded.drafts), strict=True):
        assert mine.engine == theirs.engine == "onnx"
        assert mine.context == theirs.context
        assert mine.no_trees == theirs.no_trees == CHAINS
    for sampling in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_p": 0.9, "stop": ("th",)}):
        assert written(pair, profile, **sampling) == written(loaded, profile, **sampling)


def test_a_draft_with_a_shorter_context_does_not_end_the_text(
    profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, find = opened(profile), StoredModel.find

    def short(checkpoint: Checkpoint, *more: Any) -> StoredModel | None:
        found = find(checkpoint, *more)
        assert found is not None
        return replace(found, facts=replace(found.facts, context=12)) if checkpoint.role == "draft" else found

    monkeypatch.setattr(StoredModel, "find", short)
    pair = opened(profile)
    assert whole is not None
    assert pair is not None
    assert (pair.context, pair.shared_context) == (whole.context, 12)
    assert written(pair, profile) == written(whole, profile)
    assert all(len(tokens) == 20 for _, tokens in written(pair, profile))


@pytest.mark.slow
def test_a_draft_of_few_tokens_is_opened_by_its_ids(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    assert profile.draft is not None

    def few(count: int | str) -> Profile:
        return profile.model_copy(update={"draft": profile.draft.model_copy(update={"tokens": count})})

    assert opened(few(40)) is None, "its graph is not the one of all tokens"
    loaded = load_pair(few(40), torch_weights=False)
    assert opened(few(41)) is None
    assert opened(few("auto")) is None, "which asks for the sizes of the model"
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    pair = opened(few(40))
    assert pair is not None
    assert opened(few(pair.vocabulary)) is not None, "all of them"
    mine, theirs = pair.drafts[0].draft_vocabulary, loaded.drafts[0].draft_vocabulary
    assert mine is not None
    assert theirs is not None
    assert mine.ids.tolist() == theirs.ids.tolist()
    assert len(mine) == 40
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        assert written(pair, few(40), **sampling) == written(loaded, few(40), **sampling)
    assert written(pair, profile) == written(loaded, profile)


def test_a_draft_with_another_tokenizer_is_opened_too(profile: Profile, tmp_path: Path) -> None:
    assert profile.draft is not None
    draft = save_model(tmp_path / "draft", small_config())
    byte_level(258).save_pretrained(draft)
    other = profile.model_copy(update={"draft": profile.draft.model_copy(update={"model": str(draft)})})
    loaded = load_pair(other, torch_weights=False)
    pair = opened(other)
    assert pair is not None
    assert pair.drafts[0].translates == loaded.drafts[0].translates is not None
    assert written(pair, other) == written(loaded, other)


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "auto"},
        {"engine": "eager"},
        {"check": True},
        {"target.dtype": "bfloat16"},
        {"target.quantize": "int8"},
        {"target.quantize": "nf4"},
        {"target.device": "cuda:0"},
        {"target.trust_remote_code": True},
        {"target.shards": 2},
        {"draft.model": "embedded:draft"},
    ],
)
@pytest.mark.representatives("change0", "change3", "change6", "change9")
def test_what_takes_the_models_loads_them(made: tuple[Profile, Path], change: dict[str, Any]) -> None:
    profile = made[0].model_dump()
    for key, value in change.items():
        *tables, name = key.split(".")
        table = profile
        for each in tables:
            table = table[each]
        table[name] = value
    changed = Profile.model_validate(profile)
    assert opened(made[0]) is not None
    assert opened(changed) is None


def copied(profile: Profile, folder: Path) -> tuple[Profile, Path]:
    """A profile whose target is a copy in a folder."""
    folder.mkdir()
    for file in Path(profile.target.model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return profile.model_copy(update={"target": profile.target.model_copy(update={"model": str(folder)})}), folder


def test_a_copy_of_its_files_is_the_same_model(profile: Profile, tmp_path: Path) -> None:
    copy, folder = copied(profile, tmp_path / "copy")
    assert opened(copy) is not None
    (folder / "README.md").write_text("# It")
    assert opened(copy) is not None


def one_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][3, 3] += 1e-3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def configuration(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.1}))


def generation(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))


def vocabulary(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def gone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("change", [one_weight, configuration, generation, vocabulary, adapter, gone])
@pytest.mark.representatives("one_weight", "adapter", "gone")
def test_other_files_are_another_model(profile: Profile, tmp_path: Path, change: Any) -> None:
    copy, folder = copied(profile, tmp_path / "copy")
    assert opened(copy) is not None
    change(folder)
    assert opened(copy) is None


@pytest.mark.parametrize("package", ["torch", "transformers", "onnxruntime", "specctl", "onnx", "tokenizers"])
@pytest.mark.representatives("specctl", "torch")
def test_another_version_is_another_model(profile: Profile, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    usual = store.version_of
    monkeypatch.setattr(store, "version_of", lambda name: "99" if name == package else usual(name))
    assert opened(profile) is None


@pytest.mark.parametrize("damage", ["cut", "changed", "version", "missing", "graph", "weights"])
def test_what_is_damaged_is_not_opened(
    made: tuple[Profile, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    profile, store = made
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for path in store.rglob("*"):
        copy = cache_folder() / path.relative_to(store)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            copy.write_bytes(path.read_bytes())
    assert opened(profile) is not None
    for facts in cache_folder().glob("*.model.json"):
        text = facts.read_text()
        weights = facts.with_name(facts.name.removesuffix(".model.json")) / "weights.bin"
        if damage == "cut":
            facts.write_text(text[:-40])
        elif damage == "changed":
            facts.write_text(text.replace('"rows": 258', '"rows": 257'))
        elif damage == "version":
            facts.write_text(text.replace(f'"schema_version": {FACTS_VERSION}', '"schema_version": 0'))
        elif damage == "missing":
            facts.unlink()
        elif damage == "graph":
            weights.with_name("model.onnx").unlink()
        else:
            weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert opened(profile) is None
    if damage in ("cut", "changed", "missing"):
        load_pair(profile, torch_weights=False)
        assert opened(profile) is not None, "the long way keeps it again"


def test_rules_of_the_target_take_the_model(profile: Profile, tmp_path: Path) -> None:
    ruled, folder = copied(profile, tmp_path / "copy")
    rules = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5], **rules}))
    loaded = load_pair(ruled, torch_weights=False)
    assert opened(ruled) is None
    plain = ruled.model_copy(update={"generation_config": False})
    pair = opened(plain)
    assert pair is not None
    assert pair.eos == loaded.eos == {0, 5}
    assert written(pair, plain) == written(load_pair(plain), plain)


def test_a_repetition_penalty_of_the_target_is_followed(profile: Profile, tmp_path: Path) -> None:
    ruled, folder = copied(profile, tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5], "repetition_penalty": 1.3}))
    loaded, pair = load_pair(ruled, torch_weights=False), opened(ruled)
    assert pair is not None
    for sampling in ({}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.2}):
        assert written(pair, ruled, **sampling) == written(loaded, ruled, **sampling)
    plain = ruled.model_copy(update={"generation_config": False})
    without = opened(plain)
    assert without is not None
    assert written(without, plain) != written(pair, ruled)


@pytest.mark.slow
def test_trees_are_read_by_a_graph_that_was_made_for_them(profile: Profile) -> None:
    assert opened(profile, trees=True) is None
    settings = replace(EngineSettings.of(profile), trees=True)
    loaded = load_pair(profile, engines=settings, torch_weights=False)
    pair = opened(profile, trees=True)
    assert pair is not None
    assert pair.target.no_trees is loaded.target.no_trees is None
    assert pair.drafts[0].no_trees is loaded.drafts[0].no_trees is None


def test_verification_of_one_width_and_drafts_without_files(profile: Profile) -> None:
    assert profile.draft is not None
    policy = PolicyTable(name="constant")
    lookup = profile.draft.model_copy(update={"model": LOOKUP, "kind": "lookup", "head": None, "policy": policy})
    both = profile.draft.model_copy(update={"draft": lookup})
    for changed in (
        profile.model_copy(update={"deterministic": True}),
        profile.model_copy(update={"draft": lookup}),
        profile.model_copy(update={"draft": both}),
    ):
        pair, loaded = opened(changed), load_pair(changed, with_predictors=False, torch_weights=False)
        assert pair is not None
        runners = [(one.target, *one.drafts) for one in (pair, loaded)]
        assert [each.engine for each in runners[0]] == [each.engine for each in runners[1]]
        assert (pair.above, pair.named_predictors) == (loaded.above, loaded.named_predictors)
        assert written(pair, changed) == written(loaded, changed)


def test_threads_are_chosen_as_for_a_loaded_pair(profile: Profile) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            changed = profile.model_copy(update={"threads": threads})
            pair, loaded = opened(changed), load_pair(changed, torch_weights=False)
            assert pair is not None
            assert pair.threads is not None
            assert loaded.threads is not None
            assert (pair.threads.number, pair.threads.reason) == (loaded.threads.number, loaded.threads.reason)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_graphs_have_the_number_of_threads_that_was_chosen(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch, which may not even be there, need not have heard of it."""
    monkeypatch.setattr("specctl.models.onnx.passes.ONE_THREAD", 0)
    monkeypatch.setattr("specctl.models.running.threads.tell_torch", lambda _: None)
    monkeypatch.setattr("specctl.models.loading.assembly.tell_torch", lambda _: None)
    number = torch.get_num_threads() + 1
    pair = opened(profile.model_copy(update={"threads": number}))
    assert pair is not None
    assert threads_of(pair.target) == threads_of(pair.drafts[0]) == number


def test_auto_takes_graphs_that_are_known_to_be_faster(
    made: tuple[Profile, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, folder = made
    auto = profile.model_copy(update={"engine": "auto", "threads": torch.get_num_threads()})
    files = [Times(Store(folder).times(path.name.partition(".")[0])) for path in folder.glob("*.model.json")]

    def measured(eager: float, onnx: float) -> None:
        for times in files:
            times.note({EAGER: eager, ONNX: onnx}, torch.get_num_threads())

    assert opened(auto) is None, "nothing is known"
    measured(2.0, 1.0)
    pair, loaded = opened(auto), load_pair(auto, torch_weights=False)
    assert pair is not None
    assert [each.target.engine for each in (pair, loaded)] == ["onnx", "onnx"]
    assert written(pair, auto) == written(loaded, auto)
    assert opened(auto, compile=True) is None
    assert opened(auto.model_copy(update={"target": auto.target.model_copy(update={"quantize": "int8"})})) is None
    with monkeypatch.context() as other:
        other.setattr(Checkpoint, "settings", lambda _: {"dtype": "bfloat16"})
        other.setattr("specctl.models.loading.pair_members.model_hash", None)
        of_files = auto.model_copy(update={"target": auto.target.model_copy(update={"dtype": "auto"})})
        assert opened(of_files) is None, "whose weights are not read to find that it has no graph"
    measured(1.0, 2.0)
    assert opened(auto) is None
    assert opened(profile) is not None, "which onnx was asked for"


def test_there_must_be_room_for_it(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    none = psutil.virtual_memory()._replace(available=1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: none)
    assert opened(profile) is None


def test_an_accelerator_is_for_the_models(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    assert opened(profile) is None
    tables = {
        "target": profile.target.model_copy(update={"device": "cpu"}),
        "draft": profile.draft.model_copy(update={"device": "cpu"}) if profile.draft is not None else None,
    }
    assert opened(profile.model_copy(update=tables)) is not None


def test_a_model_with_its_own_code_is_known_by_its_weights() -> None:
    """Its code may lie anywhere."""
    from transformers import LlamaForCausalLM

    class Own(LlamaForCausalLM):
        pass

    config = LlamaForCausalLM.config_class(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    plain, own = LlamaForCausalLM(config), Own(config)
    assert key_of(plain, None, files="abc") == key_of_files("abc", "cpu", "float32", None) != key_of(plain, None)
    assert key_of(own, None, files="abc") == key_of(own, None)
