"""Names of GGUF files: paths, split files, tags of the hub, and the stores of Ollama, LM Studio and llama.cpp."""

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from specctl.errors import AbsentError, ModelError
from specctl.models.files.checkpoint import locate
from specctl.models.files.gguf_header import parts_of
from specctl.models.files.gguf_names import HubFiles, _sizes_on_hub, choose, download_command, find, hub_page
from specctl.models.placing.absent import absence, bytes_by_name
from specctl.profile.schema import ModelTable
from tests.support.checkpoints import Hub
from tests.support.gguf_files import random_llama, write

REPOSITORY = "maker/Model-GGUF"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, an empty cache of the hub, and no network."""
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _sizes_on_hub.cache_clear()
    return tmp_path


def made(file: Path, contents: bytes = b"GGUF") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(contents)
    return file


def cached(home: Path, *names: str, repository: str = REPOSITORY, commit: str = "a" * 40) -> Path:
    """Files of a repository in the hub's cache; their folder."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    made(folder / "refs" / "main", commit.encode())
    for name in names:
        made(folder / "snapshots" / commit / name)
    return folder / "snapshots" / commit


def in_ollama(store: Path, name: str, blob: bytes | None = b"GGUF", layers: list[dict[str, str]] | None = None) -> Path:
    """A model of Ollama's store: its manifest by ``host/owner/model/tag``, and its file, which is returned."""
    digest = f"{len(name):064x}"
    weights = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": f"sha256:{'f' * 64}"}
    manifest = {"schemaVersion": 2, "layers": [template, weights] if layers is None else layers}
    made(store / "manifests" / name, json.dumps(manifest).encode())
    file = store / "blobs" / f"sha256-{digest}"
    return file if blob is None else made(file, blob)


