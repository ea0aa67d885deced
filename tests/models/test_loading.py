import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import ByT5Tokenizer, GPTNeoXConfig, LlamaModel, Qwen3Config

from specctl.errors import ModelError
from specctl.models.files.checkpoint import SMALL_FILES, locate
from specctl.models.files.library_calls import explain
from specctl.models.loading import model as loading
from specctl.models.loading.model import load_model, load_tokenizer, loading_order
from specctl.models.loading.pair_members import eos_of
from specctl.models.placing.absent import download_note
from specctl.models.placing.memory import DeviceMemory
from specctl.profile.schema import DraftTable, ModelTable, Profile
from tests.support.checkpoints import Hub, llama_config, save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "llama")


def load(model: Path | str, **settings: object) -> loading.LoadedModel:
    return load_model(ModelTable(model=str(model), **({"device": "cpu"} | settings)), role="target")


def refusal(model: Path | str, **settings: object) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(model, **settings)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    return caught.value


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "config",
    [
        llama_config(),
        Qwen3Config(
            vocab_size=300,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        ),
        GPTNeoXConfig(vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2),
    ],
    ids=lambda config: config.model_type,
)
def test_loads_a_checkpoint_ready_to_run(tmp_path: Path, config, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model", config)
    capfd.readouterr()

    loaded = load(folder)

    assert capfd.readouterr() == ("", "")
    assert loaded.vocabulary == config.vocab_size
    assert loaded.device == torch.device("cpu")
    assert loaded.dtype == torch.float32
    assert loaded.devices == ("cpu",)
    assert not loaded.model.training
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, config.vocab_size)


def test_dtype_is_float32_on_the_cpu_unless_the_profile_names_one(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "half", llama_config(dtype="bfloat16"))

    assert load(folder).dtype == torch.float32
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_a_sharded_checkpoint_loads(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "sharded", shards="10KB")
    assert (folder / "model.safetensors.index.json").exists()

    whole = load(save_model(tmp_path / "whole"))

    torch.testing.assert_close(load(folder).model.lm_head.weight, whole.model.lm_head.weight)


@pytest.mark.parametrize(
    "where",
    [{"device": "balanced"}, {"device": "sequential", "max_memory": {"cpu": "1GiB"}}, {"device": {"": "cpu"}}],
    ids=str,
)
def test_accelerate_placements_run(folder: Path, where: dict[str, object]) -> None:
    loaded = load(folder, **where)

    assert loaded.device == torch.device("cpu")
    assert loaded.model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 258)


def test_eos_ids_join_generation_settings_and_tokenizer(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    loaded = load(folder)

    assert loaded.eos_ids == {5, 9}
    assert eos_of(loaded, load_tokenizer(ModelTable(model=str(folder)))) == {0, 5, 9}


def test_one_eos_id_may_be_a_plain_number(folder: Path) -> None:
    assert load(folder).eos_ids == {0}


def test_a_missing_path_suggests_its_neighbour(folder: Path) -> None:
    error = refusal(folder.with_name("lama"))

    assert "no such folder" in error.message
    assert f"Did you mean {str(folder)!r}?" in error.hint


def test_a_file_is_not_a_checkpoint(folder: Path) -> None:
    assert "is a file" in refusal(folder / "model.safetensors").message


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path).message


def test_an_adapter_is_not_a_model(tmp_path: Path) -> None:
    for told in ("{}", "[]", "no"):
        (tmp_path / "adapter_config.json").write_text(told)
        assert "is an adapter, not" in refusal(tmp_path).message
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}')
    error = refusal(tmp_path)
    assert "is an adapter of 'meta-llama/Llama-3.1-8B', not a whole model" in error.message
    assert f"--set target.model=meta-llama/Llama-3.1-8B --set target.adapter={tmp_path}" in error.hint


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    assert "holds no weights" in refusal(folder).message


def test_pickled_weights_are_refused_with_a_way_to_convert(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    error = refusal(folder)

    assert "no safetensors weights" in error.message
    assert "save_pretrained" in error.hint


def test_truncated_weights_name_the_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])

    assert f"{path} is damaged" in refusal(folder).message


def test_a_git_lfs_pointer_is_told_from_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")

    assert "git lfs pull" in refusal(folder).hint


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "sharded", shards="10KB")
    shard = max(folder.glob("*.safetensors"))
    shard.unlink()

    assert shard.name in refusal(folder).message


