"""What one run of the models leaves behind, so that every policy can be replayed on it. No torch here."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar

from specctl.errors import UsageError
from specctl.jsonl import drop_torn_line, write_line
from specctl.policies import Signal
from specctl.records import DraftStep

SCHEMA_VERSION = 1
_T = TypeVar("_T")
_OWN = ("category", "turn", "prompt_tokens", "limit", "tokens", "prefill_ms", "chances")


@dataclass(frozen=True, slots=True)
class Proposals:
    """Tokens a draft proposes at consecutive places, with its signals there; every list as long as ``tokens``.

    ``accept_prob`` is a head's word on the token fed just before the place, None where the draft has no head;
    ``further`` that of other heads of the draft, by name, where several were asked.
    """

    tokens: list[int]
    entropy: list[float]
    top_prob: list[float]
    token_prob: list[float]
    accept_prob: list[float] | None = None
    further: dict[str, list[float]] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, places: slice) -> "Proposals":
        return Proposals(
            self.tokens[places],
            self.entropy[places],
            self.top_prob[places],
            self.token_prob[places],
            None if self.accept_prob is None else self.accept_prob[places],
        )

    def __add__(self, after: "Proposals") -> "Proposals":
        heads = None
        if self.accept_prob is not None and after.accept_prob is not None:
            heads = self.accept_prob + after.accept_prob
        return Proposals(
            self.tokens + after.tokens,
            self.entropy + after.entropy,
            self.top_prob + after.top_prob,
            self.token_prob + after.token_prob,
            heads,
        )

    def of_head(self, name: str) -> "Proposals":
        """The same with another head's word."""
        return replace(self, accept_prob=(self.further or {})[name], further=None)

    def signals(self, place: int) -> list[float]:
        """Entropy, top probability and the proposal's own at a place."""
        return [self.entropy[place], self.top_prob[place], self.token_prob[place]]

    def step(self, place: int, index: int) -> DraftStep:
        """The proposal at a place as the ``index``-th step of a round."""
        accept_prob = None if self.accept_prob is None else self.accept_prob[place]
        if accept_prob is not None and index == 1:
            accept_prob = 1.0  # nothing drafted stands before it
        return DraftStep(
            index,
            self.tokens[place],
            self.entropy[place],
            self.top_prob[place],
            self.token_prob[place],
            accept_prob,
        )


