"""A benchmark's results as tables and as one JSON document."""

from dataclasses import asdict, replace
from typing import Any

from specctl.benchmark.digest import Digest
from specctl.benchmark.papers import sources
from specctl.benchmark.runnable_papers import left_out_lines
from specctl.benchmark.summaries import Summary
from specctl.benchmark.tables.cost_tables import cost_table, level_table, parallel_table, pass_table
from specctl.benchmark.tables.speed_tables import (
    brief_table,
    count_differing,
    drafting_table,
    latency_table,
    part_table,
    share_table,
    speed_table,
)
from specctl.benchmark.verdict import verdict
from specctl.files import SCHEMA_VERSION
from specctl.observing.candidate import Candidate
from specctl.observing.results import OF_HIERARCHIES, Difference, Run, as_record
from specctl.printable import counted
from specctl.reporting.plain import plain
from specctl.reporting.table import DOWN, UNKNOWN, UP, Columns, Table, number, percent, show_interval

SHOWN_DIFFERENCES = 20
MORE = "--details shows latency, drafting and costs too."
_DIFFERS = "GREEDY OUTPUT DIFFERS"


def tables(digest: Digest) -> list[Table]:
    """All tables that the results can fill, in reading order."""
    return [
        speed_table(digest),
        *([paper_table(digest)] if digest.results.header.papers is not None else []),
        latency_table(digest),
        drafting_table(digest),
        share_table(digest),
        *([part_table("By category", "category", digest.by_category)] if len(digest.by_category) > 1 else []),
        *([part_table("By length limit", "length", digest.by_length)] if len(digest.by_length) > 1 else []),
        *([level_table(digest)] if digest.levels else []),
        cost_table(digest),
        *pass_table(digest),
        *([parallel_table(digest)] if digest.simulated else []),
        _differences(digest),
        *([_skipped(digest)] if digest.results.skipped else []),
        *([_failed(digest)] if digest.results.failed else []),
        *([_peers(digest)] if any(one.way is not None for one in digest.results.header.candidates) else []),
    ]


def brief_tables(digest: Digest) -> list[Table]:
    """Who was how fast, and what must not be overlooked: what a screen of 80 columns and 40 lines can show."""
    alarms = []
    if digest.differing:
        run, found = digest.differing[0]
        first = f"The first: {run.candidate} on prompt {run.prompt}, turn {found.turn}, position {found.position}."
        alarms = [Table(_DIFFERS, (), (), note=f"In {_of_compared(digest)}. {first}", alarm=True)]
    speed = brief_table(digest)
    return [replace(speed, note=f"{speed.note} {MORE}"), *alarms]


def as_json(digest: Digest) -> dict[str, Any]:
    """Every number of the tables and its provenance, rounded to six decimals."""
    document: dict[str, Any] = {
        "provenance": {**as_record(digest.results.header), "schema_version": SCHEMA_VERSION},
        "verdict": verdict(digest),
        "engines": {one.label: digest.results.header.engine_of(one.label) for one in digest.results.header.candidates},
        "runs": digest.finished,
        "expected_runs": digest.expected_runs,
        "overall": digest.overall,
        "by_category": digest.by_category,
        "by_length": digest.by_length,
        "cost_model": digest.model,
        "bare_costs": digest.results.costs,
        "costs": digest.costs,
        "oracle": digest.oracle,
        "signal_bound": digest.results.signal_bound
        and {
            **asdict(digest.results.signal_bound),
            "tokens_per_second": digest.signal_speed,
        },
        **(
            {
                "parallel": {
                    "sync_ms": digest.sync_ms,
                    "simulated": [
                        {**asdict(one), "speedup": digest.simulated_baseline_ms / one.milliseconds}
                        for one in digest.simulated
                    ],
                }
            }
            if digest.simulated
            else {}
        ),
        **({"levels": digest.levels} if digest.levels else {}),
        "compared": digest.compared,
        "differences": [
            {
                "candidate": run.candidate,
                "prompt": run.prompt,
                "repeat": run.repeat,
                "length": run.length,
                **asdict(found),
            }
            for run, found in digest.differing
        ],
        **({"failed": digest.results.failed} if digest.results.failed else {}),
    }
    return {name: plain(value, digits=6, optional=OF_HIERARCHIES) for name, value in document.items()}


