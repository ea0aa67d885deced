"""Prompt suites: public ones by name, the embedded one, and the user's own files."""

import csv
import gzip
import hashlib
import importlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from importlib.resources import as_file, files
from pathlib import Path
from typing import IO, Any, NamedTuple, TypedDict, Unpack
from urllib.request import urlopen

from specctl.errors import UsageError, json_fault, pip_install
from specctl.jsonl import Record, deciding, read_records
from specctl.profile.wording import did_you_mean

Row = Mapping[str, Any]

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
MT_BENCH_GROUP = "mt_bench"
TASK = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


class FormatError(ValueError):
    """A row does not have the format of its data set."""


class Question(NamedTuple):
    """A row of a data set as a prompt."""

    data: dict[str, Any]  # an input record of ``generate`` with ``prompt`` or ``turns``
    # category, id: None where the data set has none
    category: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Arguments of ``datasets.load_dataset``."""

    path: str
    name: str | None = None
    split: str = "train"
    data_files: str | None = None


@dataclass(frozen=True, slots=True)
class SuiteFormat:
    """A named suite."""

    source: Source | str  # a data set on the hub, or the URL of a file of JSON lines
    question: Callable[[Row], Question]  # makes a prompt from a row; raises FormatError for a row of another format


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise FormatError(f"'{key}' must be a string that is not empty")
    return value.strip()


def _spec_bench(row: Row) -> Question:
    question = _mt_bench(row)
    return question._replace(category=MT_BENCH_GROUP) if question.category in MT_BENCH else question


def _mt_bench(row: Row) -> Question:
    turns = row.get("turns")
    if not (turns and isinstance(turns, list) and all(isinstance(turn, str) for turn in turns)):
        raise FormatError("'turns' must be a list of strings")
    if row.get("question_id") is None:
        raise FormatError("'question_id' is missing")
    return Question({"turns": turns}, _text(row, "category"), str(row["question_id"]))


def _gsm8k(row: Row) -> Question:
    """SpecDec++'s prompt for GSM8K, from MetaMath."""
    question = _text(row, "question")
    return Question({"prompt": f"{TASK}\n\n### Instruction:\n{question}\n\n### Response: Let's think step by step."})


def _humaneval(row: Row) -> Question:
    """SpecDec++'s prompt for HumanEval, from WizardCoder. White space of the code is preserved."""
    identity, _ = _text(row, "task_id"), _text(row, "prompt")
    instruction = f"Create a Python script for this problem:\n{row['prompt']}"
    return Question({"prompt": f"{TASK}\n\n\n### Instruction:\n{instruction}\n\n### Response:"}, id=identity)


def _alpaca(row: Row) -> Question:
    """SpecDec++'s prompt for Alpaca."""
    given = str(row.get("input") or "")
    return Question({"prompt": _text(row, "instruction") + (f"\nInput: {given.strip()}" if given.strip() else "")})


def _dolly(row: Row) -> Question:
    context = str(row.get("context") or "").strip()
    prompt = _text(row, "instruction") + (f"\n\n{context}" if context else "")
    return Question({"prompt": prompt}, _text(row, "category"))


def _cnn_dm(row: Row) -> Question:
    """Spec-Bench's prompt for summaries."""
    return Question({"prompt": f"Summarize: {_text(row, 'article')}"}, id=_text(row, "id"))


def _wmt19(row: Row) -> Question:
    """Spec-Bench's prompt for translations."""
    pair = row.get("translation")
    if not isinstance(pair, Mapping):
        raise FormatError("'translation' must be an object with 'de' and 'en'")
    return Question({"prompt": f"Translate German to English: {_text(pair, 'de')}"})


SUITES = {
    "spec-bench": SuiteFormat(
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        _spec_bench,
    ),
    "mt-bench": SuiteFormat(
        "https://raw.githubusercontent.com/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
        _mt_bench,
    ),
    "gsm8k": SuiteFormat(Source("openai/gsm8k", "main", "test"), _gsm8k),
    "humaneval": SuiteFormat(Source("openai/openai_humaneval", split="test"), _humaneval),
    "alpaca": SuiteFormat(Source("tatsu-lab/alpaca"), _alpaca),
    "cnn-dm": SuiteFormat(Source("abisee/cnn_dailymail", "3.0.0", "test"), _cnn_dm),
    "dolly": SuiteFormat(Source("databricks/databricks-dolly-15k"), _dolly),
    "wmt19-de-en": SuiteFormat(Source("wmt/wmt19", "de-en", "validation"), _wmt19),
}


