import csv
import gzip
import io
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specctl.errors import UsageError
from specctl.prompts.suites import MT_BENCH, SUITES, load_records, load_suite, suite_names

OTHER_GROUPS = ("translation", "summarization", "qa", "math_reasoning", "rag")


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def spec_bench(tmp_path: Path) -> Path:
    """Four questions of each of the thirteen categories, with the mixed types of the real file's references."""
    rows: list[dict[str, Any]] = []
    for category in (*MT_BENCH, *OTHER_GROUPS):
        for _ in range(4):
            number = 81 + len(rows)
            turns = [f"first {number}", f"second {number}"] if category in MT_BENCH else [f"only {number}"]
            row = {"question_id": number, "category": category, "turns": turns}
            rows.append({**row, "reference": [["a"], ["b"]] if category == "rag" else ["a"]})
    return jsonl(tmp_path / "question.jsonl", rows)


def test_spec_bench_makes_one_group_of_mt_bench(spec_bench: Path) -> None:
    suite = load_suite("spec-bench", data=spec_bench)
    assert suite.categories() == ["mt_bench", *OTHER_GROUPS]
    assert Counter(prompt.category for prompt in suite.prompts) == {"mt_bench": 32, **dict.fromkeys(OTHER_GROUPS, 4)}
    assert suite.prompts[0].id == "81"
    assert suite.prompts[0].data == {"turns": ["first 81", "second 81"]}


def test_mt_bench_keeps_its_eight_categories(spec_bench: Path) -> None:
    suite = load_suite("mt-bench", data=spec_bench, categories=MT_BENCH)
    assert suite.categories() == list(MT_BENCH)
    assert suite.prompts[4].data == {"turns": ["first 85", "second 85"]}


def test_gsm8k_and_humaneval_ask_in_the_words_of_specdec(tmp_path: Path) -> None:
    sums = jsonl(tmp_path / "test.jsonl", [{"question": "What is 2 + 2?", "answer": "4\n#### 4"}])
    (asked,) = load_suite("gsm8k", data=sums).prompts
    opening = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    )
    assert asked.data["prompt"] == (
        f"{opening}\n\n### Instruction:\nWhat is 2 + 2?\n\n### Response: Let's think step by step."
    )
    assert (asked.id, asked.category) == ("gsm8k/1", "gsm8k")

    code = 'def f(x: int) -> int:\n    """Add one."""\n'
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"task_id": "HumanEval/0", "prompt": code}).encode()))
    (asked,) = load_suite("humaneval", data=packed).prompts
    assert asked.id == "HumanEval/0"
    assert asked.data["prompt"].startswith(f"{opening}\n\n\n### Instruction:\nCreate a Python script for this problem:")
    assert asked.data["prompt"].endswith(f"\n{code}\n\n### Response:")


def test_alpaca_reads_its_list_and_adds_the_input_where_there_is_one(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Name a colour.", "input": "", "output": "Red"},
        {"instruction": "Correct this.", "input": "He go.", "output": "He goes."},
    ]
    path = tmp_path / "alpaca_data.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    prompts = [prompt.data["prompt"] for prompt in load_suite("alpaca", data=path).prompts]
    assert prompts == ["Name a colour.", "Correct this.\nInput: He go."]


def test_cnn_dm_reads_csv(tmp_path: Path) -> None:
    path = tmp_path / "test.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["id", "article", "highlights"], ["ab12", 'A "long"\nstory, told.', "Short."]])
    (asked,) = load_suite("cnn-dm", data=path).prompts
    assert (asked.id, asked.data) == ("ab12", {"prompt": 'Summarize: A "long"\nstory, told.'})


def test_dolly_keeps_its_categories_and_wmt19_asks_for_english(tmp_path: Path) -> None:
    dolly = [
        {"instruction": "Who wrote it?", "context": "Ann wrote it.", "response": "Ann", "category": "closed_qa"},
        {"instruction": "Write a poem.", "context": "", "response": "...", "category": "creative_writing"},
    ]
    suite = load_suite("dolly", data=jsonl(tmp_path / "dolly.jsonl", dolly))
    assert suite.categories() == ["closed_qa", "creative_writing"]
    assert [prompt.data["prompt"] for prompt in suite.prompts] == ["Who wrote it?\n\nAnn wrote it.", "Write a poem."]

    pairs = [{"translation": {"de": "Schönen Tag!", "en": "Good day!"}}]
    (asked,) = load_suite("wmt19-de-en", data=jsonl(tmp_path / "wmt.jsonl", pairs)).prompts
    assert asked.data == {"prompt": "Translate German to English: Schönen Tag!"}


