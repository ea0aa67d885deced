"""The public prompt sets: where each is found, and how its rows become prompts."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from specctl.nesting import json_fault

Row = Mapping[str, Any]

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
MT_BENCH_GROUP = "mt_bench"
TASK = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


class FormatError(ValueError):
    """A row that is not in the format of its data set."""


class Question(NamedTuple):
    """A row of a data set as a prompt.

    Attributes:
        data: an input record of ``generate`` with ``prompt`` or ``turns``.
        category: None where the data set has no categories.
        id: None where the data set has no ids.
    """

    data: dict[str, Any]
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
    """A named suite.

    Attributes:
        source: a data set on the hub, or the URL of a file of JSON lines.
        question: turns a row into a prompt; raises FormatError for a row of another format.
    """

    source: Source | str
    question: Callable[[Row], Question]


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
    """The prompt of SpecDec++, which is MetaMath's."""
    question = _text(row, "question")
    return Question({"prompt": f"{TASK}\n\n### Instruction:\n{question}\n\n### Response: Let's think step by step."})


def _humaneval(row: Row) -> Question:
    """The prompt of SpecDec++, which is WizardCoder's; white space of the code is kept."""
    identity, _ = _text(row, "task_id"), _text(row, "prompt")
    instruction = f"Create a Python script for this problem:\n{row['prompt']}"
    return Question({"prompt": f"{TASK}\n\n\n### Instruction:\n{instruction}\n\n### Response:"}, id=identity)


def _alpaca(row: Row) -> Question:
    """The prompt of SpecDec++."""
    given = str(row.get("input") or "")
    return Question({"prompt": _text(row, "instruction") + (f"\nInput: {given.strip()}" if given.strip() else "")})


def _dolly(row: Row) -> Question:
    context = str(row.get("context") or "").strip()
    prompt = _text(row, "instruction") + (f"\n\n{context}" if context else "")
    return Question({"prompt": prompt}, _text(row, "category"))


def _cnn_dm(row: Row) -> Question:
    """The prompt of Spec-Bench's summaries."""
    return Question({"prompt": f"Summarize: {_text(row, 'article')}"}, id=_text(row, "id"))


def _wmt19(row: Row) -> Question:
    """The prompt of Spec-Bench's translations."""
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
