"""What a benchmark writes down: one header, then one line for each finished run. No torch here."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specctl.errors import UsageError
from specctl.policies import NONE, Setting
from specctl.profile.model_names import distinct_name
from specctl.records import CompletionSummary, RoundSummary

SCHEMA_VERSION = 1
BASELINE = "none"
OF_HIERARCHIES = frozenset({"levels", "inner", "drafts", "further_ms"})
"""Keys that are written only where they hold something."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """What competes in a benchmark: a setting on some of the loaded drafts, or a peer.

    Attributes:
        label: its name in tables, unique in a benchmark.
        setting: how the drafts are stopped; None for a peer.
        drafts: for each level of the setting the loaded draft that plays it, a position in `Header.drafts`.
        peer: name of transformers' own assisted generation with ``peer_settings``; None for a setting.
        peer_settings: the peer's arguments.
    """

    label: str
    setting: Setting | None = NONE
    drafts: tuple[int, ...] = (0,)
    peer: str | None = None
    peer_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the policy that stops the draft which the target verifies, or of the peer."""
        return self.peer or (self.setting.policy if self.setting is not None else "")

    @property
    def values(self) -> Mapping[str, Any]:
        """Every value of that policy, defaults included, or the peer's arguments."""
        return self.peer_settings if self.setting is None else self.setting.all_values

    @property
    def family(self) -> str:
        """What it has in common with the same policies on the same models with other values."""
        if self.setting is None:
            return self.name
        if self.drafts == (0,):
            return self.setting.family
        return f"{self.setting.family} on drafts {', '.join(map(str, self.drafts))}"


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
    def decode_ms(self) -> float:
        """Wall time after the prompt, in milliseconds."""
        return sum(turn.total_ms - turn.prefill_ms for turn in self.turns)

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


def header_record(header: Header) -> dict[str, Any]:
    """A header as plain values, as files and JSON documents hold it."""
    return {**_whole(replace(header, entrants=[])), "entrants": list(map(entrant_record, header.entrants))}


def header_line(header: Header) -> dict[str, Any]:
    return {"kind": "header", **header_record(header)}


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
            entrants = [entrant_of(entrant) for entrant in line.pop("entrants")]
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


def entrant_record(entrant: Entrant) -> dict[str, Any]:
    """An entrant as a results file holds it: ``levels`` only where other than the first draft is used alone."""
    record: dict[str, Any] = {
        "label": entrant.label,
        "kind": "policy" if entrant.peer is None else "peer",
        "name": entrant.name,
        "settings": dict(entrant.values),
    }
    levels = entrant.setting.levels if entrant.setting is not None else ()
    if len(levels) > 1 or entrant.drafts != (0,) or any(level.head is not None for level in levels):
        record["levels"] = [
            {
                "draft": draft,
                "policy": level.policy,
                "settings": level.all_values,
                "once": level.once,
                "head": level.head,
            }
            for draft, level in zip(entrant.drafts, levels, strict=True)
        ]
    return record


def entrant_of(record: Mapping[str, Any]) -> Entrant:
    """The entrant that a results file describes."""
    if record["kind"] == "peer":
        return Entrant(record["label"], None, peer=record["name"], peer_settings=record["settings"])
    own = {"draft": 0, "policy": record["name"], "settings": record["settings"]}
    records = record.get("levels") or [own]
    heads = [level["head"] for level in records if level.get("head") is not None]
    setting: Setting | None = None
    for level in reversed(records):
        head = level.get("head")
        setting = replace(
            Setting.of({**level["settings"], "name": level["policy"]}),
            once=level.get("once", False),
            below=setting,
            head=head,
            head_label=head and distinct_name(head, heads),
        )
    return Entrant(record["label"], setting, tuple(level["draft"] for level in records))


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
