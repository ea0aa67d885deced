"""Pairs with GGUF files that llama.cpp runs, through a pretended library."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.errors import ModelError, UsageError
from specctl.models.files.checkpoint import locate
from specctl.models.loading.assembly import load_pair
from specctl.models.running.engines import EngineSettings
from specctl.models.running.pair import Pair
from specctl.models.running.transforms import CheckedPasses
from specctl.observing.results import gather
from specctl.peers.assisted import AssistedPeer, pairing_obstacle
from specctl.profile import Profile, resolve
from specctl.profile.schema import ModelTable
from specctl.prompts.suites import Suite
from specctl.text_engine.row_count import most_rows
from tests.support.invoked import invoke
from tests.support.pretended_llama import PretendedLlama, needs_llama
from tests.support.tiny_gguf import STATEFUL, damaged, parts, write


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PretendedLlama:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    return PretendedLlama().install(monkeypatch)


def profile_of(target: object, draft: object = None, *settings: str) -> Profile:
    models = [f"target.model={target}", *([] if draft is None else [f"draft.model={draft}"])]
    found = resolve("embedded", overrides=[*models, "target.device=cpu", "threads=1", *settings]).profile
    return found if draft is not None else found.model_copy(update={"draft": None})


def opened(profile: Profile, notices: list[str] | None = None, **how: Any) -> Pair:
    said: list[str] = [] if notices is None else notices
    return load_pair(profile, engines=EngineSettings.of(profile, notice=said.append), **how)


def text(pair: Pair, profile: Profile, prompt: str = "the cat", tokens: int = 24) -> list[int]:
    drafter = None if profile.draft is None else build_drafter(pair, profile.draft.setting)
    sampling = profile.sampling.model_copy(update={"max_new_tokens": tokens, "temperature": 0.0})
    return Session(pair, drafter).generate(pair.tokenizer.encode(prompt), sampling).tokens


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("models", [False, True])
def test_two_files_need_no_other_model(tmp_path: Path, models: bool) -> None:
    target, draft = write(tmp_path / "t.gguf"), write(tmp_path / "d.gguf", noise=0.1)
    alone, both = profile_of(target), profile_of(target, draft, "draft.policy.name=constant")

    pair = opened(both, models=models)

    assert pair.models == ()
    assert [runner.engine for runner in (pair.target, *pair.drafts)] == ["llama.cpp"] * 2
    assert pair.vocabulary == 320
    assert {0, 2} <= pair.eos
    assert (pair.devices(None), pair.devices(0), pair.thread_count) == ({"cpu"}, {"cpu"}, 1)
    assert pair.is_eager
    assert pair.eagerly().target is pair.target
    assert most_rows(pair, 100) > 1
    assert text(pair, both) == text(opened(alone), alone)
    assert not (tmp_path / "cache" / "specctl" / "gguf").exists(), "transformers' files were made"
    with pytest.raises(ModelError, match="train-head needs a model that torch runs"):
        pair.torch_model(0, "train-head")


@pytest.mark.usefixtures("llama")
def test_files_of_unknown_architectures_run_too(tmp_path: Path) -> None:
    target = write(tmp_path / "t.gguf", "falcon-h1")
    alone = profile_of(target)

    assert len(text(opened(alone, models=False), alone)) > 1


DRAFTS = {
    "copies": ("prompt:lookup", "draft.policy.name=constant"),
    "of torch": ("embedded:draft", "draft.device=cpu"),
    "in a chain": ("prompt:lookup+{draft}", "draft.policy.name=constant"),
    "with a faster one": (
        "{draft}",
        "draft.policy.name=constant",
        "draft.draft.model=embedded:draft",
        "draft.draft.device=cpu",
    ),
}


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("name", DRAFTS)
def test_any_draft_leaves_the_text_as_it_is(tmp_path: Path, name: str) -> None:
    target, draft = write(tmp_path / "t.gguf"), write(tmp_path / "d.gguf", noise=0.1)
    first, *settings = (each.format(draft=draft) for each in DRAFTS[name])
    alone, both = profile_of(target), profile_of(target, first, *settings)

    pair = opened(both)

    assert pair.target.engine == "llama.cpp"
    assert len(pair.models) == (2 if name == "of torch" else 3 if name == "with a faster one" else 0)
    assert all(model is None for model in pair.models[:-1])
    assert text(pair, both, tokens=12) == text(opened(alone), alone, tokens=12)


@pytest.mark.usefixtures("llama")
def test_a_file_drafts_for_a_model_of_torch(tmp_path: Path) -> None:
    draft = write(tmp_path / "d.gguf")
    both = profile_of("embedded:target", draft, "engine=eager", "draft.policy.name=constant")
    alone = profile_of("embedded:target", None, "engine=eager")
    with pytest.raises(ModelError, match='engine = "eager" cannot run it'):
        opened(both)
    notices: list[str] = []
    both, alone = (each.model_copy(update={"engine": "llama"}) for each in (both, alone))

    pair = opened(both, notices)

    assert [one.engine for one in (pair.target, *pair.drafts)] == ["eager", "llama.cpp"]
    assert pair.drafts[0].translates is not None
    assert [model is None for model in pair.models] == [False, True]
    assert sum("llama.cpp runs GGUF files only" in notice for notice in notices) == 1
    assert text(pair, both, tokens=12) == text(opened(alone), alone, tokens=12)


@pytest.mark.usefixtures("llama")
def test_checked_and_deterministic_targets(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "t.gguf"), write(tmp_path / "d.gguf", noise=0.5)
    alone = profile_of(target)
    both = profile_of(target, draft, "check=true", "deterministic=true", "draft.policy.name=constant")

    pair = opened(both, models=False)
    found = text(pair, both, tokens=40)

    (checked,) = (each for each in pair.target.transforms if isinstance(each, CheckedPasses))
    assert checked.difference == 0
    assert found == text(opened(alone), alone, tokens=40)


@pytest.mark.usefixtures("llama")
def test_several_texts_at_once(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "t.gguf"), write(tmp_path / "d.gguf", noise=0.1)
    records = tmp_path / "in.jsonl"
    records.write_text("".join(json.dumps({"prompt": "the" + " in" * count}) + "\n" for count in range(6)))
    flags = ["--target", target, "--draft", draft, "--policy", "constant", "--threads", 1, "-n", 12]
    outs = [
        invoke("generate", *flags, "-i", records, "--batch", batch, "--token-ids").stdout.splitlines()
        for batch in (1, 4)
    ]

    one, several = ({line["id"]: line["completion_ids"] for line in map(json.loads, out)} for out in outs)

    assert len(one) == 6
    assert several == one


REFUSED = {
    "target.dtype=bfloat16": "Remove dtype from [target]",
    "target.quantize=int8": "Remove quantize from [target]",
    "target.max_memory={cpu='1GiB'}": "Remove max_memory from [target]",
    "target.shards=2": "Remove shards from [target]",
    'target.device={"" = "cpu"}': "Set device in [target]",
    "engine=eager": 'Set engine = "llama"',
    "draft.tokens=100": "Remove tokens from [draft]",
    "draft.head=embedded:draft-head": "Remove head from [draft]",
    "target.revision=main": "Remove revision",
}


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("setting", REFUSED)
def test_settings_that_only_torch_has_are_refused(tmp_path: Path, setting: str) -> None:
    target, draft = write(tmp_path / "t.gguf"), write(tmp_path / "d.gguf")

    with pytest.raises(ModelError) as caught:
        opened(profile_of(target, draft, setting), models=False)

    assert REFUSED[setting] in caught.value.hint


@pytest.mark.usefixtures("llama")
def test_adapters_are_refused(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    (adapter / "adapter_model.safetensors").touch()

    with pytest.raises(ModelError, match="an adapter cannot be merged") as caught:
        opened(profile_of(write(tmp_path / "t.gguf"), None, f"target.adapter={adapter}"))

    assert caught.value.hint == "Remove adapter from [target]."


@pytest.mark.usefixtures("llama")
def test_a_context_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.models.llama.passes.LARGE", 0)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))

    with pytest.raises(ModelError, match="of memory, and 1000 B is free"):
        opened(profile_of(write(tmp_path / "t.gguf")))


@pytest.mark.usefixtures("llama")
def test_draft_heads_do_not_read_them(tmp_path: Path) -> None:
    target = write(tmp_path / "t.gguf")
    for draft in ("embedded:eagle3", "target:mtp"):
        with pytest.raises(ModelError) as caught:
            opened(profile_of(target, draft))
        assert "prompt:lookup" in caught.value.hint


@pytest.mark.usefixtures("llama")
def test_transformers_cannot_be_their_peer(tmp_path: Path) -> None:
    both = profile_of(write(tmp_path / "t.gguf"), write(tmp_path / "d.gguf"))
    assert both.draft is not None
    assert "GGUF" in (pairing_obstacle(both.target, both.draft) or "")
    with pytest.raises(UsageError, match="cannot run GGUF files"):
        AssistedPeer(opened(both), "hf-constant")


def test_reports_name_the_library_and_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    PretendedLlama(cards=("CUDA0",)).install(monkeypatch)
    profile = profile_of(write(tmp_path / "t.gguf"), None, "target.device=auto")

    facts = gather(opened(profile), profile, Suite("it", "0", ()))

    assert facts.engines == {"target": "llama.cpp on CUDA0"}
    assert facts.versions["llama-cpp-python"] == "0.3.36"


@pytest.mark.usefixtures("llama")
def test_settings_without_effect(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "t.gguf"), write(tmp_path / "d.gguf")
    notices: list[str] = []

    opened(profile_of(target, draft, "compile=true", "draft.tokens=auto", "target.trust_remote_code=true"), notices)

    assert [notice for notice in notices if "uncompiled" in notice] == [
        f"{each} runs uncompiled: llama.cpp has its own kernels" for each in (target, draft)
    ]


@pytest.mark.parametrize("how", ["short", "header", "empty", "text"])
def test_damaged_files_are_one_error(llama: PretendedLlama, tmp_path: Path, how: str) -> None:
    file = damaged(write(tmp_path / "m.gguf"), how)

    with pytest.raises(ModelError, match=str(file)):
        opened(profile_of(file))

    assert not llama.decodes()


@pytest.mark.usefixtures("llama")
def test_other_files_that_cannot_run(tmp_path: Path) -> None:
    first = write(tmp_path / "split.gguf", split=4)
    assert len(text(opened(profile_of(first)), profile_of(first))) > 1
    parts(first)[1].unlink()
    with pytest.raises(ModelError, match="-00002-of-"):
        opened(profile_of(first))
    unknown = write(tmp_path / "unknown.gguf", "unknown")
    with pytest.raises(ModelError, match="unknown model architecture"):
        opened(profile_of(unknown))


@pytest.mark.usefixtures("llama")
def test_a_draft_with_another_vocabulary(tmp_path: Path) -> None:
    target, draft = write(tmp_path / "t.gguf"), write(tmp_path / "d.gguf", pieces={300: "zebra"})
    with pytest.raises(ModelError, match="The tokenizers differ: id 300"):
        opened(profile_of(target, draft, "draft.vocabulary=shared"))
    alone, both = profile_of(target), profile_of(target, draft)

    pair = opened(both)

    assert pair.drafts[0].translates is not None
    assert text(pair, both, tokens=12) == text(opened(alone), alone, tokens=12)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """llama.cpp is not installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("specctl.models.llama.library.PACKAGES", {})


