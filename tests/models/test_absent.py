from pathlib import Path

import pytest

from specctl.errors import AbsentError
from specctl.models.files.checkpoint import locate
from specctl.models.loading.assembly import load_pair
from specctl.models.placing.absent import absence, download_note, weights_by_name
from specctl.profile import resolve
from specctl.profile.schema import ModelTable
from tests.support.checkpoints import save_model


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


def refusal(name: str) -> AbsentError:
    with pytest.raises(AbsentError) as caught:
        load_pair(resolve(name, environ={}).profile)
    return caught.value


@pytest.mark.usefixtures("offline")
def test_one_error_names_every_missing_model_and_how_to_get_it(tmp_path: Path) -> None:
    error = refusal("llama70b-svip")
    target, draft = error.message.splitlines()
    assert target.startswith("The target model 'meta-llama/Meta-Llama-3-70B' (about 140 GB) is not in the local cache")
    assert draft.startswith("The draft model 'meta-llama/Meta-Llama-3-8B' (about 16 GB) is not in the local cache")
    hint = error.hint.splitlines()
    assert '  hf download meta-llama/Meta-Llama-3-70B --exclude "original/*"' in hint
    assert '  hf download meta-llama/Meta-Llama-3-8B --exclude "original/*"' in hint
    assert any("hf auth login" in line and "accept a licence" in line for line in hint)
    assert f"They are kept in {tmp_path / 'hub'}; HF_HOME names another place." in hint
    assert "Or name folders that you have: --target DIR --draft DIR." in hint


@pytest.mark.usefixtures("offline")
def test_devices_that_lack_are_told_too() -> None:
    profile = resolve("llama70b-svip", environ={}).profile
    assert profile.draft is not None
    tables = [("draft", profile.draft), ("target", profile.target)]
    assert (
        "asks for cuda:0, which this machine does not have. With --set draft.device=auto"
        in absence(tables, ["cpu"]).hint
    )
    assert "cuda" not in absence(tables, ["cuda:0", "cpu"]).hint
    four = resolve("llama70b-svip-4gpu", environ={}).profile
    hint = absence([("target", four.target)], ["cuda:0", "cpu"]).hint
    assert "cuda:1, cuda:2, cuda:3" in hint
    assert "profiles for fewer cards" in hint


@pytest.mark.usefixtures("offline")
def test_a_head_that_is_named_after_its_model_gets_no_size() -> None:
    target, draft = refusal("qwen8b-eagle3").message.splitlines()
    assert "'Qwen/Qwen3-8B' (about 16 GB)" in target
    assert "GB" not in draft


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("meta-llama/Meta-Llama-3-70B", 70e9),
        ("EleutherAI/pythia-6.9b", 6.9e9),
        ("EleutherAI/pythia-160m", 160e6),
        ("google/gemma-2-27b-it", 27e9),
        ("z-lab/Qwen3-8B-DFlash-b16", 8e9),
        ("org/7bx70b", None),
        ("openai-community/gpt2", None),
    ],
)
def test_the_size_that_a_name_tells(name: str, weights: float | None) -> None:
    assert weights_by_name(name) == weights


def test_what_is_told_before_weights_are_fetched(hub: object, tmp_path: Path) -> None:
    published = save_model(tmp_path / "published")
    (published / "README.md").write_text("---\nlicense: mit\n---\n")
    hub.folders["org/tiny"] = published  # type: ignore[attr-defined]
    checkpoint = locate(ModelTable(model="org/tiny"), "target")
    told = download_note(checkpoint) or ""
    assert told.startswith("downloading org/tiny, 0.")
    assert "licence mit, from http://" in told
    assert told.endswith(str(tmp_path / "hub-cache"))
    checkpoint.fetch_weights()
    assert download_note(checkpoint) is None


def test_every_gated_model_is_told(hub: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    hub.refusals |= dict.fromkeys(("org/big", "org/small"), (403, "GatedRepo"))  # type: ignore[attr-defined]
    tables = [("draft", ModelTable(model="org/small")), ("target", ModelTable(model="org/big"))]
    error = absence(tables, ["cpu"])
    assert error.message.count("is gated") == 2
    for name in ("org/big", "org/small"):
        assert f"Accept the licence at https://huggingface.co/{name}" in error.hint
