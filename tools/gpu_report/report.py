"""The report of all parts: what did not hold, what held, what is not answered, and tables; Markdown and JSON lines."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_report.parts import Part
from tools.gpu_report.process import Outcome
from tools.gpu_report.record import Line

SCHEMA_VERSION = 1


@dataclass(slots=True)
class Report:
    """What is known so far.

    Attributes:
        rehearsal: whether there was no device, so that no figure is one of a GPU.
        minutes: the limit of all parts together.
        seconds: what they took; None while they run.
        outcomes: of the parts so far.
    """

    rehearsal: bool
    minutes: float
    seconds: float | None = None
    outcomes: list[tuple[Part, Outcome]] = field(default_factory=list)

    def add(self, part: Part, outcome: Outcome) -> None:
        self.outcomes.append((part, outcome))

    @property
    def lines(self) -> list[Line]:
        """What all parts wrote."""
        return [line for _, outcome in self.outcomes for line in outcome.lines]

    @property
    def well(self) -> bool:
        """Whether every part was done and all that was checked held."""
        return all(outcome.state == "done" for _, outcome in self.outcomes) and not self._checks(held=False)

    @property
    def verdict(self) -> str:
        """All in one line."""
        held, broken = len(self._checks(held=True)), len(self._checks(held=False))
        ended = [part.name for part, outcome in self.outcomes if outcome.state != "done"]
        unanswered = f"; not answered: {', '.join(ended)}" if ended else ""
        kind = "a REHEARSAL without a device: " if self.rehearsal else ""
        return f"{kind}{held} checks held, {broken} did not{unanswered}"

    def write(self, folder: Path) -> None:
        """Write ``report.md`` and ``report.jsonl``; neither is ever there in part."""
        for name, text in (("report.md", self.markdown()), ("report.jsonl", self.json_lines())):
            new = folder / f".{name}"
            new.write_text(text, encoding="utf-8")
            new.replace(folder / name)

    def json_lines(self) -> str:
        """The header, then for each part its lines and how it ended."""
        head = {"kind": "report", "schema_version": SCHEMA_VERSION, "rehearsal": self.rehearsal}
        lines: list[Line] = [{**head, "minutes": self.minutes, "seconds": self.seconds, "verdict": self.verdict}]
        for part, outcome in self.outcomes:
            ended = {"kind": "part", "part": part.name, "title": part.title, "state": outcome.state}
            lines += [*outcome.lines, {**ended, "seconds": round(outcome.seconds, 2), "output": outcome.output}]
        return "".join(json.dumps(line) + "\n" for line in lines)

    def markdown(self) -> str:
        """The same for people."""
        return "\n".join(self._markdown()) + "\n"

    def _checks(self, *, held: bool | None) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "check" and line["held"] is held]

    def _markdown(self) -> Iterator[str]:
        yield "# specctl on this machine's GPU"
        yield ""
        if self.rehearsal:
            where = "tiny models on the CPU and on pretended devices"
            yield from (f"**A REHEARSAL without a device: {where}. No figure is a GPU's.**", "")
        yield f"{self.verdict[0].upper()}{self.verdict[1:]}."
        titles = {"What did not hold": False, "What held": True, "Not judged in a rehearsal": None}
        for title, held in titles.items():
            yield from _section(title, [_claim(line) for line in self._checks(held=held)])
        ended = [pair for pair in self.outcomes if pair[1].state != "done"]
        reasons = {part.name: f", {how.output}" if how.state == "skipped" else "" for part, how in ended}
        told = [f"{part.title} (`{part.name}`): {how.state}{reasons[part.name]}" for part, how in ended]
        yield from _section("Not answered", told)
        for part, outcome in ended:
            if outcome.output and outcome.state != "skipped":
                yield from ("", f"`{part.name}` ended with", "", "```text", *outcome.output.splitlines()[-15:], "```")
        tables: dict[str, list[Mapping[str, Any]]] = {}
        for line in self.lines:
            if line["kind"] == "row":
                tables.setdefault(line["table"], []).append(line["values"])
        for title, rows in tables.items():
            yield from ("", f"## {title}", "", *_table(rows))
        notes = [f"`{line['part']}`: {line['text']}" for line in self.lines if line["kind"] == "note"]
        yield from _section("Notes", notes)
        yield from ("", "## Parts", "")
        yield from _table(
            {
                "part": f"`{part.name}`",
                "what": part.title,
                "state": how.state,
                "seconds": how.seconds,
                "on": self._on(part),
            }
            for part, how in self.outcomes
        )

    def _on(self, part: Part) -> str:
        if not self.rehearsal:
            return "the device"
        return {"cpu": "the CPU", "pretended": "pretended devices"}[part.rehearsed]


def _section(title: str, items: list[str]) -> Iterator[str]:
    if items:
        yield from ("", f"## {title}", "", *(f"- {item}" for item in items))


def _claim(line: Line) -> str:
    return f"{line['claim']} (`{line['part']}`){': ' if line['detail'] else ''}{line['detail']}"


def _table(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A Markdown table; a row may lack columns of others."""
    kept = list(rows)
    columns = list(dict.fromkeys(name for row in kept for name in row))
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"
    for row in kept:
        yield f"| {' | '.join(_cell(row.get(name)) for name in columns)} |"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")