@pytest.mark.parametrize("text", ["{", "[1,"])
def test_a_damaged_configuration(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)

    assert "damaged config.json" in refusal(folder).message


def test_weights_that_do_not_match_the_configuration(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)

    assert "lacks 9 weight(s), first model.layers.2" in refusal(folder).message


def test_weights_of_another_shape(folder: Path) -> None:
    edit_config(folder, vocab_size=300)

    assert "has a wrong shape: lm_head.weight is (" in refusal(folder).message


def test_a_model_without_its_output_head(tmp_path: Path) -> None:
    LlamaModel(llama_config()).save_pretrained(tmp_path / "headless")

    assert "lm_head" in refusal(tmp_path / "headless").message


def test_an_unknown_architecture(folder: Path) -> None:
    edit_config(folder, model_type="llama99", architectures=["Llama99ForCausalLM"])

    assert "does not know" in refusal(folder).message


def test_an_architecture_that_does_not_generate(folder: Path) -> None:
    from transformers import CLIPConfig

    CLIPConfig().save_pretrained(folder)

    assert "does not write text" in refusal(folder).message


def test_code_from_the_checkpoint_is_not_run_unasked(folder: Path) -> None:
    (folder / "modeling_own.py").write_text("raise SystemExit('ran')")
    edit_config(
        folder,
        model_type="own",
        auto_map={"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"},
    )

    assert "trust_remote_code = true in [target]" in refusal(folder).hint


def test_weights_that_do_not_fit_are_refused_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [DeviceMemory("cpu", "small", 2**20, 30_000)]
    monkeypatch.setattr("specctl.models.placing.placement.device_memory", lambda *_: small)
    monkeypatch.setattr(loading, "_read", lambda *_: pytest.fail("weights were read"))

    error = refusal(folder)

    assert "needs" in error.message
    assert "free: cpu 29 KiB" in error.message
    assert 'dtype = "bfloat16"' in error.hint


@pytest.mark.parametrize("cause", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError("no memory")])
def test_running_out_of_memory_while_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cause: BaseException
) -> None:
    def read(*_: object) -> None:
        raise cause

    monkeypatch.setattr(loading, "_read", read)

    assert "ran out of memory" in refusal(folder).message


def test_a_device_that_is_not_there(folder: Path) -> None:
    error = refusal(folder, device="cuda:77")

    assert "'cuda:77' is not on this machine" in error.message
    assert "cpu" in error.hint


@pytest.mark.parametrize("answer", [(403, "Forbidden"), (500, "ServerError")])
def test_other_answers_of_the_hub(hub: Hub, answer: tuple[int, str]) -> None:
    hub.refusals["org/tiny"] = answer

    error = refusal("org/tiny")

    assert "did not deliver" in error.message
    assert str(answer[0]) in error.message


def test_an_unforeseen_failure_still_names_the_model() -> None:
    error = explain(KeyError("odd"), "draft", "some/model")

    assert error.message == "The draft model 'some/model' cannot be loaded: KeyError: 'odd'"


def test_a_package_that_is_missing_is_named() -> None:
    told = "TimmWrapperModel requires the timm library but it was not found.\nInstall it with pip: `pip install timm`."

    error = explain(ImportError(told), "target", "some/model")

    assert error.message == "The target model 'some/model' needs timm, which is not installed."
    assert error.hint == 'Run `pip install "timm"`.'


def test_a_checkpoint_without_a_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()

    with pytest.raises(ModelError, match="comes without a tokenizer"):
        load_tokenizer(ModelTable(model=str(folder)))


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "GPT2Tokenizer", "T5Tokenizer", "GemmaTokenizer"])
def test_a_tokenizer_whose_vocabulary_was_not_copied(folder: Path, kind: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))

    with pytest.raises(ModelError, match="comes without a tokenizer"):
        load_tokenizer(ModelTable(model=str(folder)))


OWN_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizer

class Own(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "NAME"}

    def __init__(self, vocab_file, **settings):
        self.words = Path(vocab_file).read_text().split()
        super().__init__(**settings)

    @property
    def vocab_size(self):
        return len(self.words)

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.words)}

    def _tokenize(self, text):
        return text.split()

    def _convert_token_to_id(self, token):
        return self.words.index(token)

    def _convert_id_to_token(self, index):
        return self.words[index]