@pytest.mark.parametrize("name", SUITES)
def test_a_row_of_another_format_is_named_by_its_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('\n{"something": "else"}\n', encoding="utf-8")
    with pytest.raises(UsageError, match=rf"other\.jsonl:2 is not in the format of the suite '{name}'"):
        load_suite(name, data=path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("a.jsonl", b'{"question": "1?"}\nnot json\n', r"a\.jsonl:2: it is not JSON"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: it is not an object"),
        ("a.jsonl", b"", r"there are no prompts"),
        ("a.jsonl", b'{"question": "\xff"}\n', r"cannot read .*a\.jsonl: .*utf-8"),
        ("a.json", b'{"question": "1?"}', r"cannot read .*a\.json: it is not a list"),
        ("a.jsonl.gz", b"not zipped", r"cannot read .*a\.jsonl\.gz"),
        (None, b"", r"cannot read .*: No such file"),
    ],
)
def test_a_local_copy_that_cannot_be_read(file: str | None, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / (file or "missing.jsonl")
    if file:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_suite("gsm8k", data=path)


def test_categories_samples_and_limit(spec_bench: Path) -> None:
    def ids(**selection: Any) -> list[str]:
        return [prompt.id for prompt in load_suite("spec-bench", data=spec_bench, **selection).prompts]

    assert ids(categories=["qa"]) == ["121", "122", "123", "124"]
    assert ids(limit=3) == ["81", "82", "83"]
    two = ids(samples_per_category=2, seed=7)
    assert len(two) == 12
    assert two == ids(samples_per_category=2, seed=7) == sorted(two, key=int)
    assert set(two) < set(ids(samples_per_category=3, seed=7))
    assert set(ids(samples_per_category=2, seed=7, categories=["rag"])) < set(two)
    assert any(ids(samples_per_category=2, seed=seed) != two for seed in range(3))
    assert len(ids(samples_per_category=5)) == 5 + 5 * 4
    assert ids(samples_per_category=2, seed=7, limit=5) == two[:5]


def test_samples_are_the_same_on_every_machine() -> None:
    chosen = load_suite("embedded", samples_per_category=2, seed=0, categories=["maths", "story-opening"]).prompts
    assert [prompt.id for prompt in chosen] == ["story-opening-05", "story-opening-12", "maths-01", "maths-04"]


def test_the_fingerprint_is_of_the_prompts_that_run(spec_bench: Path) -> None:
    whole = load_suite("spec-bench", data=spec_bench)
    assert whole.sha256 == load_suite("spec-bench", data=spec_bench, limit=52).sha256
    assert whole.sha256 != load_suite("spec-bench", data=spec_bench, limit=51).sha256
    spec_bench.write_text(spec_bench.read_text(encoding="utf-8").replace("only 132", "other"), encoding="utf-8")
    assert whole.sha256 != load_suite("spec-bench", data=spec_bench).sha256


def test_unknown_names_come_with_the_nearest(spec_bench: Path) -> None:
    with pytest.raises(UsageError, match=r"no suite 'gsm8'; did you mean 'gsm8k'\? \(known: embedded, spec-bench"):
        load_suite("gsm8")
    with pytest.raises(UsageError, match=r"no category 'translations'; did you mean 'translation'\?"):
        load_suite("spec-bench", data=spec_bench, categories=["qa", "translations"])


def test_the_embedded_suite_fits_its_models() -> None:
    suite = load_suite("embedded")
    assert suite_names()[0] == suite.name == "embedded"
    kinds = ("story-opening", "story-dialogue", "maths", "story-middle")
    assert Counter(prompt.category for prompt in suite.prompts) == dict.fromkeys(kinds, 12)
    texts = [prompt.data["prompt"] for prompt in suite.prompts]
    assert len(set(texts)) == 48
    assert all(text == text.strip() and text.isascii() for text in texts)
    for prompt in suite.prompts:
        text = prompt.data["prompt"]
        assert (re.fullmatch(r"Question: [^\n]+\?\nAnswer:", text) is not None) == (prompt.category == "maths")
        if prompt.category == "story-dialogue":
            assert '"' in text
        if prompt.category == "story-middle":
            assert 80 <= len(text.split()) <= 120
    with pytest.raises(UsageError, match="takes no --data"):
        load_suite("embedded", data=Path("x.jsonl"))


def test_records_of_ones_own(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "sampling": {"temperature": 1.0}, "note": "left out"},
        {"task_id": "t/1", "category": "chat", "messages": [{"role": "user", "content": "b"}]},
        {"id": 7, "turns": ["c", "d"]},
    ]
    path = jsonl(tmp_path / "mine.jsonl", rows)
    suite = load_records(path)
    assert suite.name == str(path)
    assert [(prompt.id, prompt.category) for prompt in suite.prompts] == [("1", "all"), ("t/1", "chat"), ("7", "all")]
    assert suite.prompts[0].data == {"prompt": "a", "sampling": {"temperature": 1.0}}
    streamed = load_records(io.BytesIO(path.read_bytes()))
    assert (streamed.prompts, streamed.sha256) == (suite.prompts, suite.sha256)
    assert [prompt.id for prompt in load_records(path, categories=["all"], limit=1).prompts] == ["1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": 1}\n', "standard input:3: prompt must be a string"),
        (b'{"prompt": "a", "category": 4}\n', "standard input:1: category must be a string"),
        (b'{"prompt": "a", "id": 5}\n{"prompt": "b", "id": "5"}\n', "more than one prompt of - has the id 5"),
        (b"\n", "there are no prompts in -"),
    ],
)
def test_bad_records_end_a_benchmark_before_it_starts(content: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_records(io.BytesIO(content))


def test_a_file_of_records_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none\.jsonl: No such file"):
        load_records(tmp_path / "none.jsonl")


def hub(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]] | Exception) -> list[Any]:
    """Put a stand-in for `datasets` in place; returns the list of what it is asked for."""
    asked: list[Any] = []

    def load_dataset(path: str, name: str | None = None, **options: Any) -> list[dict[str, Any]]:
        asked.append((path, name, options))
        if isinstance(rows, Exception):
            raise rows
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_without_data_a_suite_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub(monkeypatch, [{"question": "1 + 1?", "answer": "2"}])
    assert load_suite("gsm8k").prompts[0].id == "gsm8k/1"
    assert asked == [("openai/gsm8k", "main", {"data_files": None, "split": "test", "streaming": True})]


