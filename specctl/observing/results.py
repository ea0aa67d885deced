"""The results file of a benchmark: a header about models and machine, then one line per finished run. This module does
not import torch.
"""

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from specctl import __version__
from specctl.errors import UsageError
from specctl.files import Content, LineFormat
from specctl.models.llama.library import package
from specctl.models.running.engines import engine_report
from specctl.models.running.pair import Pair
from specctl.models.running.threads import threads_of
from specctl.peers.engines import ASSISTED
from specctl.policies import NONE, Setting
from specctl.policies.setting import TreeSize
from specctl.profile.schema import Profile
from specctl.profile.wording import distinct_name
from specctl.prompts.suites import Suite
from specctl.records import CompletionSummary, RoundSummary
from specctl.statistics import Floats, Interval, bootstrap

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Candidate:
    """A competitor in a benchmark: a setting on some of the loaded drafts, or a peer."""

    label: str  # the name in tables, unique in a benchmark
    setting: Setting | None = NONE  # the policies with their values; None for a peer
    drafts: tuple[int, ...] = (0,)  # for each level of the setting, the index of its draft in `Header.drafts`
    peer: str | None = None  # the peer's name; None for a setting
    # the peer's arguments; ``draft`` is the drafting method of a peer in a separate process
    peer_settings: Mapping[str, Any] = field(default_factory=dict)
    # ``eager`` for a setting that runs eagerly while others use another engine; None for the profile's engine
    engine: Literal["eager"] | None = None

    @property
    def name(self) -> str:
        """The name of the first draft's policy, or of the peer."""
        return self.peer or (self.setting.policy if self.setting is not None else "")

    @property
    def values(self) -> Mapping[str, Any]:
        """All values of the first draft's policy, defaults included, or the peer's arguments."""
        return self.peer_settings if self.setting is None else self.setting.all_values

    @property
    def way(self) -> str | None:
        """The drafting method of a peer in a separate process; None for any other candidate."""
        return None if self.setting is not None else self.peer_settings.get("draft")

    @property
    def drafts_trees(self) -> bool:
        """Whether it drafts trees, with several tokens per draft pass."""
        return self.setting is not None and self.setting.tree is not None

    @property
    def parallel(self) -> bool:
        """Whether its draft runs in parallel with verification, so that their times do not add up."""
        return self.setting is not None and self.setting.parallel is not None

    @property
    def takes_turns_in_chains(self) -> bool:
        """Whether its passes run in turns and each draft pass reads one token. Only then can they be priced."""
        return not self.drafts_trees and not self.parallel and self.engine is None

    @property
    def family(self) -> str:
        """A name shared by all candidates with the same policies and models, whatever the policies' values."""
        if self.setting is None:
            return f"{self.name}:{self.way}" if self.way is not None else self.name
        family = self.setting.family if self.engine is None else f"{self.setting.family}, {self.engine}"
        if self.drafts == (0,):
            return family
        return f"{family} on drafts {', '.join(map(str, self.drafts))}"

    def ran_on(self, engines: Mapping[str, str]) -> str | None:
        """The engine of its passes, given the models' engines; None if unknown.

        If its models ran on several engines, each is named: ``target graph, draft eager``.
        """
        if self.peer is not None:
            # transformers calls the models directly, whatever engine the profile uses.
            return "eager" if self.peer in ASSISTED else self.peer
        if self.engine is not None:
            return self.engine
        used = () if self.setting == NONE else self.drafts
        # Levels have their names in a profile; loaded drafts are named as if they were levels.
        keys = {"target": "target", **{level_key(place): level_key(draft) for place, draft in enumerate(used)}}
        # A reason in parentheses may follow the engine's name.
        ran = {level: engines[key].partition(" (")[0] for level, key in keys.items() if key in engines}
        if len(set(ran.values())) > 1:
            return ", ".join(f"{key} {engine}" for key, engine in ran.items())
        return next(iter(ran.values()), None)

    @property
    def eagerly(self) -> "Candidate":
        """The same candidate on the eager engine."""
        return replace(self, label=f"{self.label} (eager)", engine="eager")


def level_key(index: int) -> str:
    """The name of a level below the target, from 0 on, as in a profile's tables: ``draft``, ``draft.draft``."""
    return "draft" + ".draft" * index


