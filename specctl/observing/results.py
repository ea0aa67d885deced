"""What a benchmark writes down: one header, then one line for each finished run. No torch here."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from specctl.errors import UsageError
from specctl.records import CompletionSummary, RoundSummary

SCHEMA_VERSION = 1
BASELINE = "none"
OF_HIERARCHIES = frozenset({"levels", "inner", "drafts", "further_ms"})
"""Keys that are written only where they hold something."""


@dataclass(frozen=True, slots=True)
class Level:
    """One draft model of an entrant with the policy that stops it.

    Attributes:
        draft: which of the loaded drafts, a place in `Header.drafts`.
        once: in a hierarchy, whether it offers its block after a single round of the level below.
        head: which of the draft's heads foretells acceptance, where several of its heads are compared.
    """

    draft: int
    policy: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    once: bool = False
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Entrant:
    """Someone who runs every prompt: a policy of ours with its settings, or a peer.

    Attributes:
        label: its name in tables, unique in a benchmark.
        kind: ``policy`` or ``peer`` (transformers' own assisted generation on the same loaded models).
        name: the policy's or peer's name.
        settings: every setting, defaults included.
        levels: its drafts, the one that the target verifies first, whose policy is the entrant's own; empty where
            that is the first loaded draft, nobody drafts for it and it has one head at most.
    """

    label: str
    kind: Literal["policy", "peer"]
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    levels: tuple[Level, ...] = ()

    @property
    def places(self) -> tuple[int, ...]:
        """Which loaded drafts it uses, from the target down; of a peer and of the baseline the first is meant."""
        return tuple(level.draft for level in self.levels) or (0,)

    @property
    def family(self) -> str:
        """What it has in common with the same policies on the same models at other settings."""
        if not self.levels:
            return self.name
        return " < ".join(
            f"{level.policy}{'(once)' * level.once}@{level.draft}" + (f" {level.head}" if level.head else "")
            for level in self.levels
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an entrant's greedy tokens left the baseline's.

    Attributes:
        turn, position: of the first difference.
        expected, found: the baseline's token and this one's; None past the end.
        gap: the baseline's top target logit minus its second there: a tie shows as (nearly) 0.
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
    def rounds(self) -> Iterator[RoundSummary]:
        return (round_ for turn in self.turns for round_ in turn.rounds)


@dataclass(frozen=True, slots=True)
class Costs:
    """Bare forward times in milliseconds, measured without the loop.

    Attributes:
        draft: of one step of the first draft.
        target: by number of tokens in the pass.
        drafts: where several drafts are loaded, of each of them by number of tokens in the pass.
        head: what the first draft's head adds to a draft step; None where there was none.
    """

    draft: float
    target: Mapping[int, float]
    drafts: tuple[Mapping[int, float], ...] = ()
    head: float | None = None


@dataclass(frozen=True, slots=True)
class SignalBound:
    """The best stopping rule on entropy and top probability, played on the baseline's outputs (one run of each prompt).

    Attributes:
        drafted, passes: draft steps and target passes it makes for so many tokens.
    """

    prompts: int
    tokens: int
    drafted: int
    passes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Where the numbers come from: everything needed to judge or repeat them.

    Attributes:
        profile: the resolved profile.
        suite: name, sha256 of the prompts and their number.
        sampling: the sampling table in force.
        oracle: whether `RunSet.oracle` was asked for.
        drafts: the loaded draft models by name, where there are several.
        engines: how each model's passes run, by its key in the profile.
        synthetic: whether the weights are random, made to a shape for the sake of speed.
    """

    created: str
    argv: list[str]
    versions: dict[str, str]
    devices: dict[str, str]
    profile: dict[str, Any]
    suite: dict[str, Any]
    sampling: dict[str, Any]
    entrants: list[Entrant]
    repeats: int
    lengths: list[int]
    oracle: bool = False
    schema_version: int = SCHEMA_VERSION
    drafts: list[str] = field(default_factory=list)
    engines: dict[str, str] = field(default_factory=dict)
    synthetic: bool = False

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
    costs: Costs | None = None
    oracle: dict[str, int] = field(default_factory=dict)
    signal_bound: SignalBound | None = None
    skipped: dict[str, str] = field(default_factory=dict)

    def categories(self) -> list[str]:
        """In the order they first appear."""
        return list(dict.fromkeys(run.category for run in self.runs))

    def of(self, entrant: str, category: str | None = None) -> list[Run]:
        return [run for run in self.runs if run.entrant == entrant and category in (None, run.category)]


def header_line(header: Header) -> dict[str, Any]:
    return {"kind": "header", **_whole(header)}


def run_line(run: Run) -> dict[str, Any]:
    return {"kind": "run", **_whole(replace(run, difference=None))}


def costs_line(costs: Costs) -> dict[str, Any]:
    return {"kind": "costs", **_whole(costs)}


def _whole(facts: Any) -> dict[str, Any]:
    return asdict(
        facts, dict_factory=lambda items: {key: value for key, value in items if value or key not in OF_HIERARCHIES}
    )


def oracle_line(prompt: str, passes: int) -> dict[str, Any]:
    return {"kind": "oracle", "prompt": prompt, "passes": passes}


def signal_bound_line(bound: SignalBound) -> dict[str, Any]:
    return {"kind": "signal-bound", **asdict(bound)}


def skipped_line(prompt: str, reason: str) -> dict[str, Any]:
    return {"kind": "skipped", "prompt": prompt, "reason": reason}


def difference_line(run: Run, difference: Difference) -> dict[str, Any]:
    """A line of its own, because it is known only when the baseline has run too."""
    return {"kind": "difference", "run": list(run.key), **asdict(difference)}


def read_results(path: Path) -> RunSet:
    """Read a results file; a torn last line is ignored.

    Raises:
        UsageError: it cannot be read, or is not a results file of this schema.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        return _run_set(map(json.loads, lines))
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is not a benchmark results file ({error})") from error


def _run_set(lines: Iterable[dict[str, Any]]) -> RunSet:
    results: RunSet | None = None
    differences: dict[tuple[str, str, int, int], Difference] = {}
    for line in lines:
        kind = line.pop("kind")
        if results is None:
            if kind != "header" or line["schema_version"] != SCHEMA_VERSION:
                raise ValueError("its first line is no header of this version")
            entrants = [_entrant(entrant) for entrant in line.pop("entrants")]
            results = RunSet(Header(**line, entrants=entrants))
        elif kind == "run":
            results.runs.append(_run(line))
        elif kind == "costs":
            results.costs = Costs(
                line["draft"],
                _by_width(line["target"]),
                tuple(map(_by_width, line.get("drafts", ()))),
                line.get("head"),
            )
        elif kind == "oracle":
            results.oracle[line["prompt"]] = line["passes"]
        elif kind == "signal-bound":
            results.signal_bound = SignalBound(**line)
        elif kind == "skipped":
            results.skipped[line["prompt"]] = line["reason"]
        elif kind == "difference":
            differences[tuple(line.pop("run"))] = Difference(**line)
    if results is None:
        raise ValueError("it is empty")
    results.runs = [
        replace(run, difference=differences.get(run.key)) for run in results.runs if run.prompt not in results.skipped
    ]
    return results


def _entrant(line: dict[str, Any]) -> Entrant:
    return Entrant(**{**line, "levels": tuple(Level(**level) for level in line.get("levels", ()))})


def _by_width(times: dict[str, float]) -> dict[int, float]:
    return {int(width): time for width, time in times.items()}


def _run(line: dict[str, Any]) -> Run:
    turns = []
    for turn in line.pop("turns"):
        rounds = tuple(map(_round, turn.pop("rounds")))
        turns.append(CompletionSummary(**{**turn, "tokens": tuple(turn["tokens"])}, rounds=rounds))
    return Run(**line, turns=tuple(turns))


def _round(line: dict[str, Any]) -> RoundSummary:
    return RoundSummary(**{**line, "inner": tuple(map(_round, line.get("inner", ())))})
