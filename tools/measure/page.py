"""The page of all measurements, from what the parts left."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specctl.observing.results import read_results
from specctl.reporting.table import UNKNOWN
from tools.measure.parts import CELLS, Part, Step, Tabled

ROOT = Path(__file__).parents[2]
INTRODUCTION = """# Measurements

Made by `python -m tools.measure`, which anyone can run again, in parts and resumed where it was interrupted; the
commands stand above their tables. Columns are defined in [words.md](words.md); intervals are 95% bootstrap intervals
over prompts. Candidates of one run take turns on every prompt, so compare within a run: a machine's speed changes from
one to the next. All ran on a CPU; what a GPU showed is in [gpu.md](gpu.md#measured).
"""


def page(provenance: Mapping[str, Any], parts: Sequence[Part], folder: Path, former: str = "") -> str:
    """docs/measurements.md.

    Args:
        provenance: what all was measured with.
        parts: those that are finished.
        folder: with a folder for each part.
        former: the page so far, of which sections stay that no part makes, such as studies.
    """
    sections = [_section(part, folder / part.name) for part in parts]
    made = {part.question for part in parts}
    kept = [f"## {text.rstrip()}\n" for text in former.split("\n## ")[1:] if text.partition("\n")[0] not in made]
    whole = f"All of one commit, but for tables that name another: {_facts(provenance)}.\n"
    return "\n".join([INTRODUCTION, whole, *sections, *kept])


def _facts(provenance: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in provenance.items())


def updated(text: str, provenance: Mapping[str, Any], parts: Iterable[Part], folder: Path) -> str:
    """The page with new sections for some of its parts, each of which says what it was measured with.

    Args:
        text: of the page.
        provenance, parts, folder: as in `page`.
    """
    for part in parts:
        section = _section(part, folder / part.name, f" Measured on its own: {_facts(provenance)}.")
        before, _, rest = text.partition(f"## {part.question}\n")
        _, following, later = rest.partition("\n## ")
        text = f"{before.rstrip()}\n\n{section}{following}{later}"
    return text


def output(step: Step, folder: Path) -> Path:
    """What a finished step printed."""
    return folder / f"{step.name}.out"


def results(step: Step, folder: Path) -> Path:
    """The runs of a step that is a benchmark."""
    return folder / f"{step.name}.jsonl"


def command(step: Step) -> str:
    """A step as a line for a shell, as a reader may type it."""
    words = [
        word.replace("{folder}/", "")
        .replace("{package}", "specctl")
        .replace("{peers}", "peers")
        .replace("../calibration/", "")
        for word in step.arguments
    ]
    return shlex.join(["specctl", *words] if step.module == "specctl" else ["python", "-m", step.module, *words])


def _section(part: Part, folder: Path, told: str = "") -> str:
    benches = [step for step in part.steps if step.is_bench]
    printed = [_printed(part, step, folder) for step in part.steps if not step.is_bench]
    commands = "\n".join(f"$ {command(step)}" for step in benches)
    table = [f"```console\n{commands}\n```\n", _table(part, benches, folder), ""] if benches else []
    return "\n".join([f"## {part.question}\n", f"{part.reading}{told}\n", *table, *printed])


def _table(part: Part, benches: Sequence[Step], folder: Path) -> str:
    if part.table is None:
        headings, rows, note = _of_summaries(part, benches, folder)
    else:
        headings, rows, note = part.table({step.name: read_results(results(step, folder)) for step in benches})
    return "\n".join([*_lines(headings, rows), *(["", note] if note else [])])


def _of_summaries(part: Part, benches: Sequence[Step], folder: Path) -> Tabled:
    """One row for each candidate, the part's columns for each benchmark; greedy texts that differ are told below."""
    documents = {step.name: json.loads(output(step, folder).read_text(encoding="utf-8")) for step in benches}
    found = {name: {one["candidate"]: one for one in document["overall"]} for name, document in documents.items()}
    labels = list(dict.fromkeys(label for summaries in found.values() for label in summaries))
    columns = [(name, column) for name in found for column in part.columns]
    headings = ["candidate", *(name if len(part.columns) == 1 else f"{name}: {column}" for name, column in columns)]
    rows = [
        [
            f"`{label}`",
            *(CELLS[column](found[name][label]) if label in found[name] else UNKNOWN for name, column in columns),
        ]
        for label in labels
    ]
    compared = {name: document["compared"] for name, document in documents.items() if document["compared"]}
    differing = sum(len(document["differences"]) for document in documents.values())
    told = f"Of {sum(compared.values())} greedy runs, {differing} differed from `none`." if compared else ""
    return headings, rows, told


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