def candidate_record(candidate: Candidate) -> dict[str, Any]:
    """A candidate as in a results file. ``levels`` is omitted if the first draft drafts alone, without a named head,
    trees, a lookup or parallel drafting.
    """
    record: dict[str, Any] = {
        "label": candidate.label,
        "kind": "policy" if candidate.peer is None else "peer",
        "name": candidate.name,
        "settings": dict(candidate.values),
        **({"engine": candidate.engine} if candidate.engine is not None else {}),
    }
    levels = candidate.setting.levels if candidate.setting is not None else ()
    if (
        len(levels) > 1
        or candidate.drafts != (0,)
        or any(level.head or level.tree or level.parallel or level.lookup for level in levels)
    ):
        record["levels"] = [
            {
                "draft": draft,
                "policy": level.policy,
                "settings": level.all_values,
                "once": level.once,
                "head": level.head,
                **({"tree": level.tree.tokens, "tree_beams": level.tree.beams} if level.tree is not None else {}),
                **({"parallel": level.parallel} if level.parallel is not None else {}),
                **({"lookup": True, "earlier": level.earlier} if level.lookup else {}),
            }
            for draft, level in zip(candidate.drafts, levels, strict=True)
        ]
    return record


def candidate_of(record: Mapping[str, Any]) -> Candidate:
    """Parse a candidate of a results file."""
    if not isinstance(record["label"], str):
        raise TypeError("a candidate's label is not text")
    if record["kind"] == "peer":
        return Candidate(record["label"], None, peer=record["name"], peer_settings=record["settings"])
    alone = {"draft": 0, "policy": record["name"], "settings": record["settings"]}
    records = record.get("levels") or [alone]
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
            tree=TreeSize(level["tree"], level["tree_beams"]) if "tree" in level else None,
            parallel=level.get("parallel"),
            lookup=level.get("lookup", False),
            earlier=level.get("earlier", 0),
        )
    drafts = tuple(level["draft"] for level in records)
    return Candidate(record["label"], setting, drafts, engine=record.get("engine"))


@dataclass(frozen=True, slots=True)
class OraclePasses:
    """The fewest target passes for a prompt that Theorem 4.1 of SpecDec++ allows, |S| + 1."""

    prompt: str
    passes: int


@dataclass(frozen=True, slots=True)
class Stretches:
    """For each turn of a prompt, how parallel drafting would split the baseline's text, see `specctl.replay.pearl`."""

    prompt: str
    # for each turn, numbers of draft tokens from a fresh start of the draft to the rejected token or the end
    turns: list[list[int]]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that cannot be run on these models, with the reason."""

    prompt: str
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A peer that failed in a run, with the reason; it does not run again in the same benchmark."""

    candidate: str
    reason: str


@dataclass(frozen=True, slots=True)
class SignalBound:
    """The best stopping rule on entropy and top probability, replayed on one of the baseline's runs of each prompt."""

    # prompts, tokens: number of prompts, and of tokens in their outputs
    prompts: int
    tokens: int
    # drafted, passes: number of draft steps and target passes of the rule for these tokens
    drafted: int
    passes: int