def test_question_files_come_from_their_address(monkeypatch: pytest.MonkeyPatch, spec_bench: Path) -> None:
    moved = replace(SUITES["spec-bench"], source=spec_bench.as_uri())
    monkeypatch.setitem(SUITES, "spec-bench", moved)
    assert load_suite("spec-bench").sha256 == load_suite("spec-bench", data=spec_bench).sha256
    spec_bench.write_text("<html>", encoding="utf-8")
    with pytest.raises(UsageError, match=r"question\.jsonl:1: it is not JSON"):
        load_suite("spec-bench")
    spec_bench.unlink()
    with pytest.raises(UsageError, match="the suite 'spec-bench' cannot be fetched from file") as caught:
        load_suite("spec-bench")
    assert "--data FILE" in caught.value.hint


def test_parquet_files_are_read_by_the_same_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = hub(monkeypatch, [{"question": "1 + 1?", "answer": "2"}])
    path = tmp_path / "test-00000-of-00001.parquet"
    assert load_suite("gsm8k", data=path).prompts[0].category == "gsm8k"
    assert asked[0][0] == "parquet"
    assert asked[0][2]["data_files"] == str(path)


def test_offline_or_without_the_library_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, ConnectionError("no route\nto the hub"))
    with pytest.raises(UsageError, match="the suite 'dolly' cannot be read: no route") as caught:
        load_suite("dolly")
    assert "--data FILE" in caught.value.hint
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="the suite 'dolly' needs the package `datasets`") as caught:
        load_suite("dolly")
    assert 'pip install "datasets' in caught.value.hint
    assert "--data FILE" in caught.value.hint
