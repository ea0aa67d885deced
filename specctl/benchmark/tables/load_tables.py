"""How fast a server answered, as tables and as one JSON document."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from specctl.benchmark.asked import Level, LoadHeader
from specctl.benchmark.tables.speed_tables import latencies
from specctl.printable import counted
from specctl.reporting.table import DEFINITIONS, DOWN, UP, Columns, Table, number, percent


def load_tables(header: LoadHeader, levels: Sequence[Level], missing: int) -> list[Table]:
    """Speed and latency by concurrency; ``missing`` requests were left out by an interrupt."""
    columns: Columns[Level] = {
        "concurrency": lambda one: str(one.concurrency),
        "requests": lambda one: str(len(one.answered)),
        f"failed{DOWN}": lambda one: str(len(one.asked) - len(one.answered)),
        f"requests/s{UP}": lambda one: number(one.requests_per_second, 2),
        f"tokens/s{UP}": lambda one: number(one.tokens_per_second, 1),
        f"acceptance rate{UP}": lambda one: percent(one.acceptance_rate),
    }
    note = f"{header.model} at {header.url}. {DEFINITIONS}"
    if any(level.counted for level in levels):
        note += " The server does not count tokens: pieces of its streams were counted."
    if missing:
        note += f" Interrupted: {counted(missing, 'request')} without a whole answer."
    failures = [
        f"{count} at concurrency {level.concurrency}: {_example(level, kind)}"
        for level in levels
        for kind, count in level.failures.items()
    ]
    found = [
        Table.of("Speed", columns, levels, note=note),
        latencies("concurrency", {str(level.concurrency): level.latency for level in levels}),
    ]
    if failures:
        found.append(Table("Failed requests", (), (), note="\n".join(failures), alarm=True))
    return found


def _example(level: Level, kind: str) -> str:
    return next(one.message for one in level.asked if one.error == kind)


def load_json(header: LoadHeader, levels: Sequence[Level], missing: int) -> dict[str, Any]:
    """The same as one document."""
    return {**asdict(header), "missing": missing, "levels": [_level(level) for level in levels]}


def _level(level: Level) -> dict[str, Any]:
    latency = level.latency
    shown = {key: getattr(latency, key) for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")}
    return {
        "concurrency": level.concurrency,
        "requests": len(level.answered),
        "failed": level.failures,
        "seconds": level.seconds,
        "tokens": level.tokens,
        "tokens_counted_by": "pieces" if level.counted else "server",
        "requests_per_second": level.requests_per_second,
        "tokens_per_second": level.tokens_per_second,
        "acceptance_rate": level.acceptance_rate,
        **{key: value and value._asdict() for key, value in shown.items()},
    }
