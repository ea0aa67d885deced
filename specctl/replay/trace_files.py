"""Trace files: a header, a line for each prompt with the traces of its turns, and the measured costs. No torch here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specctl.errors import UsageError
from specctl.files import Content, LineFormat
from specctl.models.predictors.disco_predictor import DiscoPredictor
from specctl.observing.results import Skipped, of_request
from specctl.policies import Signal
from specctl.profile.schema import Profile, Verification
from specctl.prompts.suites import Suite
from specctl.replay.costs import CostTable
from specctl.replay.traces import Trace


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The recording conditions of a trace file."""

    depth: int  # the longest draft that can be replayed on them
    eos: list[int]  # ids that end a sequence
    signals: list[Signal]  # the signals that were recorded
    provenance: dict[str, Any]  # profile, suite, sampling, devices and versions
    # names of the draft's heads; empty if only the profile's own head was recorded, or none
    heads: list[str] = field(default_factory=list)
    verification: Verification = "token"  # how replayed draft tokens are verified, where they are drawn
    # for each draft its DISCO heads by name, its usual one first; empty without any. Their predictions depend on where
    # a round began, so replay computes them.
    disco: list[dict[str, DiscoPredictor]] = field(default_factory=list)

    def disco_of(self, head: str | None) -> list[DiscoPredictor | None]:
        """The DISCO head of each draft, from the top down; of the first draft the one of this name, if there is one."""
        found = [next(iter(named.values()), None) for named in self.disco]
        return [self.disco[0].get(head, found[0]), *found[1:]] if found and head is not None else found


@dataclass(frozen=True, slots=True)
class TracedPrompt:
    """A prompt with the traces of its turns, on one line, so that a file contains all turns of a prompt or none."""

    prompt: str  # the prompt's id
    record: dict[str, Any]  # the input record, so that the prompt can be run again
    turns: list[Trace]  # one trace for each turn


@dataclass(slots=True)
class TraceSet:
    """A whole trace file."""

    header: TraceHeader
    traces: list[Trace] = field(default_factory=list)
    # by prompt id, the input record, so that the prompt can be run again
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    costs: CostTable | None = None  # the measured costs; None before they are measured
    failures: dict[str, str] = field(default_factory=dict)  # by prompt id, the reason why a prompt failed

    @property
    def prompts(self) -> list[str]:
        """Prompt ids in the order in which they were run."""
        return list(dict.fromkeys(trace.prompt for trace in self.traces))

    @property
    def verification(self) -> Verification | None:
        """How replayed draft tokens are verified; None in greedy decoding, where it makes no difference."""
        sampled = self.header.provenance.get("sampling", {}).get("temperature", 0.0) > 0
        return self.header.verification if sampled else None

    def of(self, prompts: Iterable[str], head: str | None = None) -> list[Trace]:
        """The traces of some prompts, with a head's predictions; None for the profile's own head."""
        wanted = set(prompts)
        levels = self.header.disco_of(head)
        return [trace.of_predictor(head).of_disco(levels) for trace in self.traces if trace.prompt in wanted]

    def add(self, record: object) -> None:
        """Add the record of a line after the header."""
        match record:
            case TracedPrompt():
                self.records[record.prompt] = record.record
                self.traces += record.turns
            case Skipped():
                self.failures[record.prompt] = record.reason
            case CostTable():
                self.costs = record


_KINDS = {"prompt": TracedPrompt, "failure": Skipped, "costs": CostTable}
TRACES = LineFormat(Content.TRACE, TraceHeader, _KINDS, version=2)
"""The format of a trace file; `TraceSet.add` accepts every record after the header."""


def read_traces(path: Path) -> TraceSet:
    """Read a trace file. An incomplete last line, left by an interrupted write, is ignored.

    Raises:
        UsageError: the file cannot be read or is not a trace, or a line is damaged.
    """
    records = TRACES.read(path)
    traces = TraceSet(next(records))
    for record in records:
        traces.add(record)
    return traces


def require_same_request(
    old: TraceHeader, profile: Profile, suite: Suite, depth: int, heads: Sequence[str], path: Path
) -> None:
    """Raise UsageError if a trace belongs to another calibration; checks all that is known before a model is loaded."""
    asked = of_request(profile, suite)
    recorded = {name: old.provenance.get(name) for name in asked}
    if (old.depth, old.heads, recorded) != (depth, list(heads), asked):
        raise other_calibration(path)


def other_calibration(path: Path) -> UsageError:
    return UsageError(
        f"{path} holds the trace of another calibration", "name a new file, or search this trace with --from"
    )
