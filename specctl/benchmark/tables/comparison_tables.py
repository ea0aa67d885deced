"""The comparison of two results files as tables and as one JSON document."""

import json
from typing import Any

from specctl.benchmark.comparison import Compared, Comparison
from specctl.printable import counted
from specctl.reporting.plain import plain
from specctl.reporting.table import DEFINITIONS, DOWN, UNKNOWN, UP, Columns, Table, show_interval

SHOWN_PROMPTS = 20
NOISE = (
    "Intervals cover the choice of prompts only, not a machine that was busier or slower at one time than at another: "
    "measure A twice to see how much equal runs differ."
)


def comparison_tables(comparison: Comparison) -> list[Table]:
    """All tables, in reading order."""
    return [
        _files(comparison),
        *([_unlike(comparison)] if comparison.differences else []),
        _speeds(comparison),
        *([_candidates_left_out(comparison)] if comparison.candidates_left_out else []),
        *([_prompts_left_out(comparison)] if comparison.prompts_left_out else []),
    ]


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Every number of the tables, rounded to six decimals."""
    document: dict[str, Any] = plain(comparison, digits=6)
    verdicts = [{"verdict": compared.verdict} for compared in comparison.candidates]
    document["candidates"] = [one | said for one, said in zip(document["candidates"], verdicts, strict=True)]
    return {**document, "alike": comparison.alike, "note": NOISE}


def _files(comparison: Comparison) -> Table:
    sides = (("A", comparison.a), ("B", comparison.b))
    rows = tuple((name, side.file, side.started, str(side.runs)) for name, side in sides)
    return Table("Compared", ("side", "file", "started", "runs"), rows, labels=3)


def _unlike(comparison: Comparison) -> Table:
    rows = tuple((one.fact, _value(one.fact, one.a), _value(one.fact, one.b)) for one in comparison.differences)
    if comparison.alike:
        return Table("Versions differ", ("fact", "in A", "in B"), rows, labels=3)
    note = "What follows compares these differences too."
    return Table("NOT MEASURED ALIKE", ("fact", "in A", "in B"), rows, labels=3, note=note, alarm=True)


def _speeds(comparison: Comparison) -> Table:
    columns: Columns[Compared] = {
        "candidate": lambda one: one.name,
        "prompts": lambda one: str(one.ratio.prompts),
        f"A tokens/s{UP}": lambda one: f"{one.tokens_per_second.a:.1f}",
        f"B tokens/s{UP}": lambda one: f"{one.tokens_per_second.b:.1f}",
        f"B/A{UP}": lambda one: show_interval(one.ratio.of_totals),
        f"against none{UP}": lambda one: show_interval(one.against_none),
        f"TTFT B/A{DOWN}": lambda one: show_interval(one.ttft),
        f"TPOT B/A{DOWN}": lambda one: show_interval(one.tpot),
        f"texts differ{DOWN}": lambda one: f"{one.texts.differing} of {one.texts.compared}",
    }
    none = comparison.none_differs
    drift = (
        f'none itself is {none.value:.2f}x as fast in B, so what policies changed is in "against none". '
        if none
        else ""
    )
    return Table.of("B over A", columns, comparison.candidates, note=f"{drift}{NOISE} {DEFINITIONS}")


def _candidates_left_out(comparison: Comparison) -> Table:
    rows = tuple(comparison.candidates_left_out.items())
    return Table("Candidates left out", ("candidate", "why"), rows, labels=2)


def _prompts_left_out(comparison: Comparison) -> Table:
    left_out = comparison.prompts_left_out
    rows = tuple(left_out.items())[:SHOWN_PROMPTS]
    hidden = len(left_out) - len(rows)
    note = f"{counted(hidden, 'more prompt')} in the JSON." if hidden else ""
    return Table("Prompts left out", ("prompt", "why"), rows, labels=2, note=note)


def _value(fact: str, value: Any) -> str:
    if value is None:
        return UNKNOWN
    if fact.endswith("sha256"):
        return str(value)[:12]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
