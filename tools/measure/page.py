"""The page of all measurements, from what the parts left."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specctl.reporting.table import UNKNOWN
from tools.measure.parts import CELLS, Part, Step

ROOT = Path(__file__).parents[2]
INTRODUCTION = """# Measurements

Made by `python -m tools.measure`, which anyone can run again, in parts and resumed where it was interrupted; the
commands stand above their tables. Columns are defined in [words.md](words.md); intervals are 95% bootstrap intervals
over prompts. Candidates of one run take turns on every prompt, so compare within a run: a machine's speed changes from
one to the next. Nothing was measured on a GPU yet ([gpu.md](gpu.md) says how).
"""


def page(provenance: Mapping[str, Any], parts: Iterable[Part], folder: Path) -> str:
    """docs/measurements.md.

    Args:
        provenance: what all was measured with.
        parts: those that are finished.
        folder: with a folder for each part.
    """
    facts = ", ".join(f"{name} {value}" for name, value in provenance.items())
    return "\n".join(
        [INTRODUCTION, f"All of one commit: {facts}.\n", *(_section(part, folder / part.name) for part in parts)]
    )


def output(step: Step, folder: Path) -> Path:
    """What a finished step printed."""
    return folder / f"{step.name}.out"


def command(step: Step) -> str:
    """A step as a line for a shell, as a reader may type it."""
    words = [
        word.replace("{folder}/", "").replace("{package}", "specctl").replace("../calibration/", "")
        for word in step.arguments
    ]
    return shlex.join(["specctl", *words] if step.module == "specctl" else ["python", "-m", step.module, *words])


def _section(part: Part, folder: Path) -> str:
    benches = [step for step in part.steps if step.is_bench]
    printed = [_printed(part, step, folder) for step in part.steps if not step.is_bench]
    commands = "\n".join(f"$ {command(step)}" for step in benches)
    table = [f"```console\n{commands}\n```\n", _table(part, benches, folder), ""] if benches else []
    return "\n".join([f"## {part.question}\n", f"{part.reading}\n", *table, *printed])


def _table(part: Part, benches: Sequence[Step], folder: Path) -> str:
    """One row for each candidate, the part's columns for each benchmark; greedy texts that differ are told below."""
    documents = {step.name: json.loads(output(step, folder).read_text(encoding="utf-8")) for step in benches}
    found = {name: {one["candidate"]: one for one in document["overall"]} for name, document in documents.items()}
    labels = list(dict.fromkeys(label for summaries in found.values() for label in summaries))
    columns = [(name, column) for name in found for column in part.columns]
    headings = tuple(name if len(part.columns) == 1 else f"{name}: {column}" for name, column in columns)
    rows = tuple(
        (
            f"`{label}`",
            *(CELLS[column](found[name][label]) if label in found[name] else UNKNOWN for name, column in columns),
        )
        for label in labels
    )
    table = "\n".join(_lines(("candidate", *headings), rows))
    compared = {name: document["compared"] for name, document in documents.items() if document["compared"]}
    differing = sum(len(document["differences"]) for document in documents.values())
    told = f"\n\nOf {sum(compared.values())} greedy runs, {differing} differed from `none`." if compared else ""
    return f"{table}{told}"


def _lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(headings)} |"
    yield f"| --- |{' ---: |' * (len(headings) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _printed(part: Part, step: Step, folder: Path) -> str:
    """What a step printed, the kept tables of it."""
    text = output(step, folder).read_text(encoding="utf-8").replace(f"{folder}/", "").replace("../calibration/", "")
    blocks = text.replace(f"{ROOT}/", "").strip().split("\n\n")
    kept = [block for block in blocks if not part.kept or block.split("\n", 1)[0] in part.kept]
    return (
        f"```console\n$ {command(step)}\n{chr(10).join([*kept[:1], *(chr(10) + block for block in kept[1:])])}\n```\n"
    )