BASELINE = "none"
OF_HIERARCHIES = frozenset({"levels", "inner", "drafts", "further_ms"})
"""Keys that the JSON document leaves out where they are empty; only hierarchies have them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token at which a candidate's greedy output differs from the baseline's."""

    # turn, position: where the first difference is
    turn: int
    position: int
    # expected, found: the baseline's token and the candidate's token; None past the end
    expected: int | None
    found: int | None
    gap: float | None  # the target's largest logit minus its second largest at that position; (nearly) 0 in a tie


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a candidate on a prompt."""

    candidate: str  # label of the candidate
    prompt: str  # the prompt's id, as text
    category: str
    repeat: int  # the repeat, from 0, for this prompt and length
    length: int  # the run's token limit
    turns: tuple[CompletionSummary, ...]  # a summary for each turn
    # in greedy decoding, the first difference from the baseline's tokens; None if they are equal
    difference: Difference | None = None
    # for transformers' ``hf-confidence``, each turn's thresholds of the first and last draft, or None without a draft;
    # empty for other candidates
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
    """A difference and the `Run.key` of its run. It has its own line because the baseline may run later."""

    run: tuple[str, str, int, int]

    @property
    def difference(self) -> Difference:
        return Difference(self.turn, self.position, self.expected, self.found, self.gap)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Milliseconds of bare forward passes of the loaded models, measured without the loop."""

    draft: float  # a pass of the first draft over one token
    target: Mapping[int, float]  # passes of the target, by number of tokens in the pass
    # passes of each draft, by number of tokens in the pass; empty for a single draft
    drafts: tuple[Mapping[int, float], ...] = ()
    head: float | None = None  # the time that the first draft's head adds to a draft step; None without a head

    def __post_init__(self) -> None:
        if not self.target or any(1 not in passes for passes in self.drafts):
            raise ValueError("passes of one token are missing")

    def step_ms(self, draft: int) -> float:
        """The time of a draft's one-token pass; ``draft`` is its index in `Header.drafts`, 0 for a single draft."""
        return self.drafts[draft][1] if self.drafts else self.draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The provenance of numbers: everything needed to assess or repeat them."""

    created: str  # when the run began, in ISO 8601
    argv: list[str]  # the command's arguments
    versions: dict[str, str]  # of the packages, by name
    devices: dict[str, str]  # of each model, by its key in the profile
    profile: dict[str, Any]  # the resolved profile
    suite: dict[str, Any]  # name, sha256 of the prompts and their number
    sampling: dict[str, Any]  # the sampling table in force
    engines: dict[str, str] = field(default_factory=dict)  # the engine of each model, by its key in the profile
    synthetic: bool = False  # whether a model has random weights, made for measurements of speed
    threads: int | None = None  # the number of threads for passes on the CPU; None if not recorded
    # the number of this process's cores kept busy by other processes while the models were loaded; None if unknown
    others_busy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Header(Facts):
    """The first line of a results file."""

    # the candidates of the benchmark
    candidates: list[Annotated[Candidate, PlainValidator(candidate_of), PlainSerializer(candidate_record)]]
    # repeats, lengths: the number of runs per prompt, and their token limits
    repeats: int
    lengths: list[int]
    oracle: bool = False  # whether to compute `RunSet.oracle`
    # in a comparison of the papers' policies, the reason for each one that the pair could not run, by name
    papers: dict[str, str] | None = None
    drafts: list[str] = field(default_factory=list)  # names of the loaded draft models; empty for a single draft
    batch: int = 1  # the number of prompts that each candidate ran at once

    def candidate(self, label: str) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.label == label)

    def engine_of(self, label: str) -> str | None:
        """`Candidate.ran_on` of a candidate."""
        return self.candidate(label).ran_on(self.engines)


@dataclass(slots=True)
class RunSet:
    """A whole results file."""

    header: Header  # the first line
    runs: list[Run] = field(default_factory=list)  # all finished runs
    costs: PassTimes | None = None  # the latest times of bare forward passes
    # by prompt id, the fewest target passes that Theorem 4.1 of SpecDec++ allows, |S| + 1
    oracle: dict[str, int] = field(default_factory=dict)
    signal_bound: SignalBound | None = None  # computed with the oracle, once all prompts have run
    # by prompt id, computed with the oracle unless the first draft is a draft head
    stretches: dict[str, list[list[int]]] = field(default_factory=dict)
    # by prompt id, the reason why this pair cannot run it; such a prompt has no runs
    skipped: dict[str, str] = field(default_factory=dict)
    # by label, the reason why a peer could not finish its runs; removed if it finishes them later
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
                # Its run has been added shortly before.
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
    """The `Facts` known before any model is loaded."""
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


def compare(results: RunSet) -> list[tuple[Run, Difference | None]]:
    """Compare every run with the baseline's first run of the same prompt and length; the baseline's repeats too.

    Tokens are compared, so differences not recorded while measuring are found too.
    """
    first: dict[tuple[str, int], Run] = {}
    for run in results.of(BASELINE):
        first.setdefault((run.prompt, run.length), run)
    pairs = ((run, first.get((run.prompt, run.length))) for run in results.runs)
    return [
        (run, run.difference or _difference(run, baseline))
        for run, baseline in pairs
        if run is not baseline and (baseline or run.difference)
    ]


def _difference(run: Run, baseline: Run | None) -> Difference | None:
    if baseline is None:
        return None
    turns = zip_longest((turn.tokens for turn in baseline.turns), (turn.tokens for turn in run.turns), fillvalue=())
    for number, (expected, found) in enumerate(turns):
        for position, (ours, theirs) in enumerate(zip_longest(expected, found)):
            if ours != theirs:
                return Difference(number, position, ours, theirs, None)
    return None


class Speedup(NamedTuple):
    """Ratio of a candidate's speed to the baseline's on the prompts that both finished."""

    of_totals: Interval  # ratio of total speeds, each being all tokens divided by all seconds
    of_prompts: Interval  # mean over prompts of the ratio of tokens/s
    prompts: int  # number of paired prompts


def evened(runs: Sequence[Run]) -> list[Run]:
    """The runs, duplicated so that every prompt and length has the same number of runs."""
    cells = list(_cells(runs).values())
    times = lcm(*map(len, cells))
    return [run for repeats in cells for run in repeats * (times // len(repeats))]


def speedup(runs: Sequence[Run], baseline: Sequence[Run]) -> Speedup | None:
    """The speedup on the prompts (and lengths) that both finished; None if they have none in common."""
    by_prompt = paired(runs, baseline, speed_figures)
    if not by_prompt:
        return None
    sums = np.stack(list(by_prompt.values()))  # (prompts, 4)
    ratios = speed_ratio(sums)
    prompts = len(ratios)

    def of_totals(weights: Floats) -> Floats:
        return speed_ratio(weights @ sums)

    def of_prompts(weights: Floats) -> Floats:
        return weights @ ratios / prompts

    return Speedup(bootstrap(of_totals, prompts), bootstrap(of_prompts, prompts), prompts)


def speed_figures(run: Run) -> tuple[float, float]:
    """Tokens and seconds of a run."""
    return run.tokens, run.seconds


def paired(runs: Iterable[Run], others: Iterable[Run], figures: Callable[[Run], Sequence[float]]) -> dict[str, Floats]:
    """Figures of two sets of runs side by side, for each prompt that both finished with at least one length.

    A missing figure counts as 0; prompts and lengths with a mean of 0 are left out because they have no ratio.

    Args:
        figures: N numbers of a run.

    Returns:
        By prompt (2 N,): the N figures of the runs, then those of the others, each the mean of repeats, summed over
        lengths.
    """
    mine, theirs = _means(runs, figures), _means(others, figures)
    by_prompt: dict[str, Floats] = {}
    for cell, numbers in mine.items():
        if cell in theirs:
            pair = np.concatenate([numbers, theirs[cell]])
            by_prompt[cell[0]] = by_prompt.get(cell[0], 0.0) + pair
    return by_prompt


def _cells(runs: Iterable[Run]) -> dict[tuple[str, int], list[Run]]:
    cells: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.prompt, run.length), []).append(run)
    return cells


def _means(runs: Iterable[Run], figures: Callable[[Run], Sequence[float]]) -> dict[tuple[str, int], Floats]:
    """Means of the repeats by prompt and length, without those where one is 0."""
    means = {cell: np.mean([figures(run) for run in repeats], axis=0) for cell, repeats in _cells(runs).items()}
    return {cell: numbers for cell, numbers in means.items() if numbers.all()}


def speed_ratio(sums: Floats) -> Floats:
    """Tokens/s over the baseline's tokens/s from rows of tokens, seconds, baseline tokens, baseline seconds."""
    tokens, seconds, baseline_tokens, baseline_seconds = sums.T
    ratio: Floats = tokens * baseline_seconds / (seconds * baseline_tokens)
    return ratio


