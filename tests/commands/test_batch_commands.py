"""``--batch`` of commands that answer prompts: what they find is what they find one prompt at a time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from specctl.errors import UsageError
from specctl.models.loading.assembly import load_pair
from specctl.models.running.grammars import grammar, trials
from specctl.models.running.pair import Pair
from specctl.observing.prompt_answers import AnsweredPrompt
from specctl.observing.results import read_results
from specctl.prompts.suites import Suite, SuitePrompt
from specctl.replay.recording import collecting
from specctl.replay.recording.collecting import collect_traces
from specctl.replay.trace_files import TracedPrompt
from tests.support.invoked import invoke
from tests.support.onnx_models import needs_onnx, small_pair

pytestmark = needs_onnx
TEXTS = ("the th", "a", "and then it was", "he said", "of the")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pair")
    small_pair(made)
    records: list[dict[str, Any]] = [{"id": f"p{number}", "prompt": text} for number, text in enumerate(TEXTS)]
    records.insert(2, {"id": "long", "prompt": "word " * 4000})
    (made / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return made


def models(folder: Path) -> tuple[str, ...]:
    return "--target", str(folder / "target"), "--draft", str(folder / "draft"), "--engine", "onnx", "--raw"


def test_a_benchmark_in_rows_says_how_many_and_writes_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    found = {}
    for rows in (1, 2):
        output = tmp_path / f"{rows}.jsonl"
        asked = ("--policy", "constant", "-n", 6, "-q", "-i", folder / "in.jsonl", "-o", output, "--batch", rows)
        ran = invoke("bench", *models(folder), *asked)
        assert ("2 prompts at once" in " ".join(ran.stdout.split())) == (rows == 2)
        found[rows] = read_results(output)
    assert (found[1].header.batch, found[2].header.batch) == (1, 2)
    assert found[1].skipped.keys() == found[2].skipped.keys() == {"long"}
    one, two = ({run.key: [turn.tokens for turn in run.turns] for run in each.runs} for each in found.values())
    assert one == two
    assert len(one) == 2 * len(TEXTS)
    turns = [turn for run in found[2].runs for turn in run.turns]
    assert all(turn.end_ms >= turn.total_ms for turn in turns)
    assert sum(turn.end_ms for turn in turns) > 1.2 * sum(turn.total_ms for turn in turns), "two wait for each other"
    compared = json.loads(invoke("bench", "--compare", tmp_path / "1.jsonl", tmp_path / "2.jsonl", "--json").stdout)
    assert "batch" in json.dumps(compared)
    again = invoke("bench", *models(folder), *asked, "--resume")
    assert len(read_results(tmp_path / "2.jsonl").runs) == len(one), again.stderr


def test_traces_of_prompts_that_were_answered_at_once_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = collecting._traced

    def read_in_a_quarter_of_a_second(pair: Pair, answered: AnsweredPrompt, depth: int) -> TracedPrompt:
        completions = tuple(replace(one, prefill_seconds=0.25) for one in answered.completions)
        return traced(pair, replace(answered, completions=completions), depth)

    monkeypatch.setattr(collecting, "_traced", read_in_a_quarter_of_a_second)
    profile = small_pair(folder, "sampling.max_new_tokens=6", "prompt.chat=false", "draft.policy.name=constant")
    pair = load_pair(profile)
    suite = Suite("texts", tuple(SuitePrompt(text, "", {"prompt": text}) for text in TEXTS), "")
    one, two = (collect_traces(pair, profile, suite, 4, batch=batch) for batch in (1, 2))
    assert [trace.tokens for trace in one.traces] == [trace.tokens for trace in two.traces]
    assert [trace.prefill_ms for trace in one.traces] == [250.0] * len(TEXTS)


@pytest.mark.slow
def test_a_heads_examples_are_the_same(folder: Path, tmp_path: Path) -> None:
    """Drawn answers are those of the same seed, as long as the clock decides nothing about drafts."""
    for rows in (1, "auto", 3):
        asked = ("-n", 6, "-q", "-i", folder / "in.jsonl", "-o", tmp_path / str(rows), "--examples-only")
        asked += ("--set", "draft.policy.name=constant")
        ran = invoke("train-head", *models(folder)[:-1], "--raw", *asked, "--batch", rows)
        assert "one at a time" not in ran.stderr
    one, *others = (sorted((tmp_path / str(rows)).rglob("*.safetensors")) for rows in (1, "auto", 3))
    for paths in others:
        assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in one]
    assert one


@pytest.mark.parametrize("command", [("calibrate",), ("train-head", "-o", "head", "-i", "in.jsonl")])
def test_replicas_and_rows_exclude_each_other(command: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="--batch works only in one process"):
        invoke(*command, "--workers", 2, "--batch", 2)
    with pytest.raises(UsageError, match="--batch needs a number or auto, not 0"):
        invoke(*command, "--workers", 2, "--batch", 0)


def test_records_with_grammars_are_written_in_rows_as_alone(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    rules: list[dict[str, Any]] = [{"regex": "[ab]{3,5}!"}, {"schema": {"enum": ["red", 7]}}, {}, {"regex": "(["}]
    records = [{"prompt": text, **rule} for text, rule in zip(TEXTS, rules, strict=False)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    asked = ("--policy", "constant", "-i", tmp_path / "in.jsonl", "-n", 12, "-t", 1, "-q")
    alone, rows = (
        [
            json.loads(line)
            for line in invoke("generate", *models(folder), *asked, "--batch", count, code=1).stdout.splitlines()
        ]
        for count in (1, 3)
    )
    assert [one.get("completion") for one in alone] == [one.get("completion") for one in rows]
    assert json.loads(alone[1]["completion"]) in ("red", 7)
    assert rows[3]["error"]["type"] == "invalid_grammar"


def test_records_whose_grammars_take_too_much_or_do_not_hold_are_errors_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(trials, "PROGRAM", "tests.support.waiting_grammars")
    monkeypatch.setattr(grammar, "_MADE", WeakKeyDictionary())
    only_k = {"type": "object", "patternProperties": {"^k$": {"enum": [1]}}, "additionalProperties": False}
    rules: list[dict[str, Any]] = [
        {"regex": "slow"},
        {"schema": {"enum": ["red", 7]}},
        {"regex": "large"},
        {"schema": {**only_k, "minProperties": 2, "maxProperties": 2}},
        {"schema": False},
    ]
    records = [{"prompt": text, **rule} for text, rule in zip(TEXTS, rules, strict=False)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    asked = ("--policy", "constant", "-i", tmp_path / "in.jsonl", "-n", 200, "-t", 1, "-q")
    for count in (1, 3):
        told = invoke("generate", *models(folder), *asked, "--batch", count, code=1).stdout.splitlines()
        found = [json.loads(line) for line in told]
        kinds = [one.get("error", {}).get("type") for one in found]
        assert kinds == ["invalid_grammar", None, "invalid_grammar", "unfit_text", "invalid_grammar"]
        assert json.loads(found[1]["completion"]) in ("red", 7)
