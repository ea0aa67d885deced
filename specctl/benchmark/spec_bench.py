"""Results in the answer format of Spec-Bench (Xia et al. 2024), for its speed and equality scripts."""

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from specctl.observing.results import Run, RunSet
from specctl.outputs import naming, write_whole
from specctl.prompts.suites import MT_BENCH, MT_BENCH_GROUP
from specctl.records import CompletionSummary

ANSWER_FILES = ("*.jsonl",)  # Patterns of the files that `write_answers` writes
MT_BENCH_FIRST_ID = 81
MT_BENCH_QUESTIONS = 10  # MT-Bench numbers its questions from 81, ten to a category


def write_answers(results: RunSet, folder: Path) -> list[Path]:
    """Write one file for each candidate, and for each length if there are several.

    All files contain the prompts that every candidate has finished, in the same order, because Spec-Bench's scripts
    pair lines by their position. Repeats become choices; the scripts read the first. The accept_lengths of a peer are
    empty, because its rounds are not visible.

    Raises:
        OutputError: a file cannot be written.
    """
    written = []
    lengths = list(dict.fromkeys(run.length for run in results.runs))
    created = datetime.fromisoformat(results.header.created).timestamp()
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for length in lengths:
        field: dict[str, dict[str, list[Run]]] = {}
        for run in sorted((run for run in results.runs if run.length == length), key=lambda run: run.repeat):
            field.setdefault(run.candidate, {}).setdefault(run.prompt, []).append(run)
        first, *others = field.values()
        prompts = [prompt for prompt in first if all(prompt in other for other in others)]
        for label, answers in field.items():
            name = re.sub(r"[^\w.,=+-]+", "-", label)
            path = folder / f"{name}{f'-{length}' if len(lengths) > 1 else ''}.jsonl"
            lines = [json.dumps(_answer(label, answers[prompt], created)) + "\n" for prompt in prompts]
            write_whole(path, "".join(lines))
            written.append(path)
    return written


def _answer(label: str, repeats: Sequence[Run], created: float) -> dict[str, Any]:
    run = repeats[0]
    return {
        "question_id": int(run.prompt) if run.prompt.isdecimal() else run.prompt,
        "category": _category(run),
        "answer_id": uuid5(NAMESPACE_URL, f"{created}/{label}/{run.length}/{run.prompt}").hex,
        "model_id": label,
        "choices": [_choice(index, repeat.turns) for index, repeat in enumerate(repeats)],
        "tstamp": created,
    }


def _category(run: Run) -> str:
    """The category in the question file, which separates MT-Bench's eight categories."""
    if run.category != MT_BENCH_GROUP or not run.prompt.isdecimal():
        return run.category
    group = (int(run.prompt) - MT_BENCH_FIRST_ID) // MT_BENCH_QUESTIONS
    return MT_BENCH[group] if 0 <= group < len(MT_BENCH) else run.category


def _choice(index: int, turns: Sequence[CompletionSummary]) -> dict[str, Any]:
    """One repeat. `decoding_steps`, `new_tokens` and `wall_time` (seconds with the prompt) are lists over the turns."""
    return {
        "index": index,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [turn.target_forwards for turn in turns],
        "new_tokens": [len(turn.tokens) for turn in turns],
        "wall_time": [turn.total_ms / 1e3 for turn in turns],
        "accept_lengths": [length for turn in turns for length in _accept_lengths(turn)],
    }


def _accept_lengths(turn: CompletionSummary) -> list[int]:
    """Tokens emitted in each round; the last round may be cut short by an end of sequence or a stop string."""
    left, lengths = len(turn.tokens), []
    for round_ in turn.rounds:
        lengths.append(min(round_.accepted + 1, left))
        left -= lengths[-1]
    return lengths