SCIKIT_LEARN = "scikit-learn"


def gather(pair: Pair, profile: Profile, suite: Suite) -> Facts:
    """The provenance of a run that starts now: arguments, versions, devices, profile and suite."""
    runners = {"target": pair.target} | {level_key(level): draft for level, draft in enumerate(pair.drafts)}
    llama = package() if any(runner.engine.startswith("llama.cpp") for runner in runners.values()) else None
    return Facts(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=sys.argv[1:],
        versions={
            "python": platform.python_version(),
            "specctl": __version__,
            **{name: version(name) for name in ("torch", "transformers")},
            **({} if llama is None else {llama.name: llama.version}),
        },
        devices={key: device_name(runner.device, threads_of(runner)) for key, runner in runners.items()},
        **of_request(profile, suite),
        engines={key: engine_report(runner) for key, runner in runners.items()},
        synthetic=any(model is not None and getattr(model.config, "synthetic", False) for model in pair.models),
        threads=pair.thread_count,
        others_busy=pair.threads.others_busy if pair.threads is not None else None,
    )


def device_name(device: "torch.device", threads: int) -> str:
    """The device and its hardware, as text; of a CPU with the threads of a pass."""
    if device.type == "cuda":
        import torch

        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({cpu_name()}, {threads} threads)"


def scikit_learn() -> str:
    """The version of scikit-learn, which adapts transformers' ``hf-confidence`` threshold; else ``none``."""
    try:
        return version(SCIKIT_LEARN)
    except PackageNotFoundError:
        return "none"


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's model; its architecture where the system does not name the model."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return " ".join(value.split())
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
