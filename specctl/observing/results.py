"""What a benchmark writes down: one header, then one line for each finished run. No torch here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from specctl.files import Content, LineFormat
from specctl.observing.entrant import Entrant, entrant_of, entrant_record
from specctl.records import CompletionSummary, RoundSummary

BASELINE = "none"
OF_HIERARCHIES = frozenset({"levels", "inner", "drafts", "further_ms"})
"""Keys of the JSON document that are left out where they are empty."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which an entrant's greedy output differs from the baseline's.

    Attributes:
        turn, position: of the first difference.
        expected, found: the baseline's token and this one's; None past the end.
        gap: the target's largest logit minus its second largest at that position; (nearly) 0 in a tie.
    """

    turn: int
    position: int
    expected: int | None
    found: int | None
    gap: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """One entrant on one prompt, once.

    Attributes:
        prompt: the prompt's id, as text.
        length: the run's token limit, where several were asked for.
        difference: in greedy decoding, how its tokens differ from the baseline's; None where they do not.
    """

    entrant: str
    prompt: str
    category: str
    repeat: int
    length: int
    turns: tuple[CompletionSummary, ...]
    difference: Difference | None = None

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.entrant, self.prompt, self.repeat, self.length

    @property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def seconds(self) -> float:
        return sum(turn.total_ms for turn in self.turns) / 1e3

    @property
    def decode_ms(self) -> float:
        """Wall time after the prompt, in milliseconds."""
        return sum(turn.total_ms - turn.prefill_ms for turn in self.turns)

    @property
    def rounds(self) -> Iterator[RoundSummary]:
        return (round_ for turn in self.turns for round_ in turn.rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference(Difference):
    """A difference with the `Run.key` of its run; known only once the baseline has run too."""

    run: tuple[str, str, int, int]

    @property
    def difference(self) -> Difference:
        return Difference(self.turn, self.position, self.expected, self.found, self.gap)


@dataclass(frozen=True, slots=True)
class OraclePasses:
    """The fewest target passes for a prompt that Theorem 4.1 of SpecDec++ allows, |S| + 1."""

    prompt: str
    passes: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that cannot be run on these models, with the reason."""

    prompt: str
    reason: str


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Milliseconds of bare forward passes of the loaded models, measured without the loop.

    Attributes:
        draft: of one token in the first draft.
        target: by number of tokens in the pass.
        drafts: of each draft by number of tokens in the pass; empty for a single draft.
        head: what the first draft's head adds to a draft step; None without a head.
    """

    draft: float
    target: Mapping[int, float]
    drafts: tuple[Mapping[int, float], ...] = ()
    head: float | None = None

    def step_ms(self, draft: int) -> float:
        """Of one token in a loaded draft, by its place in `Header.drafts`; 0 for a single one."""
        return self.drafts[draft][1] if self.drafts else self.draft


@dataclass(frozen=True, slots=True)
class SignalBound:
    """The best stopping rule on entropy and top probability, played on the baseline's outputs (one run of each prompt).

    Attributes:
        prompts, tokens: how many prompts it was played on, and how many tokens their outputs have.
        drafted, passes: draft steps and target passes it makes for these tokens.
    """

    prompts: int
    tokens: int
    drafted: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Where numbers come from: everything needed to assess or repeat them.

    Attributes:
        created: when the run began, in ISO 8601.
        argv: the command's arguments.
        versions, devices: of the packages, and of each model by its key in the profile.
        profile: the resolved profile.
        suite: name, sha256 of the prompts and their number.
        sampling: the sampling table in force.
        engines: how each model's passes run, by its key in the profile.
        synthetic: whether the weights are random, of a given shape, for measurements of speed.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Facts):
    """The first line of a results file.

    Attributes:
        entrants: what competes.
        repeats, lengths: how often every prompt is run, and to which token limits.
        oracle: whether `RunSet.oracle` was asked for.
        drafts: the loaded draft models by name, where there are several.
    """

    entrants: list[Annotated[Entrant, PlainValidator(entrant_of), PlainSerializer(entrant_record)]]
    repeats: int
    lengths: list[int]
    oracle: bool = False
    drafts: list[str] = field(default_factory=list)

    def entrant(self, label: str) -> Entrant:
        return next(entrant for entrant in self.entrants if entrant.label == label)


@dataclass(slots=True)
class RunSet:
    """A whole results file.

    Attributes:
        oracle: by prompt id, the fewest target passes Theorem 4.1 of SpecDec++ allows, |S| + 1.
        signal_bound: worked out with the oracle, once all prompts have run.
        skipped: by prompt id, why it cannot be run on this pair; it has no runs.
    """

    header: Header
    runs: list[Run] = field(default_factory=list)
    costs: PassTimes | None = None
    oracle: dict[str, int] = field(default_factory=dict)
    signal_bound: SignalBound | None = None
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, record: object) -> None:
        """Take in what a line after the header holds."""
        match record:
            case Run():
                self.runs.append(record)
            case PassTimes():
                self.costs = record
            case OraclePasses():
                self.oracle[record.prompt] = record.passes
            case SignalBound():
                self.signal_bound = record
            case Skipped():
                self.skipped[record.prompt] = record.reason
                self.runs[:] = [run for run in self.runs if run.prompt != record.prompt]
            case RunDifference():
                # It follows soon after its run.
                for index in range(len(self.runs) - 1, -1, -1):
                    if self.runs[index].key == record.run:
                        self.runs[index] = replace(self.runs[index], difference=record.difference)
                        break

    def categories(self) -> list[str]:
        """In the order they first appear."""
        return list(dict.fromkeys(run.category for run in self.runs))

    def of(self, entrant: str, category: str | None = None) -> list[Run]:
        return [run for run in self.runs if run.entrant == entrant and category in (None, run.category)]


RESULTS = LineFormat(
    Content.RESULTS,
    1,
    Header,
    {
        "run": Run,
        "costs": PassTimes,
        "oracle": OraclePasses,
        "signal-bound": SignalBound,
        "skipped": Skipped,
        "difference": RunDifference,
    },
)
"""A results file; what its lines hold, `RunSet.add` takes."""


def as_record(header: Header) -> dict[str, Any]:
    """A header with all its fields as plain values; what only hierarchies have is left out where it is empty."""
    record = TypeAdapter(Header).dump_python(header, mode="json")
    return {name: value for name, value in record.items() if value or name not in OF_HIERARCHIES}


def read_results(path: Path) -> RunSet:
    """Read a results file, without what a write that was interrupted left at its end.

    Raises:
        UsageError: it cannot be read, holds something else, or a line of it is damaged.
    """
    records = RESULTS.read(path)
    results = RunSet(next(records))
    for record in records:
        results.add(record)
    return results
