"""The results file of a benchmark: a header, then one line for each finished run. No torch here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from specctl.errors import UsageError
from specctl.files import Content, LineFormat
from specctl.observing.candidate import Candidate, candidate_of, candidate_record
from specctl.observing.findings import Failed, OraclePasses, SignalBound, Skipped, Stretches
from specctl.profile.schema import Profile
from specctl.prompts.suites import Suite
from specctl.records import CompletionSummary, RoundSummary

BASELINE = "none"
OF_HIERARCHIES = frozenset({"levels", "inner", "drafts", "further_ms"})
"""Keys that the JSON document leaves out where they are empty; only hierarchies have them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a candidate's greedy output differs from the baseline's.

    Attributes:
        turn, position: where the first difference is.
        expected, found: the baseline's token and the candidate's token; None past the end.
        gap: the target's largest logit minus its second largest at that position; (nearly) 0 in a tie.
    """

    turn: int
    position: int
    expected: int | None
    found: int | None
    gap: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a candidate on a prompt.

    Attributes:
        candidate: label of the candidate.
        prompt: the prompt's id, as text.
        repeat: how often the candidate had run this prompt at this length before.
        length: the run's token limit.
        turns: a summary for each turn.
        difference: in greedy decoding, the first difference from the baseline's tokens; None if they are equal.
        thresholds: of transformers' ``hf-confidence``, for each turn the thresholds of its first and its last draft, or
            None without a draft; empty for other candidates.
    """

    candidate: str
    prompt: str
    category: str
    repeat: int
    length: int
    turns: tuple[CompletionSummary, ...]
    difference: Difference | None = None
    thresholds: tuple[tuple[float, float] | None, ...] = ()

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.candidate, self.prompt, self.repeat, self.length

    @property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def seconds(self) -> float:
        return sum(turn.total_ms for turn in self.turns) / 1e3

    @property
    def decode_ms(self) -> float:
        """Wall time after the prompts were read, in milliseconds."""
        return sum(turn.total_ms - turn.prefill_ms for turn in self.turns)

    @property
    def rounds(self) -> Iterator[RoundSummary]:
        return (round_ for turn in self.turns for round_ in turn.rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference(Difference):
    """A difference with the `Run.key` of its run. It has its own line because the baseline may run later."""

    run: tuple[str, str, int, int]

    @property
    def difference(self) -> Difference:
        return Difference(self.turn, self.position, self.expected, self.found, self.gap)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Milliseconds of bare forward passes of the loaded models, measured without the loop.

    Attributes:
        draft: a pass of the first draft over one token.
        target: passes of the target, by number of tokens in the pass.
        drafts: passes of each draft, by number of tokens in the pass; empty for a single draft.
        head: the time that the first draft's head adds to a draft step; None without a head.
    """

    draft: float
    target: Mapping[int, float]
    drafts: tuple[Mapping[int, float], ...] = ()
    head: float | None = None

    def __post_init__(self) -> None:
        if not self.target or any(1 not in passes for passes in self.drafts):
            raise ValueError("passes of one token are missing")

    def step_ms(self, draft: int) -> float:
        """A pass of one token in a loaded draft; ``draft`` is its index in `Header.drafts`, 0 for a single draft."""
        return self.drafts[draft][1] if self.drafts else self.draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The provenance of numbers: everything needed to assess or repeat them.

    Attributes:
        created: when the run began, in ISO 8601.
        argv: the command's arguments.
        versions: of the packages, by name.
        devices: of each model, by its key in the profile.
        profile: the resolved profile.
        suite: name, sha256 of the prompts and their number.
        sampling: the sampling table in force.
        engines: the engine of each model, by its key in the profile.
        synthetic: whether a model has random weights, made for measurements of speed.
        threads: with how many threads passes on the CPU ran; None if that was not recorded.
        others_busy: how many of the cores that this process may use other processes kept busy while the models were
            loaded; None if that is not known.
    """

    created: str
    argv: list[str]
    versions: dict[str, str]
    devices: dict[str, str]
    profile: dict[str, Any]
    suite: dict[str, Any]
    sampling: dict[str, Any]
    engines: dict[str, str] = field(default_factory=dict)
    synthetic: bool = False
    threads: int | None = None
    others_busy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Facts):
    """The first line of a results file.

    Attributes:
        candidates: the candidates of the benchmark.
        repeats, lengths: how often every prompt is run, and with which token limits.
        oracle: whether `RunSet.oracle` is wanted.
        papers: of a comparison of the papers' policies, those that the pair could not run, by name, and why.
        drafts: names of the loaded draft models; empty for a single draft.
        batch: how many prompts each candidate ran at once.
    """

    candidates: list[Annotated[Candidate, PlainValidator(candidate_of), PlainSerializer(candidate_record)]]
    repeats: int
    lengths: list[int]
    oracle: bool = False
    papers: dict[str, str] | None = None
    drafts: list[str] = field(default_factory=list)
    batch: int = 1

    def candidate(self, label: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.label == label)

    def engine_of(self, label: str) -> str | None:
        """`Candidate.ran_on` of one."""
        return self.candidate(label).ran_on(self.engines)


