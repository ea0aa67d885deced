"""Two results files compared: their conditions, and the change of each candidate."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specctl.benchmark.report import reasons
from specctl.errors import UsageError
from specctl.observing.results import (
    BASELINE,
    Candidate,
    Header,
    Run,
    RunSet,
    Speedup,
    as_record,
    candidate_record,
    paired,
    read_results,
    speed_figures,
    speed_ratio,
    speedup,
)
from specctl.printable import counted
from specctl.records import CompletionSummary
from specctl.reporting.placing import times
from specctl.reporting.table import DEFINITIONS, UNKNOWN, Columns, Table, plain
from specctl.statistics import Floats, Interval, bootstrap, is_clear

NOT_COMPARED = frozenset(
    {"created", "argv", "candidates", "oracle", "others_busy", "papers", "schema_version", "threads"}
)
"""Header fields that are not measurement conditions, or repeat others (devices contain the threads); candidates
are compared one by one."""
NOT_OF_THE_MODELS = frozenset({"sampling", "policy", "description", "provenance", "schema_version", "threads"})
"""Tables of a profile that repeat the header or the candidates, or do not affect runs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A measurement condition with its value in each file; None where a file lacks it."""

    fact: str
    a: Any
    b: Any


def header_differences(a: Header, b: Header) -> Iterator[Difference]:
    """The differences between the conditions of two results files."""
    drawn = all(header.sampling.get("temperature") for header in (a, b))
    ours, theirs = (
        {**as_record(header), "drafts": header.drafts, "sampling": _sampling(header, drawn=drawn)} for header in (a, b)
    )
    for name in ours:
        if name not in NOT_COMPARED:
            yield from _differences(name, ours[name], theirs[name])


def setting_differences(pairs: Iterable[tuple[Candidate, Candidate]]) -> Iterator[Difference]:
    """Values that differ under equal labels, for example where versions have other defaults."""
    for a, b in pairs:
        if a.label == b.label:
            yield from _differences(a.label, candidate_record(a), candidate_record(b))


def _sampling(header: Header, *, drawn: bool) -> dict[str, Any]:
    """The sampling table, ``verification`` where both files drew tokens."""
    table = header.sampling
    return table if drawn else {key: value for key, value in table.items() if key != "verification"}


def _differences(name: str, a: Any, b: Any) -> Iterator[Difference]:
    """The leaves of two values that differ, each with its dotted name; a missing table has no leaves."""
    tables = [isinstance(value, dict) for value in (a, b)]
    if all(tables) or (any(tables) and None in (a, b)):
        a, b = a or {}, b or {}
        for key in dict.fromkeys([*a, *b]):
            if not (name.startswith("profile") and key in NOT_OF_THE_MODELS):
                yield from _differences(f"{name}.{key}", a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and any(isinstance(one, dict) for one in a):
        for index, (ours, theirs) in enumerate(zip(a, b, strict=True)):
            yield from _differences(f"{name}.{index}", ours, theirs)
    elif a != b:
        yield Difference(name, a, b)


class Texts(NamedTuple):
    """The numbers of runs compared token by token, and of runs that differ."""

    compared: int
    differing: int


class Sides(NamedTuple):
    """The same number in both files."""

    a: float
    b: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One candidate in both files, on the prompts that both finished."""

    # a, b: its labels; they differ where B has no candidate with A's label, but one of the same policies
    a: str
    b: str
    tokens_per_second: Sides  # of both, each all tokens over all seconds
    ratio: Speedup  # B's speed over A's
    # the same over what `none`'s is: B's speedup over A's. None where a file lacks `none`.
    against_none: Interval | None
    # ttft, tpot: B's mean latency over A's; below 1, B is quicker. None where it is not known.
    ttft: Interval | None
    tpot: Interval | None
    texts: Texts  # of the runs that both have

    @property
    def name(self) -> str:
        return self.a if self.a == self.b else f"{self.a} (A), {self.b} (B)"

    @property
    def verdict(self) -> str:
        """One line: how fast B is, and whether it writes the same."""
        ratio = self.ratio.of_totals
        if ratio.low is None:
            who = "one prompt cannot show which is faster"
        elif is_clear(ratio):
            who = f"{'B' if ratio.value > 1 else 'A'} is faster"
        else:
            who = "A and B are level"
        compared, differing = self.texts
        same = f"texts differ in {differing} of {compared} runs" if differing else "texts identical"
        return f"{self.name}: {who}, B at {times(ratio)} of A; {same if compared else 'texts not compared'}"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the files: its path, the start of its run, and its number of runs."""

    file: str
    started: str
    runs: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results files compared."""

    # a, b: the files
    a: Side
    b: Side
    candidates: list[Compared]  # those of both, in A's order
    candidates_left_out: dict[str, str]  # by label, why
    prompts_left_out: dict[str, str]  # by id, why
    differences: list[Difference]  # facts that differ

    @property
    def none_differs(self) -> Interval | None:
        """`none`'s ratio if its interval excludes 1: then the machine itself differs, which affects every ratio."""
        found = next((one.ratio.of_totals for one in self.candidates if one.a == one.b == BASELINE), None)
        return found if found is not None and is_clear(found) else None

    @property
    def alike(self) -> bool:
        """Whether nothing but versions of packages differs."""
        return all(difference.fact.startswith("versions.") for difference in self.differences)


