"""Trace files: a header, a line for each prompt with the traces of its turns, and the measured costs. No torch here."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from specctl.files import Content, LineFormat
from specctl.observing.results import Skipped
from specctl.policies import Signal
from specctl.replay.costs import CostTable
from specctl.replay.traces import Trace


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Where traces come from.

    Attributes:
        depth: the longest draft they can replay.
        eos: ids that end a sequence.
        signals: that their steps have.
        provenance: profile, suite, sampling, devices and versions.
        heads: names of the draft's heads, where there are more than the profile's own.
    """

    depth: int
    eos: list[int]
    signals: list[Signal]
    provenance: dict[str, Any]
    heads: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A prompt with the traces of its turns; on one line, so that a file never ends between them.

    Attributes:
        prompt: its id.
        record: the input record, so that it can be run again.
        turns: one trace for each.
    """

    prompt: str
    record: dict[str, Any]
    turns: list[Trace]


@dataclass(slots=True)
class TraceSet:
    """A whole trace file.

    Attributes:
        records: by prompt id, the input record it answers, so that it can be run again.
        costs: the measured costs; None before they are measured.
        failures: by id, why a prompt could not be run.
    """

    header: TraceHeader
    traces: list[Trace] = field(default_factory=list)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    costs: CostTable | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def prompts(self) -> list[str]:
        """Ids in the order they were run."""
        return list(dict.fromkeys(trace.prompt for trace in self.traces))

    def of(self, prompts: Iterable[str], head: str | None = None) -> list[Trace]:
        """The traces of some prompts, with the predictions of a head of the draft."""
        wanted = set(prompts)
        return [trace.of_head(head) for trace in self.traces if trace.prompt in wanted]

    def add(self, record: object) -> None:
        """Take in what a line after the header holds."""
        match record:
            case TracedPrompt():
                self.records[record.prompt] = record.record
                self.traces += record.turns
            case Skipped():
                self.failures[record.prompt] = record.reason
            case CostTable():
                self.costs = record


def _from_version_1(line: Any) -> Any:
    """Version 1 wrote the fields of a trace's line among the trace's own, and the prompt's id once."""
    try:
        return {**line, "turns": [{"prompt": line["prompt"], "draft": turn, **turn} for turn in line["turns"]]}
    except (KeyError, TypeError):
        return line  # what is wrong with it is found by its type


TRACES = LineFormat(
    Content.TRACE,
    2,
    TraceHeader,
    {
        "prompt": Annotated[TracedPrompt, BeforeValidator(_from_version_1)],
        "failure": Skipped,
        "costs": CostTable,
    },
)
"""A trace file; what its lines hold, `TraceSet.add` takes."""


def read_traces(path: Path) -> TraceSet:
    """Read a trace file, without what a write that was interrupted left at its end.

    Raises:
        UsageError: it cannot be read, holds something else, or a line of it is damaged.
    """
    records = TRACES.read(path)
    traces = TraceSet(next(records))
    for record in records:
        traces.add(record)
    return traces