def message(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        find(name, "target")
    return f"{caught.value.message} {caught.value.hint}"


def test_paths_and_parts_of(home: Path) -> None:
    whole = made(home / "m.gguf")
    assert find(str(whole), "target") == find("~/m.gguf", "target") == whole
    assert find(str(made(home / "blob")), "target") == home / "blob"
    assert find(str(made(home / "notes.txt", b"text")), "target") is None
    parts = [made(home / "s" / f"b-0000{number}-of-00003.gguf") for number in (1, 2, 3)]
    assert parts_of(parts[0]) == parts
    assert {find(str(part), "target") for part in parts} == {parts[0]}
    parts[1].unlink()
    assert "is one of 3 files, and b-00002-of-00003.gguf is missing" in message(str(parts[2]))
    parts[0].unlink()
    assert "b-00001-of-00003.gguf and 1 more is missing" in message(str(parts[0]))
    assert f"no such file. There is {whole}" in message(str(home / "mm.gguf"))
    assert "'a/b:c.gguf'" in message("a/b/c.gguf")


def test_folders_with_one_model(home: Path) -> None:
    folder = home / "folder"
    first = made(folder / "q" / "a-Q8_0-00001-of-00002.gguf")
    made(folder / "q" / "a-Q8_0-00002-of-00002.gguf")
    made(folder / "mmproj-a-F16.gguf")
    assert find(str(folder), "target") == first
    made(folder / "a-Q4_K_M.gguf")
    assert "2 GGUF models: a-Q4_K_M.gguf, q/a-Q8_0-00001-of-00002.gguf. Name one" in message(str(folder))
    assert find(f"{folder}:q8_0", "target") == first
    assert "Its tags are Q4_K_M, Q8_0" in message(f"{folder}:Q5_0")
    made(folder / "model.safetensors")
    assert find(str(folder), "target") is None


@pytest.mark.parametrize(
    ("tag", "found"),
    [
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("", "m-Q4_K_M.gguf"),
        ("F16", "m-F16.gguf"),  # not m-BF16.gguf
        ("UD-Q4_K_XL", "big/m-UD-Q4_K_XL-00001-of-00002.gguf"),
        ("M-Q8_0.gguf", "m-Q8_0.gguf"),
        ("mmproj-F16.gguf", "mmproj-F16.gguf"),
        ("Q2_K", None),  # of a projector alone
        ("Q4_K", None),
    ],
)
def test_tags(tag: str, found: str | None) -> None:
    names = ["m-BF16.gguf", "m-F16.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf", "mmproj-Q2_K.gguf"]
    names += [f"big/m-UD-Q4_K_XL-0000{number}-of-00002.gguf" for number in (2, 1)]
    assert choose(names, tag) == found


def test_the_default_tag_is_llama_cpps() -> None:
    assert choose(["m-F16.gguf", "m-Q8_0.gguf"], "") == "m-Q8_0.gguf"
    assert choose(["m-IQ2_M.gguf", "m-F16.gguf", "README.md"], "") == "m-F16.gguf"
    assert choose(["mmproj-m.gguf", "imatrix.gguf", "mtp-m.gguf"], "") is None


@pytest.mark.parametrize("before", ["", "hf.co/", "huggingface.co/", "https://huggingface.co/"])
def test_files_of_the_hubs_cache(home: Path, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached(home, "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf")
    for tag, name in {"": "m-Q4_K_M", ":Q8_0": "m-Q8_0", ":m-Q8_0.gguf": "m-Q8_0", ":latest": "m-Q4_K_M"}.items():
        assert find(f"{before}{REPOSITORY}{tag}", "target") == folder / f"{name}.gguf"
    with pytest.raises(AbsentError) as caught:
        find(f"{before}{REPOSITORY}:Q5_0", "target")
    assert "HF_HUB_OFFLINE" in caught.value.message
    assert "Here are m-Q4_K_M.gguf, m-Q8_0.gguf. Run `hf download maker/Model-GGUF" in caught.value.hint
    monkeypatch.setenv("LLAMA_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "none"))
    assert find(f"{before}{REPOSITORY}:Q8_0", "target") == folder / "m-Q8_0.gguf"


def test_addresses_of_files(home: Path) -> None:
    file = cached(home, "Q8/m-Q8_0.gguf") / "Q8" / "m-Q8_0.gguf"
    for address in ("resolve/main/Q8/m-Q8_0.gguf?download=true", "blob/main/Q8/m-Q8_0.gguf", "Q8/m-Q8_0.gguf"):
        assert find(f"https://huggingface.co/{REPOSITORY}/{address}", "target") == file, address


def test_plain_hub_ids_are_no_gguf_names(home: Path) -> None:
    cached(home, "m-Q4_K_M.gguf", repository="maker/model")
    made(home / ".lmstudio" / "models" / "maker" / "model-GGUF" / "m-Q4_K_M.gguf")
    assert find("maker/model", "target") is None
    assert find("model", "target") is not None
    for name in ("gpt2", "embedded:target", "prompt:lookup", "target:mtp", "drafter:mine"):
        assert find(name, "target") is None
    found = find("maker/model", "target", certain=True)
    assert isinstance(found, Path)
    assert found.name == "m-Q4_K_M.gguf"


def test_revisions(home: Path) -> None:
    cached(home, "m-Q4_K_M.gguf", commit="b" * 40)
    other = cached(home, "m-Q8_0.gguf", commit="a" * 40)
    assert find(f"{REPOSITORY}:Q4_K_M", "target", "b" * 40) == other.parent / ("b" * 40) / "m-Q4_K_M.gguf"
    with pytest.raises(AbsentError):
        find(f"{REPOSITORY}:Q8_0", "target", "b" * 40)


def test_only_the_files_of_the_model_are_downloaded(home: Path, hub: Hub) -> None:
    parts = [f"m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.folders[REPOSITORY] = home / "there"
    for name in ("README.md", "m-Q4_0.gguf", "mmproj-Q8_0.gguf", *parts):
        made(home / "there" / name)
    found = find(f"{REPOSITORY}:q8_0", "target")
    assert isinstance(found, HubFiles)
    assert found.sizes == dict.fromkeys(parts, 4)
    assert found.command == f"hf download {REPOSITORY} {parts[0]} {parts[1]}"
    first = found.fetch("target")
    assert sorted(file.name for file in first.parent.iterdir()) == parts
    hub.requests.clear()
    assert find(f"{REPOSITORY}:q8_0", "target") == first
    assert isinstance(find(f"{REPOSITORY}:Q4_0", "target"), HubFiles)
    assert not hub.requests  # what is here is taken without asking, and the list of files is asked for once
    (first.parent / parts[1]).unlink()
    assert find(f"{REPOSITORY}:q8_0", "target") == found
    assert "no GGUF file in it has the tag 'Q6_K'. Its tags are Q4_0, Q8_0" in message(f"{REPOSITORY}:Q6_K")
    _sizes_on_hub.cache_clear()
    (home / "there" / parts[1]).unlink()
    assert f"the repository lacks {parts[1]}" in message(f"{REPOSITORY}:Q8_0")
    (home / "there" / parts[0]).unlink()
    (home / "there" / "m-Q4_0.gguf").unlink()
    _sizes_on_hub.cache_clear()
    assert "there is no GGUF model in it" in message(f"{REPOSITORY}:Q8_0")
    assert "neither a folder here nor a repository on the hub" in message("maker/none:Q8_0")


def test_a_repository_whose_name_does_not_say_gguf(home: Path, hub: Hub) -> None:
    hub.folders["maker/model"] = home / "there"
    file = write(home / "there" / "m-Q8_0.gguf", random_llama())
    found = locate(ModelTable(model="maker/model"), "target")
    assert found.weights is not None
    assert found.weights.read_bytes() == file.read_bytes()
    file.unlink()
    _sizes_on_hub.cache_clear()
    made(home / "there" / "README.md")
    with pytest.raises(ModelError, match=r"there is no config\.json"):
        locate(ModelTable(model="maker/model"), "target")


@pytest.mark.parametrize("name", ["maker/model", "hf.co/maker/model:Q8_0", "maker/model:Q8_0"])
def test_pages_of_models(name: str) -> None:
    assert hub_page(name) == "https://huggingface.co/maker/model"


def test_a_hub_out_of_reach() -> None:
    assert "HF_HUB_OFFLINE forbids a download. Run `hf download maker/none --include '*Q8_0*'` where" in message(
        "maker/none:Q8_0"
    )


def test_ollamas_store(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = home / ".ollama" / "models"
    file = in_ollama(store, "registry.ollama.ai/library/qwen3/8b")
    assert {find(name, "target") for name in ("qwen3:8b", "library/qwen3:8b", "QWEN3:8B")} == {file}
    newest = in_ollama(store, "registry.ollama.ai/library/qwen3/latest")
    assert find("qwen3", "target") == newest
    own = in_ollama(store, "registry.ollama.ai/someone/qwen/mine")
    assert find("someone/qwen:mine", "target") == own
    hub = in_ollama(store, "hf.co/maker/Model-GGUF/Q4_K_M")
    for name in ("hf.co/maker/Model-GGUF:Q4_K_M", "maker/model-gguf:q4_k_m"):
        assert find(name, "target") == hub
    assert "Ollama's store has no such model. There is qwen3:8b" in message("qwen3:9b")
    assert "`ollama pull qwen3:9b`" in message("qwen3:9b")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    moved = in_ollama(home / "elsewhere", "registry.ollama.ai/library/a/b")
    assert find("a:b", "target") == moved


def test_models_of_ollama_without_a_file(home: Path) -> None:
    store = home / ".ollama" / "models"
    lost = in_ollama(store, "registry.ollama.ai/library/lost/1", blob=None)
    assert f"lacks its file {lost}" in message("lost:1")
    in_ollama(store, "registry.ollama.ai/library/other/1x", blob=b"{}")
    assert "is not a GGUF file" in message("other:1x")
    in_ollama(store, "registry.ollama.ai/library/cloud/1xyz", layers=[])
    assert "has no GGUF file for it" in message("cloud:1xyz")
    outside = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../secret"}
    in_ollama(store, "registry.ollama.ai/library/evil/1abcd", layers=[outside])
    assert "has no GGUF file for it" in message("evil:1abcd")
    made(store / "manifests" / "registry.ollama.ai" / "library" / "torn" / "1", b'{"layers": [')
    assert "torn/1 cannot be read" in message("torn:1")


def test_lm_studios_folder(home: Path) -> None:
    store = home / ".lmstudio" / "models"
    q4 = made(store / "maker" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q4_K_M.gguf")
    q8 = made(store / "maker" / "Qwen3-8B-GGUF" / "Qwen3-8B-Q8_0.gguf")
    made(store / "maker" / "Qwen3-8B-GGUF" / "mmproj-Qwen3-8B-F16.gguf")
    for name in ("qwen3-8b@q8_0", "maker/qwen3-8b@q8_0", "qwen3-8b-gguf@q8_0", "maker/Qwen3-8B-GGUF:Q8_0"):
        assert find(name, "target") == q8, name
    assert find("qwen3-8b", "target") == q4
    assert find("maker/Qwen3-8B-GGUF/Qwen3-8B-Q8_0.gguf", "target") == q8
    assert "Its tags are Q4_K_M, Q8_0" in message("qwen3-8b@q5_0")
    assert "is not in the local cache" in message("maker/Qwen3-8B-GGUF:Q5_0")  # the hub may have it
    assert "LM Studio's folder has no such model. There is qwen3-8b@q8_0" in message("qwen3-9b@q8_0")
    old = made(home / ".cache" / "lm-studio" / "models" / "other" / "Qwen3-8B-GGUF" / "x-Q8_0.gguf")
    assert "Name maker/Qwen3-8B-GGUF@q8_0 or other/Qwen3-8B-GGUF@q8_0" in message("qwen3-8b@q8_0")
    assert find("other/qwen3-8b@q8_0", "target") == old
    made(home / ".lmstudio-home-pointer", str(home / "moved").encode())
    made(home / "moved" / "settings.json", json.dumps({"downloadsFolder": str(home / "big")}).encode())
    big = made(home / "big" / "p" / "r" / "f-Q8_0.gguf")
    assert find("r@q8_0", "target") == big


def test_llama_cpps_former_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = made(home / ".cache" / "llama.cpp" / "maker_Model-GGUF_m-q8_0.gguf")
    made(home / ".cache" / "llama.cpp" / "maker_Model-GGUF_mmproj-Q8_0.gguf")
    assert find(f"{REPOSITORY}:Q8_0", "target") == file
    monkeypatch.setenv("LLAMA_CACHE", str(home / "l"))
    other = made(home / "l" / "maker_Model-GGUF_m-Q4_0.gguf")
    assert find(f"{REPOSITORY}:Q4_0", "target") == other


def test_stores_that_may_not_be_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = home / ".ollama" / "models"
    file = in_ollama(store, "registry.ollama.ai/library/a/b")
    monkeypatch.setattr(os, "access", lambda path, _: path not in (store, file))
    assert f"{file} may not be read by this user" in message("a:b")
    assert f"{store} may not be read by this user" in message("a:c")


def test_commands_that_download(home: Path) -> None:
    wanted = {":q8_0": "--include '*q8_0*'", ":b.gguf": "b.gguf", "": "--include '*Q4_K_M*'"}
    for tag, files in wanted.items():
        assert download_command(f"hf.co/maker/Model-GGUF{tag}") == f"hf download maker/Model-GGUF {files}"
    for name in ("maker/Model", "qwen3:8b", "qwen3-8b@q8_0", str(made(home / "m.gguf")), "prompt:lookup"):
        assert download_command(name) is None, name


def test_missing_models_are_listed_with_their_commands() -> None:
    tables = [("target", ModelTable(model=f"{REPOSITORY}:Q8_0")), ("draft", ModelTable(model="maker/plain-1b"))]
    error = absence(tables, ["cpu"])
    assert "hf download maker/Model-GGUF --include '*Q8_0*'" in error.hint
    assert 'hf download maker/plain-1b --exclude "original/*"' in error.hint
    assert bytes_by_name([("target", ModelTable(model="maker/Model-8b-GGUF:Q4_K_M"))]) == {}