"""


@pytest.mark.parametrize("name", ["tiktoken.model", "qwen.tiktoken", "words.vocab"])
def test_a_tokenizer_in_a_file_of_another_name(folder: Path, name: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / name).write_text("one two three")
    (folder / "own.py").write_text(OWN_CODE.replace("NAME", name))
    told = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))

    tokenizer = load_tokenizer(ModelTable(model=str(folder), trust_remote_code=True))

    assert tokenizer("three one")["input_ids"] == [2, 0]
    assert any(Path(name).match(pattern) for pattern in SMALL_FILES)  # what is downloaded before the weights


def test_a_tokenizer_of_bytes_has_no_vocabulary_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)

    assert load_tokenizer(ModelTable(model=str(folder)))("ab")["input_ids"] == [100, 101, 1]


def test_a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")

    with pytest.raises(ModelError, match="tokenizer cannot be read"):
        load_tokenizer(ModelTable(model=str(folder)))


def test_models_are_loaded_from_the_innermost_draft_up() -> None:
    fast, middle, target = (ModelTable(model=name) for name in ("fast", "middle", "target"))
    profile = Profile(target=target, draft=DraftTable(**middle.model_dump(), draft=DraftTable(**fast.model_dump())))

    tables = [("target", "target"), ("draft", "middle"), ("draft.draft", "fast")]
    assert [(key, table.model) for key, table in profile.models] == tables
    assert [(key, table.model) for key, table in loading_order(profile.models)] == tables[::-1]


def test_a_hub_model_is_downloaded_and_then_loads_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    hub.folders["org/tiny"] = save_model(tmp_path / "published", shards="10KB")

    first = load("org/tiny")
    hub.requests.clear()
    second = load("org/tiny")

    assert first.vocabulary == second.vocabulary == 258
    assert not [path for path in hub.requests if "/resolve/" in path]


def test_a_cached_hub_model_loads_offline(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.folders["org/tiny"] = save_model(tmp_path / "published")
    load("org/tiny")
    hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    assert load("org/tiny").vocabulary == 258
    assert load_tokenizer(ModelTable(model="org/tiny")).eos_token_id == 0
    assert not hub.requests


def test_offline_and_not_cached(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hub-cache" / "models--org--tiny").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    error = refusal("org/tinny")

    assert "HF_HUB_OFFLINE forbids a download" in error.message
    assert "Did you mean 'org/tiny'?" in error.hint
    assert not hub.requests


@pytest.mark.usefixtures("hub")
def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")

    assert "the hub cannot be reached" in refusal("org/tiny").message


@pytest.mark.usefixtures("hub")
def test_an_unknown_repository() -> None:
    assert "neither a folder here nor a repository on the hub" in refusal("org/nothing").message


@pytest.mark.usefixtures("hub")
def test_an_impossible_repository_name() -> None:
    assert "nor a valid hub id" in refusal("no such model!").message


def test_an_unknown_revision(hub: Hub) -> None:
    hub.refusals["org/tiny"] = 404, "RevisionNotFound"

    error = refusal("org/tiny", revision="v9")

    assert "no such revision" in error.message
    assert "`revision` in [target]" in error.hint


@pytest.mark.parametrize(("token", "advice"), [("hf_test", "account of the token in use"), (None, "no token is set")])
def test_a_gated_repository(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None, advice: str) -> None:
    hub.refusals["org/gated"] = 403, "GatedRepo"
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)

    error = refusal("org/gated")

    assert "is gated" in error.message
    assert "https://huggingface.co/org/gated" in error.hint
    assert advice in error.hint


def test_a_model_that_was_downloaded_in_part(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.folders["org/part"] = save_model(tmp_path / "published")
    checkpoint = locate(ModelTable(model="org/part"), "target")  # which fetches the small files
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    assert "HF_HUB_OFFLINE forbids a download" in refusal("org/part").message
    assert download_note(checkpoint) is None


def test_a_hub_repository_with_pickled_weights_only(hub: Hub, tmp_path: Path) -> None:
    published = save_model(tmp_path / "published")
    shutil.move(published / "model.safetensors", published / "pytorch_model.bin")
    hub.folders["org/pickled"] = published

    assert "no safetensors weights" in refusal("org/pickled").message
    assert not [path for path in hub.requests if path.endswith("pytorch_model.bin")]
