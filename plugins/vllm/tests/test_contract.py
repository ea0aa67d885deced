"""Sources of vLLM that differ from the known ones are told, and known ones are not."""

import os
from pathlib import Path

import pytest

from specctl.errors import UsageError
from specctl_vllm.contract import (
    Source,
    check_contract,
    differences,
    known_sources,
    known_versions,
    read_function,
    with_version,
)

PLACE = "v1/worker.py:Worker.load_model"
TEXT = '''
class Other:
    def load_model(self, other): ...

class Worker(Other):
    def load_model(self, weights, *, dummy=False):
        """What it does.

        In words.
        """
        # Why.
        return self.runner.load(weights)
'''


def written(folder: Path, text: str) -> Path:
    (folder / "v1").mkdir(exist_ok=True)
    (folder / "v1" / "worker.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def known(tmp_path: Path) -> dict[str, dict[str, Source]]:
    source = read_function(written(tmp_path, TEXT), PLACE)
    assert source is not None
    assert source.parameters == "self, weights, dummy"
    return {PLACE: {"1.0": source, "1.1": source}}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("What it does.", "What it does, in other words."),
        ("# Why.\n", "\n"),
        ("class Other", "class Another"),
        ("    def", "    # More.\n    def"),
    ],
)
def test_words_about_a_function_may_change(
    known: dict[str, dict[str, Source]], tmp_path: Path, old: str, new: str
) -> None:
    assert differences(written(tmp_path, TEXT.replace(old, new).replace("(Another)", "")), known) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "weights, *",
            "weights, path, *",
            f"{PLACE} takes (self, weights, path, dummy) instead of (self, weights, dummy)",
        ),
        ("(weights)\n", "(weights, 1)\n", f"{PLACE} has another source than in 1.0 and 1.1"),
        ("Worker(", "CPUWorker(", f"{PLACE} is not there"),
    ],
    ids=["parameters", "source", "name"],
)
def test_what_differs_is_told(
    known: dict[str, dict[str, Source]], tmp_path: Path, old: str, new: str, told: str
) -> None:
    package = written(tmp_path, TEXT.replace(old, new))
    assert differences(package, known) == [told]
    with pytest.raises(UsageError, match="does not start in it: v1/worker") as caught:
        check_contract(package, known)
    assert caught.value.hint.startswith("Known versions: 0.32.0, 0.33.0.")


def test_a_package_without_the_files_differs_in_every_function(tmp_path: Path) -> None:
    assert differences(tmp_path, known_sources()) == [f"{place} is not there" for place in known_sources()]
    with pytest.raises(UsageError, match="is not in vLLM 9"):
        with_version(tmp_path, "9")


def test_two_versions_are_known_with_every_function_that_is_overridden() -> None:
    assert known_versions() == ["0.32.0", "0.33.0"]
    assert all(list(versions) == known_versions() for versions in known_sources().values())
    names = {place.rpartition(".")[2] for place in known_sources()}
    assert {"propose", "prepare_next_token_ids_padded", "_sample_draft_tokens", "load_model"} <= names


@pytest.mark.parametrize("version", known_versions())
def test_sources_of_a_version_are_the_known_ones(version: str) -> None:
    """Of ``SPECCTL_VLLM_SOURCES``, a folder with vLLM's package, or some of its files, in ``VERSION/vllm``."""
    folder = os.environ.get("SPECCTL_VLLM_SOURCES")
    if folder is None:
        pytest.skip("SPECCTL_VLLM_SOURCES names no folder with VERSION/vllm of each known version")
    package = Path(folder) / version / "vllm"
    check_contract(package)
    mine = {place: read_function(package, place) for place in known_sources()}
    assert mine == {place: versions[version] for place, versions in known_sources().items()}
