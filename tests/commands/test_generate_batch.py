"""``specctl generate --batch``: what would be written one record at a time, by passes that several share."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import UsageError
from specctl.models.onnx.passes import OnnxPasses
from specctl.models.passes.forward import Forward
from specctl.models.running.eager import EagerPasses
from specctl.models.running.passes import Request
from specctl.policies.published import Svip
from tests.support.invoked import invoke
from tests.support.onnx_models import needs_onnx, small_pair

pytestmark = needs_onnx

RECORDS: list[dict[str, Any]] = [
    {"prompt": "the th"},
    {"prompt": "a", "max_tokens": 30},
    {"prompt": "and then it was", "temperature": 1.0, "seed": 7},
    {"messages": "none"},
    {"turns": ["th", "e"]},
    {"prompt": "he said", "max_tokens": 1},
    {"prompt": "of the", "temperature": 0.8},
    {"prompt": "an", "stop": "q"},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("pair")
    small_pair(folder)
    return "--target", str(folder / "target"), "--draft", str(folder / "draft")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def untimed(path: Path) -> list[Any]:
    """The lines of a file of results or rounds without what clocks say."""
    return untimed_lines(path.read_text())


def untimed_lines(text: str) -> list[Any]:
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        line.pop("metrics", None)
        for key in [key for key in line if key.endswith("_ms")]:
            del line[key]
    return lines


@pytest.mark.parametrize("policy", ["svip:threshold=0.5", "none", "constant@lookup"])
@pytest.mark.representatives("svip:threshold=0.5")
def test_results_and_rounds_are_those_of_one_at_a_time(
    pair: tuple[str, ...], source: Path, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.text_engine.row_count.WORTH", 0.0)
    monkeypatch.setattr("specctl.text_engine.row_count.GAIN", 0.0)
    name, _, draft = policy.partition("@")
    models = pair if not draft else (*pair[:2], "--draft", "prompt:lookup")
    for rows in (1, 3, "auto"):
        files = ("-o", tmp_path / f"{rows}.jsonl", "--trace", tmp_path / f"{rows}.rounds")
        settings = ("--engine", "onnx", "--policy", name, "-n", 12, "--raw", "--token-ids", "-q")
        ran = invoke("generate", *models, "-i", source, *settings, *files, "--batch", rows, code=1)
        assert "one at a time" not in ran.stderr
    for rows in (3, "auto"):
        assert untimed(tmp_path / f"{rows}.jsonl") == untimed(tmp_path / "1.jsonl")
        assert untimed(tmp_path / f"{rows}.rounds") == untimed(tmp_path / "1.rounds")


def test_a_batch_is_resumed_where_it_ended(pair: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    settings = (*pair, "--engine", "onnx", "--policy", "constant", "-n", 8, "--raw", "-q", "-i", source, "-o", output)
    invoke("generate", *settings, "--batch", 2, code=1)
    whole = output.read_text().splitlines(keepends=True)
    output.write_text("".join(whole[:4]))
    invoke("generate", *settings, "--batch", 4, "--resume", code=1)
    again = output.read_text().splitlines(keepends=True)
    assert again[:4] == whole[:4]
    assert [json.loads(line).get("completion") for line in again] == [
        json.loads(line).get("completion") for line in whole
    ]


def test_an_engine_that_reads_one_text_says_so_where_a_number_was_asked_for(
    pair: tuple[str, ...], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As of a model with windows.
    monkeypatch.setattr(EagerPasses, "_no_rows", staticmethod(lambda _: "its layers have windows"))
    settings = ("--engine", "eager", "--policy", "constant", "-n", 4, "--raw", "-q")
    for rows, said in ((2, True), ("auto", False)):
        output = tmp_path / f"{rows}.jsonl"
        ran = invoke("generate", *pair, *settings, "-i", source, "-o", output, "--batch", rows, code=1)
        told = "texts are written one at a time, for the target runs on eager, and its layers have windows" in " ".join(
            ran.stderr.split()
        )
        assert told == said
        assert len(output.read_text().splitlines()) == len(RECORDS)


def test_a_prompt_is_one_text() -> None:
    with pytest.raises(UsageError, match=re.escape("use either --batch or a PROMPT")):
        invoke("generate", "a prompt", "--batch", 2)


def test_records_that_cannot_be_written_are_lines_among_the_others(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is longer than the context, of one the first pass fails."""
    records = [{"prompt": "the th"}, {"prompt": "th " * 1500}, {"prompt": "of"}, {"prompt": "a"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    forward, files = OnnxPasses.forward, ("-i", tmp_path / "in.jsonl")
    settings = (*pair, "--engine", "onnx", "--policy", "constant", "-n", 8, "--raw", "-q", *files)
    alone = untimed_lines(invoke("generate", *settings, "--batch", 1, code=1).stdout)
    assert [alone[1]["error"]["type"], "error" in alone[2]] == ["prompt_too_long", False]

    def failing(passes: OnnxPasses, requests: Sequence[Request]) -> list[Forward]:
        if any((request.slot, request.after) == (2, 0) for request in requests):
            raise RuntimeError("no pass for this text")
        return forward(passes, requests)

    monkeypatch.setattr(OnnxPasses, "forward", failing)
    found = untimed_lines(invoke("generate", *settings, "--batch", 3, code=1).stdout)
    assert [line["error"]["type"] for line in found if "error" in line] == ["prompt_too_long", "failed_pass"]
    assert [found[0], found[1], found[3]] == [alone[0], alone[1], alone[3]]


def test_a_policy_that_raises_ends_the_run_and_leaves_what_was_written(
    pair: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = "".join(json.dumps({"prompt": "the th", "max_tokens": 2 if row < 3 else 30}) + "\n" for row in range(4))
    (tmp_path / "in.jsonl").write_text(records)
    asked = 0

    def breaks(*_: Any) -> bool:
        nonlocal asked
        asked += 1
        if asked > 12:
            raise ValueError("a rule of its own")
        return True

    monkeypatch.setattr(Svip, "should_stop", breaks)
    output = tmp_path / "out.jsonl"
    settings = ("--engine", "onnx", "--policy", "svip", "--raw", "-q", "-i", tmp_path / "in.jsonl", "-o", output)
    with pytest.raises(ValueError, match="a rule of its own"):
        invoke("generate", *pair, *settings, "--batch", 2)
    assert len(output.read_text().splitlines()) == 3


@pytest.mark.parametrize("rows", ["0", "-1", "two", "1.5"])
def test_what_is_no_number_of_texts(rows: str) -> None:
    with pytest.raises(UsageError, match=f"--batch needs a number or auto, not {rows}"):
        invoke("generate", "-i", "in.jsonl", "--batch", rows)