@dataclass(frozen=True)
class Line:
    """What a draft would do along a text that the model above it wrote, the target or in a hierarchy another draft.

    Attributes:
        kept: a flag for each of the N places of the text: verification keeps the draft's proposal there, once all
            before it in the round are kept.
        path: what the draft proposes at each of these places, after the text before it.
        branches: for places where the proposal is not kept, how the draft goes on after it.
        below: in a hierarchy, the next draft along ``path``, each place of which comes after the text before it.
        branches_below: the next draft along each of the branches.
    """

    kept: list[bool]
    path: Proposals
    branches: Mapping[int, Proposals]
    below: "Line | None" = None
    branches_below: "Mapping[int, Line]" = field(default_factory=dict)
    _steps: dict[int, list[DraftStep]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _under: "dict[int, Line]" = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_head: "dict[str, Line]" = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_head(self, name: str) -> "Line":
        """The same with the word of another of the draft's heads; itself for the one it has."""
        if name not in (self.path.further or {}):
            return self
        if name not in self._by_head:
            branches = {place: branch.of_head(name) for place, branch in self.branches.items()}
            self._by_head[name] = replace(self, path=self.path.of_head(name), branches=branches)
        return self._by_head[name]

    @cached_property
    def runs(self) -> list[int]:
        """How many proposals in a row are kept from each place on."""
        runs = [0] * (len(self.kept) + 1)
        for place in range(len(self.kept) - 1, -1, -1):
            runs[place] = runs[place + 1] + 1 if self.kept[place] else 0
        return runs

    def step(self, start: int, index: int) -> DraftStep:
        """The ``index``-th step of a round that starts at a place.

        Raises:
            UsageError: the trace was recorded for shorter drafts.
        """
        # Kept for the next policy: a thousand of them walk the same steps.
        steps = self._steps.setdefault(start, [])
        while len(steps) < index:
            steps.append(self._find(start, len(steps) + 1))
        return steps[index - 1]

    def _find(self, start: int, index: int) -> DraftStep:
        place, refused = start + index - 1, start + self.runs[start]
        if place <= refused and place < len(self.path):
            return self.path.step(place, index)
        branch, after = self.branches.get(refused), place - refused - 1
        if place <= refused or branch is None or after >= len(branch):
            raise UsageError(
                f"the trace was not recorded for drafts of {index} tokens",
                "record a new one, or replay policies with a smaller max_draft",
            )
        return branch.step(after, index)

    def under(self, start: int) -> "Line":
        """The next draft along what this one writes in a round that starts at a place: the path as far as the first
        proposal that is not kept, then the branch from there. Places are counted as along the path.
        """
        assert self.below is not None
        refused = start + self.runs[start]
        if (found := self._under.get(refused)) is None:
            branch = self.branches_below.get(refused)
            found = self._under[refused] = self.below if branch is None else _joined(self.below, branch, refused + 1)
        return found


def _joined(trunk: Line, branch: Line, first: int) -> Line:
    """A line along the first places of one text and then all of another."""
    below = trunk.below
    if below is not None and branch.below is not None:
        below = _joined(below, branch.below, first)
    return Line(
        trunk.kept[:first] + branch.kept,
        trunk.path[:first] + branch.path,
        _shifted(trunk.branches, branch.branches, first),
        below,
        _shifted(trunk.branches_below, branch.branches_below, first),
    )


def _shifted(trunk: Mapping[int, _T], branch: Mapping[int, _T], first: int) -> dict[int, _T]:
    return {place: found for place, found in trunk.items() if place < first} | {
        first + place: found for place, found in branch.items()
    }


@dataclass(frozen=True, slots=True)
class Trace:
    """One sequence: everything that any policy could have seen while it was generated.

    Attributes:
        prompt, category, turn: where it comes from.
        prompt_tokens: length of the prompt.
        limit: the token limit in force.
        tokens: N ids, what the target wrote.
        line: the draft along them.
        prefill_ms: time of the prompt in both models.
        chances: when sampling, with what probability verification was to keep the proposal at each of the N places;
            None when greedy, and in files that were written without.
    """

    prompt: str
    category: str
    turn: int
    prompt_tokens: int
    limit: int
    tokens: list[int]
    line: Line
    prefill_ms: float
    chances: list[float] | None = None

    def of_head(self, name: str | None) -> "Trace":
        """The same with the word of another of the draft's heads; itself for the one it has, or None."""
        return self if name is None else replace(self, line=self.line.of_head(name))


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Where traces come from.

    Attributes:
        depth: the longest draft they can replay.
        eos: ids that end a sequence.
        signals: what their steps carry.
        provenance: profile, suite, sampling, devices and versions.
        heads: of the draft, where more than the profile's own were asked.
    """

    depth: int
    eos: list[int]
    signals: list[Signal]
    provenance: dict[str, Any]
    heads: list[str] = field(default_factory=list)
    schema_version: int = SCHEMA_VERSION


@dataclass(slots=True)
class TraceSet:
    """A whole trace file.

    Attributes:
        records: by prompt id, the input record it answers, so that it can be run again.
        costs: the measured costs, as `specctl.replay.costs.CostTable.as_record` gives them; None before.
        failures: prompts that could not be run, by id, with the reason.
    """

    header: TraceHeader
    traces: list[Trace] = field(default_factory=list)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    costs: dict[str, Any] | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def prompts(self) -> list[str]:
        """Ids in the order they were run."""
        return list(dict.fromkeys(trace.prompt for trace in self.traces))

    def of(self, prompts: Iterable[str], head: str | None = None) -> list[Trace]:
        """Those of some prompts, with the word of a head of the draft."""
        wanted = set(prompts)
        return [trace.of_head(head) for trace in self.traces if trace.prompt in wanted]


def write_header(stream: IO[str], header: TraceHeader) -> None:
    write_line(stream, {"kind": "header", **asdict(header)})


def write_prompt(stream: IO[str], prompt: str, record: Mapping[str, Any], traces: Iterable[Trace]) -> None:
    """A prompt with its turns on one line, so that a file never ends between them."""
    turns = [
        {name: value for name in _OWN if (value := getattr(trace, name)) is not None} | _proposed(trace.line)
        for trace in traces
    ]
    write_line(stream, {"kind": "prompt", "prompt": prompt, "record": record, "turns": turns})


def write_failure(stream: IO[str], prompt: str, reason: str) -> None:
    write_line(stream, {"kind": "failure", "prompt": prompt, "reason": reason})


def write_costs(stream: IO[str], costs: Mapping[str, Any]) -> None:
    write_line(stream, {"kind": "costs", **costs})


def read_traces(path: Path) -> TraceSet:
    """Read a trace file; a torn last line, left by a kill, is dropped from the file.

    Raises:
        UsageError: it cannot be read or is not a trace file of this version.
    """
    found: TraceSet | None = None
    try:
        drop_torn_line(path)
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(map(json.loads, lines), start=1):
            kind = line.pop("kind", None)
            if found is None:
                if kind != "header" or line.get("schema_version") != SCHEMA_VERSION:
                    raise UsageError(f"{path} is not a calibration trace of version {SCHEMA_VERSION}")
                found = TraceSet(TraceHeader(**line))
            elif kind == "prompt":
                found.records[line["prompt"]] = line["record"]
                found.traces += [
                    Trace(line["prompt"], line=_line(turn), **{name: turn[name] for name in _OWN if name in turn})
                    for turn in line["turns"]
                ]
            elif kind == "failure":
                found.failures[line["prompt"]] = line["reason"]
            elif kind == "costs":
                found.costs = line
            else:
                raise UsageError(f"{path}:{number}: this line is not part of a calibration trace")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if found is None:
        raise UsageError(f"{path} is empty")
    return found


def _proposed(line: Line) -> dict[str, Any]:
    record: dict[str, Any] = {
        "kept": line.kept,
        "path": _columns(line.path),
        "branches": {str(place): _columns(branch) for place, branch in line.branches.items()},
    }
    if line.below is not None:
        record["below"] = _proposed(line.below)
        record["branches_below"] = {str(place): _proposed(below) for place, below in line.branches_below.items()}
    return record


def _columns(proposals: Proposals) -> dict[str, Any]:
    return {name: values for name, values in asdict(proposals).items() if values is not None}


def _line(record: dict[str, Any]) -> Line:
    return Line(
        record["kept"],
        Proposals(**record["path"]),
        {int(place): Proposals(**columns) for place, columns in record["branches"].items()},
        _line(record["below"]) if "below" in record else None,
        {int(place): _line(below) for place, below in record.get("branches_below", {}).items()},
    )
