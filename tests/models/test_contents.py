"""What the files of a profile's models hold is known again, and seen when it changes."""

import os
import shutil
from pathlib import Path

import pytest

from specctl.models.files.checkpoint import files_hash, locate
from specctl.models.loading.contents import Contents, model_hash
from specctl.models.loading.pair_members import PairMember
from specctl.models.placing.memory import device_memory
from specctl.profile.schema import Profile


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """Copies of the embedded target and draft, to change."""
    embedded = Path(__file__).parents[2] / "specctl" / "models" / "embedded"
    for name in ("target", "draft"):
        shutil.copytree(embedded / name, tmp_path / name)
    return tmp_path


def profile(folder: Path) -> Profile:
    return Profile.model_validate(
        {"target": {"model": str(folder / "target")}, "draft": {"model": str(folder / "draft")}}
    )


def test_copies_hold_the_same_wherever_they_are(copies: Path) -> None:
    embedded = Profile.model_validate(
        {"target": {"model": "embedded:target"}, "draft": {"model": "embedded:draft", "head": "embedded:draft-head"}}
    )
    found, copied = Contents.of(embedded).hashes(), Contents.of(profile(copies)).hashes()
    assert set(found) == {"target", "draft", "draft.head"}
    assert {key: found[key] for key in copied} == copied
    assert found["target"] != found["draft"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json"])
def test_a_changed_file_of_one_model_changes_its_hash_alone(copies: Path, name: str) -> None:
    before = Contents.of(profile(copies)).hashes()
    path = copies / "draft" / name
    written = path.read_bytes()
    path.write_bytes(bytes([written[0] ^ 1]) + written[1:])
    after = Contents.of(profile(copies)).hashes()
    assert before["target"] == after["target"]
    assert before["draft"] != after["draft"]


def test_files_written_again_are_seen_by_their_time_too(copies: Path) -> None:
    before = Contents.of(profile(copies)).changes()
    path = copies / "target" / "model.safetensors"
    os.utime(path, ns=(0, 1))
    after = Contents.of(profile(copies)).changes()
    assert before["draft"] == after["draft"]
    assert before["target"] != after["target"]


def test_a_head_in_the_targets_files_and_a_lookup_have_no_files_of_their_own(copies: Path) -> None:
    tables = {
        "target": {"model": str(copies / "target")},
        "draft": {"model": "prompt:lookup", "policy": {"name": "constant"}},
    }
    assert set(Contents.of(Profile.model_validate(tables)).files) == {"target"}


def test_a_model_is_known_by_every_byte_of_its_weights(copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by samples of a large file, as for what is only told of it."""
    monkeypatch.setattr("specctl.models.files.checkpoint._WHOLE", 10_000)
    monkeypatch.setattr("specctl.models.files.checkpoint._SAMPLE", 10)
    checkpoint = locate(profile(copies).target, "target")
    (weights,) = checkpoint.weight_files()
    found = files_hash([weights]), model_hash(checkpoint, False)
    contents = bytearray(weights.read_bytes())
    contents[len(contents) // 2 + 20_000] ^= 1
    weights.write_bytes(contents)
    again = files_hash([weights]), model_hash(checkpoint, False)
    assert again[0] == found[0]
    assert again[1] != found[1]


def test_large_files_are_not_read_again_until_they_change(
    copies: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specctl.models.loading import contents

    monkeypatch.setattr(contents, "STORED", 1)
    monkeypatch.setattr(contents, "SETTLED", -(10**12))
    monkeypatch.setattr(contents, "cache_folder", lambda: tmp_path)
    checkpoint = locate(profile(copies).target, "target")
    (weights,) = checkpoint.weight_files()
    read: list[int] = []

    def hash_now() -> str | None:
        contents._hash.cache_clear()
        with monkeypatch.context() as counted:
            counted.setattr(contents, "files_hash", lambda *a, **k: read.append(1) or files_hash(*a, **k))
            return model_hash(checkpoint, False)

    first = hash_now()
    assert (hash_now(), len(read)) == (first, 1)
    state = weights.stat()
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert hash_now() != first
    assert len(read) == 2
    (stored,) = tmp_path.glob("*.files.json")
    for damaged in ("", "[]", '{"of": 1}', "\0"):
        stored.write_text(damaged)
        assert hash_now() not in (first, None)
    assert len(read) == 6
    contents._hash.cache_clear()


def test_a_model_is_known_by_nothing_else(copies: Path) -> None:
    table = profile(copies).target
    found = model_hash(locate(table, "target"), False)
    (copies / "target" / "README.md").write_text("# Other words")
    assert model_hash(locate(table, "target"), False) == found != model_hash(locate(table, "target"), True) is None
    (copies / "target" / "adapter_config.json").write_text("{}")
    assert model_hash(locate(table, "target"), False) is None


def test_files_that_were_written_while_a_model_was_loaded_do_not_tell_what_it_is(copies: Path) -> None:
    found = PairMember("target", profile(copies).target).located(None).inspected(device_memory({"cpu"}), "onnx")
    assert found.checkpoint is not None
    assert found.files_hash == model_hash(found.checkpoint, False) is not None
    path = copies / "target" / "config.json"
    path.write_text(path.read_text() + " ")
    assert found.files_hash is None
    assert model_hash(found.checkpoint, False) is not None