def compare_files(a: Path, b: Path) -> Comparison:
    """Compare two results files; neither is changed.

    Raises:
        UsageError: a file cannot be read, or they have no candidate or no prompt in common.
    """
    return compare_results(read_results(a), read_results(b), str(a), str(b))


def compare_results(a: RunSet, b: RunSet, file_a: str = "A", file_b: str = "B") -> Comparison:
    """Like `compare_files`, for files already read.

    Raises:
        UsageError: they have no candidate or no prompt in common.
    """
    pairs = pair_up(_candidates(a), _candidates(b))
    if not pairs:
        raise UsageError(
            f"{file_a} and {file_b} have no candidate in common", "compare files that measured the same policies"
        )
    left_out = _prompts_left_out(a, b)
    drift = paired(_runs(b, BASELINE, left_out), _runs(a, BASELINE, left_out), speed_figures)
    found: list[Compared] = []
    alone = {one.label: "only in A" for one in _candidates(a) if one not in [mine for mine, _ in pairs]}
    alone |= {one.label: "only in B" for one in _candidates(b) if one not in [theirs for _, theirs in pairs]}
    for mine, theirs in pairs:
        labels = mine.label, theirs.label
        compared = _compare(labels, _runs(a, mine.label, left_out), _runs(b, theirs.label, left_out), drift)
        if compared is None:
            alone[mine.label] = "no prompt in common"
        else:
            found.append(compared)
    if not found:
        raise UsageError(
            f"{file_a} and {file_b} have no prompt in common that a candidate finished in both with one limit",
            "compare files that ran the same prompts to the same --lengths",
        )
    return Comparison(
        a=Side(file_a, a.header.created, len(a.runs)),
        b=Side(file_b, b.header.created, len(b.runs)),
        candidates=found,
        candidates_left_out=alone,
        prompts_left_out=left_out,
        differences=[*header_differences(a.header, b.header), *setting_differences(pairs)],
    )


def pair_up(a: Sequence[Candidate], b: Sequence[Candidate]) -> list[tuple[Candidate, Candidate]]:
    """Pair candidates with equal labels; each other one gets the nearest label of the same policies or peer."""
    others = {candidate.label: candidate for candidate in b}
    found = {candidate.label: others.pop(candidate.label) for candidate in a if candidate.label in others}
    for candidate in a:
        if candidate.label not in found:
            near = [label for label, other in others.items() if other.family == candidate.family]
            for label in get_close_matches(candidate.label, near, 1, cutoff=0.0):
                found[candidate.label] = others.pop(label)
    return [(candidate, found[candidate.label]) for candidate in a if candidate.label in found]


def _candidates(results: RunSet) -> list[Candidate]:
    ran = {run.candidate for run in results.runs}
    return [candidate for candidate in results.header.candidates if candidate.label in ran]


def _runs(results: RunSet, candidate: str, left_out: Mapping[str, str]) -> list[Run]:
    return [run for run in results.of(candidate) if run.prompt not in left_out]


def _prompts_left_out(a: RunSet, b: RunSet) -> dict[str, str]:
    mine, theirs = (dict.fromkeys(run.prompt for run in results.runs) for results in (a, b))
    found = {prompt: "only in A" for prompt in mine if prompt not in theirs}
    found |= {prompt: "only in B" for prompt in theirs if prompt not in mine}
    same_prompts = a.header.suite.get("sha256") == b.header.suite.get("sha256")
    if not same_prompts and _target(a.header) == _target(b.header):
        # Ids may be mere line numbers, so token counts are compared too: equal prompts have equal counts.
        lengths_a, lengths_b = (
            {run.prompt: run.turns[0].prompt_tokens for run in results.runs if run.turns} for results in (a, b)
        )
        found |= {
            prompt: f"{length} tokens in A, {lengths_b[prompt]} in B"
            for prompt, length in lengths_a.items()
            if lengths_b.get(prompt, length) != length
        }
    return found


def _target(header: Header) -> Any:
    return header.profile.get("target", {}).get("model")


def _compare(labels: tuple[str, str], a: list[Run], b: list[Run], drift: Mapping[str, Floats]) -> Compared | None:
    ratio = speedup(b, a)
    if ratio is None:
        return None
    speeds = paired(b, a, speed_figures)
    tokens_b, seconds_b, tokens_a, seconds_a = np.sum(list(speeds.values()), axis=0)
    drifted = [np.concatenate([row, drift[prompt]]) for prompt, row in speeds.items() if prompt in drift]
    return Compared(
        *labels,
        tokens_per_second=Sides(float(tokens_a / seconds_a), float(tokens_b / seconds_b)),
        ratio=ratio,
        against_none=_over_prompts(drifted, lambda sums: speed_ratio(sums[:, :4]) / speed_ratio(sums[:, 4:])),
        ttft=_ratio_of_means(b, a, lambda turn: turn.first_token_ms),
        tpot=_ratio_of_means(b, a, lambda turn: turn.tpot_ms),
        texts=_texts(a, b),
    )