@pytest.mark.usefixtures("nowhere")
def test_without_the_library(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"llama\.cpp is not installed"):
        opened(profile_of("embedded:target", None, "engine=llama"))
    for file in (write(tmp_path / "unknown.gguf", "unknown"), write(tmp_path / "h.gguf", "falcon-h1")):
        with pytest.raises(ModelError) as caught:
            opened(profile_of(file))
        assert 'Or let llama.cpp run the file: `pip install "xllamacpp' in caught.value.hint


@pytest.mark.usefixtures("llama")
def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such file"):
        opened(profile_of(tmp_path / "no.gguf"))


@pytest.mark.slow
def test_processes_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_llama()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target, records = write(tmp_path / "t.gguf"), tmp_path / "in.jsonl"
    records.write_text("".join(json.dumps({"prompt": "the" + " in" * count}) + "\n" for count in range(4)))
    flags = ["--target", target, "--policy", "none", "--threads", 1, "-n", 12, "--token-ids", "-i", records]

    alone, shared = (invoke("generate", *flags, "--workers", count).stdout.splitlines() for count in (1, 2))

    one, two = ({line["id"]: line["completion_ids"] for line in map(json.loads, out)} for out in (alone, shared))
    assert len(one) == 4
    assert one == two


def test_small_files_are_made_when_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = locate(ModelTable(model=str(write(tmp_path / "m.gguf", "unknown"))), "target")

    assert checkpoint.headers().counts.keys() == {"F32"}
    assert checkpoint.has_weights()
    with pytest.raises(ModelError, match="cannot be read"):
        checkpoint.settings()


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("name", ["constant", "svip", "cost-optimal"])
def test_mtp_layers_in_the_targets_file_draft(tmp_path: Path, name: str) -> None:
    target = write(tmp_path / "t.gguf", "qwen35", mtp=1)
    alone, both = profile_of(target), profile_of(target, "target:mtp", f"draft.policy.name={name}")

    pair = opened(both, models=False)

    assert [runner.engine for runner in (pair.target, *pair.drafts)] == ["llama.cpp"] * 2
    assert pair.drafts[0].layers == (-1,)
    assert text(pair, both) == text(opened(alone), alone)
    assert most_rows(pair, 100) > 1


@pytest.mark.usefixtures("llama")
def test_mtp_layers_that_cannot_draft(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"t\.gguf' has no MTP layers"):
        opened(profile_of(write(tmp_path / "t.gguf"), "target:mtp", "draft.policy.name=constant"))
    target = write(tmp_path / "m.gguf", "qwen35", mtp=1)
    with pytest.raises(ModelError, match="Remove dtype from"):
        opened(profile_of(target, "target:mtp", "draft.policy.name=constant", "draft.dtype=bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", STATEFUL)
def test_recurrent_models_draft_and_verify_on_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    needs_llama()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mtp = int(architecture == "qwen35")
    target = write(tmp_path / "t.gguf", architecture, "Q8_0", mtp=mtp)
    drafts = [write(tmp_path / "d.gguf", architecture, "Q8_0", noise=0.02), *(["target:mtp"] * mtp)]
    alone = profile_of(target)
    pair = opened(alone)
    prompts = ["the cat", "in the end and then again " * 20]
    expected = [text(pair, alone, prompt, 80) for prompt in prompts]

    for draft in drafts:
        both = profile_of(target, draft, "draft.policy.name=constant")
        pair = opened(both)
        assert [text(pair, both, prompt, 80) for prompt in prompts] == expected