@dataclass(slots=True)
class RunSet:
    """A whole results file.

    Attributes:
        header: the first line.
        runs: all finished runs.
        costs: the latest times of bare forward passes.
        oracle: by prompt id, the fewest target passes that Theorem 4.1 of SpecDec++ allows, |S| + 1.
        signal_bound: computed with the oracle, once all prompts have run.
        stretches: by prompt id, computed with the oracle unless the first draft is a draft head.
        skipped: by prompt id, why the prompt cannot be run on this pair; such a prompt has no runs.
        failed: by label, why a peer could not finish its runs; runs that it finishes later take it back.
    """

    header: Header
    runs: list[Run] = field(default_factory=list)
    costs: PassTimes | None = None
    oracle: dict[str, int] = field(default_factory=dict)
    signal_bound: SignalBound | None = None
    stretches: dict[str, list[list[int]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add(self, record: object) -> None:
        """Add the record of a line after the header."""
        match record:
            case Run():
                self.runs.append(record)
                self.failed.pop(record.candidate, None)
            case PassTimes():
                self.costs = record
            case OraclePasses():
                self.oracle[record.prompt] = record.passes
            case Stretches():
                self.stretches[record.prompt] = record.turns
            case SignalBound():
                self.signal_bound = record
            case Skipped():
                self.skipped[record.prompt] = record.reason
                self.runs[:] = [run for run in self.runs if run.prompt != record.prompt]
            case Failed():
                self.failed[record.candidate] = record.reason
            case RunDifference():
                # Its run was added shortly before.
                for index in range(len(self.runs) - 1, -1, -1):
                    if self.runs[index].key == record.run:
                        self.runs[index] = replace(self.runs[index], difference=record.difference)
                        break

    def categories(self) -> list[str]:
        """The categories in the order of their first run."""
        return list(dict.fromkeys(run.category for run in self.runs))

    def of(self, candidate: str, category: str | None = None) -> list[Run]:
        return [run for run in self.runs if run.candidate == candidate and category in (None, run.category)]


RESULTS = LineFormat(
    Content.RESULTS,
    Header,
    {
        "run": Run,
        "costs": PassTimes,
        "oracle": OraclePasses,
        "signal-bound": SignalBound,
        "stretches": Stretches,
        "skipped": Skipped,
        "failed": Failed,
        "difference": RunDifference,
    },
)
"""The format of a results file; `RunSet.add` accepts every record after the header."""


def of_request(profile: Profile, suite: Suite) -> dict[str, Any]:
    """The `Facts` of a run that are known before a model is loaded."""
    return {
        "profile": profile.model_dump(mode="json", exclude_none=True),
        "suite": {"name": suite.name, "sha256": suite.sha256, "count": len(suite.prompts)},
        "sampling": profile.sampling.model_dump(mode="json"),
    }


def as_record(header: Header) -> dict[str, Any]:
    """A header with all its fields as plain values, without the empty fields that only hierarchies have."""
    record = TypeAdapter(Header).dump_python(header, mode="json")
    return {name: value for name, value in record.items() if value or name not in OF_HIERARCHIES}


def read_results(path: Path) -> RunSet:
    """Read a results file. An incomplete last line, left by an interrupted write, is ignored.

    Raises:
        UsageError: the file cannot be read or is not a results file, or a line is damaged.
    """
    records = RESULTS.read(path)
    results = RunSet(next(records))
    for record in records:
        results.add(record)
    drafts = len(results.header.drafts)
    if results.costs is not None and len(results.costs.drafts) != drafts:
        raise UsageError(f"{path}: the costs are of {len(results.costs.drafts)} drafts, the header names {drafts}")
    if any(index >= max(1, drafts) for candidate in results.header.candidates for index in candidate.drafts):
        raise UsageError(f"{path}:1: a candidate has a draft that the header does not name")
    return results