def _ratio_of_means(
    b: list[Run], a: list[Run], latency: Callable[[CompletionSummary], float | None]
) -> Interval | None:
    def of_run(run: Run) -> tuple[float]:
        known = [value for turn in run.turns if (value := latency(turn)) is not None]
        return (float(np.mean(known)) if known else 0.0,)

    return _over_prompts(list(paired(b, a, of_run).values()), lambda sums: sums[:, 0] / sums[:, 1])


def _over_prompts(rows: Sequence[Floats], ratio: Callable[[Floats], Floats]) -> Interval | None:
    """The ratio of sums over prompts with its interval, from one row of numbers per prompt; None without prompts."""
    if not rows:
        return None
    figures = np.stack(rows)
    return bootstrap(lambda weights: ratio(weights @ figures), len(rows))


def _texts(a: Iterable[Run], b: Iterable[Run]) -> Texts:
    mine, theirs = (
        {(run.prompt, run.length, run.repeat): [turn.tokens for turn in run.turns] for run in runs} for runs in (a, b)
    )
    both = mine.keys() & theirs.keys()
    return Texts(len(both), sum(mine[key] != theirs[key] for key in both))


SHOWN_PROMPTS = 20
NOISE = (
    "Intervals cover the choice of prompts only, not a machine that was busier or slower at one time than at another: "
    "measure A twice to see how much equal runs differ."
)


def comparison_tables(comparison: Comparison) -> list[Table]:
    """All tables, in reading order."""
    left_out = comparison.candidates_left_out
    return [
        _files(comparison),
        *([_unlike(comparison)] if comparison.differences else []),
        _speeds(comparison),
        *([reasons("Candidates left out", "candidate", left_out)] if left_out else []),
        *([_left_out_table(comparison)] if comparison.prompts_left_out else []),
    ]


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Every number of the tables, rounded to six decimals."""
    document: dict[str, Any] = plain(comparison, digits=6)
    verdicts = [{"verdict": compared.verdict} for compared in comparison.candidates]
    document["candidates"] = [one | said for one, said in zip(document["candidates"], verdicts, strict=True)]
    return {**document, "alike": comparison.alike, "note": NOISE}


def _files(comparison: Comparison) -> Table:
    columns: Columns[tuple[str, Side]] = {
        "side": lambda one: one[0],
        "file": lambda one: one[1].file,
        "started": lambda one: one[1].started,
        "runs": lambda one: one[1].runs,
    }
    return Table.of("Compared", columns, (("A", comparison.a), ("B", comparison.b)), labels=3)


def _unlike(comparison: Comparison) -> Table:
    columns: Columns[Difference] = {
        "fact": lambda one: one.fact,
        "in A": lambda one: _value(one.fact, one.a),
        "in B": lambda one: _value(one.fact, one.b),
    }
    if comparison.alike:
        return Table.of("Versions differ", columns, comparison.differences, labels=3)
    note = "What follows compares these differences too."
    return Table.of("NOT MEASURED ALIKE", columns, comparison.differences, labels=3, note=note, alarm=True)


def _speeds(comparison: Comparison) -> Table:
    columns: Columns[Compared] = {
        "candidate": lambda one: one.name,
        "prompts": lambda one: one.ratio.prompts,
        "A tokens/s": lambda one: one.tokens_per_second.a,
        "B tokens/s": lambda one: one.tokens_per_second.b,
        "B/A": lambda one: one.ratio.of_totals,
        "against none": lambda one: one.against_none,
        "TTFT B/A": lambda one: one.ttft,
        "TPOT B/A": lambda one: one.tpot,
        "texts differ": lambda one: f"{one.texts.differing} of {one.texts.compared}",
    }
    drift = ""
    if none := comparison.none_differs:
        drift = f'none itself is {none.value:.2f}x as fast in B, so what policies changed is in "against none". '
    return Table.of("B over A", columns, comparison.candidates, note=f"{drift}{NOISE} {DEFINITIONS}")


def _left_out_table(comparison: Comparison) -> Table:
    left_out = comparison.prompts_left_out
    hidden = len(left_out) - SHOWN_PROMPTS
    note = f"{counted(hidden, 'more prompt')} in the JSON." if hidden > 0 else ""
    return reasons("Prompts left out", "prompt", dict(islice(left_out.items(), SHOWN_PROMPTS)), note)


def _value(fact: str, value: Any) -> str:
    if value is None:
        return UNKNOWN
    if fact.endswith("sha256"):
        return str(value)[:12]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
