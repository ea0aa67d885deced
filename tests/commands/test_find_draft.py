"""``doctor --find-draft``: what could draft for a target, from configurations and headers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from specctl.doctor import draft_candidates
from specctl.doctor.diagnosis import diagnose
from specctl.doctor.draft_candidates import models_here, models_on_hub
from specctl.errors import UsageError
from specctl.models.files.checkpoint import Checkpoint
from specctl.profile.schema import ModelTable, Profile
from tests.support.checkpoints import llama_config, save_model
from tests.support.invoked import invoke
from tests.support.other_tokenizers import byte_level, sentence_pieces


def of_hub(name: str = "org/big") -> Checkpoint:
    return Checkpoint(name, "target", None, Path("nowhere"), "hub")


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """A hub whose answer is made by a function."""

    def answering(answer: Callable[[], Any]) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(list_models=lambda **_: answer()))

    return answering


def test_models_in_folders_and_in_the_cache_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, folder = tmp_path / "hub", tmp_path / "models"
    for made in (cache / "models--org--small/snapshots/1", cache / "models--org--big/snapshots/1", folder / "a/b"):
        made.mkdir(parents=True)
        (made / "config.json").write_text("{}")
    (cache / "models--org--gone/snapshots").mkdir(parents=True)
    (folder / "a/b/c/d").mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    assert [*models_here(of_hub(), [folder])] == [str(folder / "a/b"), "org/small"]


def test_a_folder_that_may_not_be_read_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open/config.json").write_text("{}")
    listed = Path.iterdir

    def iterdir(folder: Path) -> Any:
        if folder.name == "secret":
            raise PermissionError(folder)
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert [*models_here(of_hub(), [tmp_path])] == [str(tmp_path / "open")]


def test_what_is_here_is_not_on_the_hub_and_odd_files_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ["embedded:mid", "odd", "broken"]
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"architectures": 3}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(draft_candidates, "models_here", lambda *_: found)
    monkeypatch.setattr(draft_candidates, "models_on_hub", lambda _: ([*found, "org/other"], None))
    judged = draft_candidates._Target.judged

    def judging(target: Any, name: str) -> Any:
        if name == "broken":
            raise KeyError("rope")
        return judged(target, name)

    monkeypatch.setattr(draft_candidates._Target, "judged", judging)
    profile = Profile(target=ModelTable(model="embedded:target"))
    search = draft_candidates.find_drafts(profile, diagnose(profile), [])
    assert {one.model for one in search.candidates} == {"prompt:lookup", "embedded:mid"}
    assert search.left_out.keys() == {"odd", "broken"}
    assert "KeyError" in search.left_out["broken"]
    assert search.on_hub == ["org/other"]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ([], "--target embedded:target"),
        (["--set", "target.dtype=float32"], "--target embedded:target --set target.dtype=float32"),
        (["--set", "policy.threshold=0.2"], "--target embedded:target"),
        (["--profile", "embedded", "--target", "embedded:mid"], "--profile embedded --target embedded:mid"),
        (["-p", "embedded"], "--profile embedded"),
    ],
)
def test_commands_repeat_what_was_given(asked: list[str], given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECCTL_PROFILE", raising=False)
    monkeypatch.setattr(draft_candidates, "models_here", lambda *_: [])
    (lookup,) = json.loads(invoke("doctor", *asked, "--find-draft", "--json").stdout)["drafts"]["candidates"]
    assert lookup["command"].startswith(f"specctl bench {given} --draft prompt:lookup ")


def test_the_hub_is_asked_for_models_made_from_the_target(online: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    online(lambda: [SimpleNamespace(id="org/eagle")])
    assert models_on_hub(of_hub()) == (["org/eagle"], None)
    online(list)
    assert models_on_hub(of_hub()) == ([], "the hub names no model that was made from org/big")

    def gone() -> None:
        raise ConnectionError

    online(gone)
    assert models_on_hub(of_hub()) == ([], "the hub cannot be reached (ConnectionError)")
    ended = Event()
    monkeypatch.setattr(draft_candidates, "PATIENCE", 0.0)
    online(ended.wait)
    assert "did not answer" in (models_on_hub(of_hub())[1] or "")
    ended.set()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in (models_on_hub(of_hub())[1] or "")
    assert "not one of its models" in (models_on_hub(Checkpoint("x", "target", None, Path("x"), "folder"))[1] or "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--find-draft", "--draft", "x"], "--draft needs a pair"),
        (["--find-draft", "--run"], "--run needs a pair"),
        (["--in", "."], "--in needs --find-draft"),
        (["--find-draft", "--in", "nowhere"], "there is no such folder"),
    ],
)
def test_flags_that_do_not_go_together(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        invoke("doctor", *flags)


def test_a_step_reads_single_rows_of_an_embedding_table(tmp_path: Path) -> None:
    save_model(tmp_path, llama_config())
    found = Checkpoint("x", "draft", None, tmp_path, "folder").headers()
    rows = math.prod(found.shapes["model.embed_tokens.weight"])
    share = found.bytes_without("embed_tokens.weight") / found.stored_bytes
    assert share == pytest.approx(1 - rows / sum(found.counts.values()), abs=1e-3)


@pytest.mark.slow
def test_candidates_are_priced_and_others_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    whole = byte_level(420)
    sizes = {"target": 64, "same": 16, "large": 64, "pieces": 16}
    for name, hidden in sizes.items():
        tokenizer = sentence_pieces(400) if name == "pieces" else whole
        save_model(tmp_path / name, llama_config(len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden))
        tokenizer.save_pretrained(tmp_path / name)
    head = tmp_path / "head"
    head.mkdir()
    told = {"architectures": ["LlamaForCausalLMEagle3"], "target_model_name_or_path": "org/other", "hidden_size": 64}
    (head / "config.json").write_text(json.dumps(told))
    asked = ["--target", str(tmp_path / "target"), "--find-draft", "--in", str(tmp_path)]
    found = json.loads(invoke("doctor", *asked, "--json").stdout)["drafts"]
    named = {Path(one["model"]).name: one for one in found["candidates"]}
    assert [*named] == ["prompt:lookup", "same", "pieces"]
    assert 0 < named["same"]["cost"] < 0.5
    assert named["same"]["pays_from"] > 0
    assert "another than the target's" in named["pieces"]["tokens"]
    left = {Path(name).name: why for name, why in found["left_out"].items()}
    assert left.keys() == {"large", "head"}
    assert "100% of the target's parameters" in left["large"]
    assert len(found["compare"]) == 2
    text = invoke("doctor", *asked).stdout
    assert f"specctl calibrate --target {tmp_path / 'target'} --draft {tmp_path / 'same'}" in text
    assert "the hub was not asked" in text