def parsed(line: str) -> Row:
    """A line of JSON as a row; raises FormatError if the line is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"it is not JSON ({json_fault(error)})") from error
    if not isinstance(row, dict):
        raise FormatError("it is not an object")
    return row


EMBEDDED = "embedded"
NO_CATEGORY = "all"


@dataclass(frozen=True, slots=True)
class SuitePrompt:
    """One prompt of a suite."""

    id: str  # unique in its suite
    category: str  # results are grouped by it
    # an input record of ``generate`` with ``prompt``, ``messages`` or ``turns``, and its own settings
    data: dict[str, Any]

    def record(self, line: int) -> Record:
        """The prompt as input line number ``line``."""
        return Record(line, self.id, self.data)


@dataclass(frozen=True, slots=True)
class Suite:
    """The prompts to run, in the order of their source."""

    name: str
    prompts: tuple[SuitePrompt, ...]
    sha256: str  # hash of the prompts' ids, categories and texts; equal for equal suites

    def categories(self) -> list[str]:
        """The categories, in order of first appearance."""
        return list(dict.fromkeys(prompt.category for prompt in self.prompts))


class Selection(TypedDict, total=False):
    """Which prompts of a source to take; all of them by default."""

    categories: Sequence[str]  # take only these categories
    # number of prompts to draw from each category; a smaller category is taken whole. With the same seed, a larger
    # sample contains every smaller one. Categories are drawn independently.
    samples_per_category: int | None
    seed: int  # of the samples; 0 by default
    limit: int | None  # take only this number of prompts, after the other selections


def suite_names() -> list[str]:
    return [EMBEDDED, *SUITES]


def load_suite(name: str, *, data: Path | None = None, **selection: Unpack[Selection]) -> Suite:
    """Load a named suite.

    Args:
        name: one of `suite_names`.
        data: a local copy in the data set's own format, read instead of the public source.
        selection: see `Selection`.

    Raises:
        UsageError: the suite or a category is unknown, or the prompts cannot be read.
    """
    if name == EMBEDDED:
        if data is not None:
            raise UsageError(f"the suite '{EMBEDDED}' takes no --data", "give prompts of your own with -i FILE")
        with as_file(files("specctl.prompts") / "embedded_suite.jsonl") as path:
            return _suite(name, load_records(path).prompts, selection)
    if name not in SUITES:
        raise UsageError(f"there is no suite '{name}'{did_you_mean(name, suite_names())}")
    return _suite(name, _questions(name, data), selection)


def load_records(source: Path | IO[bytes], **selection: Unpack[Selection]) -> Suite:
    """Load a file or stream in the input format of ``generate``; records without a category get the category ``all``.

    Raises:
        UsageError: the source cannot be read, a record is bad (the message names its line), or a category is unknown.
    """
    if not isinstance(source, Path):
        return _suite("-", _records(source, "standard input"), selection)
    try:
        with source.open("rb") as stream:
            return _suite(str(source), _records(stream, str(source)), selection)
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from error


def sample(suite: Suite, count: int, seed: int = 0) -> Suite:
    """Sample ``count`` prompts as evenly over the categories as possible; see `Selection`."""
    categories = suite.categories()
    each, more = divmod(min(count, len(suite.prompts)), len(categories))
    prompts = list(suite.prompts)
    while True:
        chosen = _selected(prompts, samples_per_category=each + bool(more), seed=seed)
        if len(chosen) >= min(count, len(prompts)) or each >= len(prompts):
            break
        each += 1  # some category is smaller than its share
    taken = dict.fromkeys(categories, 0)
    # One prompt of each category in turn, so that the cut does not remove only those of the last category.
    order = sorted(chosen, key=lambda prompt: _turn(taken, prompt.category))
    kept = {prompt.id for prompt in order[:count]}
    return _whole(suite.name, [prompt for prompt in chosen if prompt.id in kept])


def _turn(taken: dict[str, int], category: str) -> int:
    taken[category] += 1
    return taken[category]


def _records(stream: IO[bytes], place: str) -> Iterator[SuitePrompt]:
    for record in read_records(stream):
        if record.error is not None:
            raise UsageError(f"{place}:{record.line}: {record.error}")
        category = record.data.get("category", NO_CATEGORY)
        if not isinstance(category, str):
            raise UsageError(f"{place}:{record.line}: category must be a string")
        yield SuitePrompt(str(record.id), category, deciding(record.data))


def _questions(name: str, path: Path | None) -> Iterator[SuitePrompt]:
    suite = SUITES[name]
    for number, row in local_rows(path) if path else fetched_rows(name, suite.source):
        try:
            question = suite.question(row)
        except FormatError as error:
            place = f"{path}:{number}" if path else f"row {number} of its source"
            raise UsageError(f"{place} is not in the format of the suite '{name}': {error}") from error
        identity = question.id or f"{name}/{number}"
        yield SuitePrompt(identity, question.category or name, question.data)


def _suite(name: str, source: Iterable[SuitePrompt], selection: Selection) -> Suite:
    prompts = list(source)
    if not prompts:
        raise UsageError(f"there are no prompts in {name}")
    if twice := [identity for identity, count in Counter(prompt.id for prompt in prompts).items() if count > 1]:
        raise UsageError(f"more than one prompt of {name} has the id {twice[0]}", "make the ids unique")
    return _whole(name, _selected(prompts, **selection))


def _whole(name: str, prompts: Sequence[SuitePrompt]) -> Suite:
    facts = [[prompt.id, prompt.category, prompt.data] for prompt in prompts]
    return Suite(name, tuple(prompts), hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest())


def _selected(
    prompts: list[SuitePrompt],
    categories: Sequence[str] = (),
    samples_per_category: int | None = None,
    seed: int = 0,
    limit: int | None = None,
) -> list[SuitePrompt]:
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    for category in categories:
        if category not in known:
            raise UsageError(f"there is no category '{category}'{did_you_mean(category, known)}")
    taken: set[str] = set()
    for category in categories or known:
        ids = [prompt.id for prompt in prompts if prompt.category == category]
        # Shuffle all, then cut: a larger sample then contains every smaller one.
        order = random.Random(f"{seed}/{category}").sample(ids, len(ids))
        taken.update(order[:samples_per_category])
    return [prompt for prompt in prompts if prompt.id in taken][:limit]


OFFLINE_HINT = "without a network, read a local copy with --data FILE"
TIMEOUT = 30.0  # Seconds to wait for the server


def local_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Rows of a ``.jsonl``, ``.json`` (one list), ``.csv`` or ``.parquet`` file, each with its number from 1.

    Text files may be gzipped (``.gz``); a file with an unknown suffix is read as JSON lines.

    Raises:
        UsageError: the file cannot be read, or its contents do not match its suffix.
    """
    kind = (path.with_suffix("") if path.suffix == ".gz" else path).suffix
    if kind == ".parquet":
        yield from enumerate(_fetched(Source("parquet", data_files=str(path)), str(path)), start=1)
        return
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            if kind == ".csv":
                yield from enumerate(csv.DictReader(file), start=1)
            elif kind == ".json":
                yield from enumerate(_json_list(file), start=1)
            else:
                yield from _json_lines(file, path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, ValueError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def fetched_rows(suite: str, source: Source | str) -> Iterator[tuple[int, Row]]:
    """Rows of a suite's public data set, each with its number from 1.

    Raises:
        UsageError: the data set cannot be reached or read, or is on the hub and `datasets` is not installed.
    """
    if isinstance(source, Source):
        yield from enumerate(_fetched(source, f"the suite '{suite}'"), start=1)
        return
    try:
        with urlopen(source, timeout=TIMEOUT) as response:
            yield from _json_lines(map(bytes.decode, response), source)
    except (OSError, HTTPException, UnicodeDecodeError) as error:
        raise UsageError(f"the suite '{suite}' cannot be fetched from {source}: {error}", OFFLINE_HINT) from error


def _json_lines(file: Iterable[str], place: Path | str) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            yield number, parsed(line)
        except FormatError as error:
            raise UsageError(f"{place}:{number}: {error}") from error


def _json_list(file: IO[Any]) -> list[Row]:
    rows = json.load(file)
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise FormatError("it is not a list of objects")
    return rows


def _fetched(source: Source, what: str) -> Iterator[Mapping[str, Any]]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        hint = f"{pip_install('datasets')}, or read a copy in JSON lines with --data FILE"
        raise UsageError(f"{what} needs the package `datasets`, which is not installed", hint) from error
    try:
        # Streaming, because a download always includes every split: WMT19's training text is gigabytes.
        yield from datasets.load_dataset(
            source.path, source.name, data_files=source.data_files, split=source.split, streaming=True
        )
    except Exception as error:  # the network, the hub and the file readers raise exceptions of many types
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(f"{what} cannot be read: {reason}", OFFLINE_HINT) from error