def _differences(digest: Digest) -> Table:
    title = "Greedy identity"
    if digest.compared is None:
        temperature = digest.results.header.sampling.get("temperature")
        return Table(title, (), (), note=f"Not compared: sampling at temperature {temperature}.")
    if not digest.compared:
        return Table(title, (), (), note="Not compared: no prompt was finished both by none and by another candidate.")
    if not digest.differing:
        compared = counted(digest.compared, "run")
        return Table(title, (), (), note=f"{compared} gave exactly the tokens of none.")
    columns: Columns[tuple[Run, Difference]] = {
        "candidate": lambda one: one[0].candidate,
        "prompt": lambda one: one[0].prompt,
        "repeat": lambda one: str(one[0].repeat),
        "length": lambda one: str(one[0].length),
        "turn": lambda one: str(one[1].turn),
        "position": lambda one: str(one[1].position),
        "none's token": lambda one: "end" if one[1].expected is None else str(one[1].expected),
        "its token": lambda one: "end" if one[1].found is None else str(one[1].found),
        "logit gap": lambda one: UNKNOWN if one[1].gap is None else f"{one[1].gap:.2e}",
    }
    shown = digest.differing[:SHOWN_DIFFERENCES]
    hidden = len(digest.differing) - len(shown)
    note = (
        f"{_DIFFERS} in {_of_compared(digest)}. The first difference of each run"
        + (f"; {counted(hidden, 'more run')} in the JSON." if hidden else ".")
        + " A logit gap near 0 is a tie between the target's two best tokens."
    )
    return Table.of(_DIFFERS, columns, shown, labels=2, note=note, alarm=True)


def _of_compared(digest: Digest) -> str:
    return f"{len(digest.differing)} of {digest.compared} runs"


def _skipped(digest: Digest) -> Table:
    skipped = digest.results.skipped
    note = f"{len(skipped)} of {digest.results.header.suite.get('count', '?')} prompts could not be run on this pair."
    return Table("Prompts left out", ("prompt", "why"), tuple(skipped.items()), labels=2, note=note)


def _failed(digest: Digest) -> Table:
    rows = tuple(digest.results.failed.items())
    note = "These did not finish their runs; --resume asks them again."
    return Table("Peers that failed", ("candidate", "why"), rows, labels=2, note=note)


def _peers(digest: Digest) -> Table:
    """What is not alike where other engines were measured, one row for each."""
    header = digest.results.header
    columns: Columns[Candidate] = {
        "candidate": lambda one: one.label,
        "version": lambda one: str(header.versions.get(one.name, UNKNOWN)),
        "device": lambda one: str(header.devices.get(one.name, UNKNOWN)),
        "weights": lambda one: str(one.values.get("weights", UNKNOWN)),
        "cache": lambda one: str(one.values.get("cache", UNKNOWN)),
    }
    note = (
        "Each ran in a process of its own, stopped while others ran, on prompts given as ids. Its times are its own "
        "clock's, from the prompt's ids to the last token."
    )
    return Table.of("Peers", columns, (one for one in header.candidates if one.way is not None), labels=5, note=note)


def paper_table(digest: Digest) -> Table:
    """What the papers report of each policy, with the paper that its settings are from; others come after `none`."""
    header = digest.results.header
    known = sources(header.candidates)
    order = [*(one.label for one in header.candidates if one.label not in known), *known]
    columns: Columns[Summary] = {
        "candidate": lambda one: one.candidate,
        "settings of": lambda one: known.get(one.candidate, ""),
        f"speedup (totals){UP}": lambda one: show_interval(one.speedup and one.speedup.of_totals),
        f"mean acceptance length{UP}": lambda one: number(one.mean_acceptance_length, 2),
        f"acceptance rate{UP}": lambda one: percent(one.acceptance_rate),
        f"draft rate{DOWN}": lambda one: number(one.draft_rate, 3),
        f"verification rate{DOWN}": lambda one: number(one.verification_rate, 3),
        f"differ{DOWN}": lambda one: count_differing(digest, one.candidate),
    }
    shown = sorted(digest.overall, key=lambda one: order.index(one.candidate))
    note = " ".join(f"{line[0].upper()}{line[1:]}." for line in left_out_lines(header.papers or {}))
    return Table.of("The papers' policies", columns, shown, labels=2, note=note)
