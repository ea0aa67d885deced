"""Tables of how fast each candidate was, what its drafts achieved, and where its time went."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from specctl.benchmark.digest import Digest
from specctl.benchmark.latency import Latency
from specctl.benchmark.summaries import Spread, Summary
from specctl.observing.results import BASELINE, RunSet
from specctl.observing.run_facts import SCIKIT_LEARN
from specctl.peers.names import MOVING
from specctl.printable import counted
from specctl.records import StopReason
from specctl.reporting.placing import listed
from specctl.reporting.table import DEFINITIONS, DOWN, UNKNOWN, UP, Columns, Table, number, percent, show_interval

RATES: Columns[Summary] = {
    f"acceptance rate{UP}": lambda one: percent(one.acceptance_rate),
    f"mean acceptance length{UP}": lambda one: number(one.mean_acceptance_length, 2),
    f"verification rate{DOWN}": lambda one: number(one.verification_rate, 3),
    f"discard rate{DOWN}": lambda one: number(one.discard_rate, 3),
}
"""What drafts achieved, by heading."""


def brief_table(digest: Digest) -> Table:
    """Speedup, speed and greedy identity, one row per candidate, narrow enough for 80 columns."""
    header = digest.results.header
    prompts = {one.prompts for one in digest.overall}
    engines = {header.engine_of(one.candidate) for one in digest.overall} - {None}
    columns: Columns[Summary] = {"candidate": lambda one: one.candidate}
    if len(engines) > 1:
        columns |= {"engine": lambda one: header.engine_of(one.candidate) or UNKNOWN}
    if len(prompts) > 1:
        columns |= {"prompts": lambda one: str(one.prompts)}
    columns |= {
        f"speedup{UP}": _speedup,
        f"tokens/s{UP}": lambda one: f"{one.tokens_per_second:.1f}",
        f"differ{DOWN}": lambda one: count_differing(digest, one.candidate),
    }
    costs = {one.candidate: one for one in digest.costs}
    if any(one.time_share is not None for one in digest.costs):
        columns |= {f"oracle time / time{UP}": lambda one: percent(costs[one.candidate].time_share)}
    conditions = [counted(prompts.pop(), "prompt")] if len(prompts) == 1 else []
    conditions += [str(engine) for engine in engines] if len(engines) == 1 else []
    title = f"Speed ({', '.join(conditions)})" if conditions else "Speed"
    more = f"{_machine(digest)}{_counterparts(digest)}{_not_run(digest)}"
    return Table.of(title, columns, digest.overall, labels=1 + (len(engines) > 1), note=f"{_about(digest)}{more}")


def _speedup(one: Summary) -> str:
    return "1.00" if one.candidate == BASELINE else show_interval(one.speedup and one.speedup.of_totals)


def _not_run(digest: Digest) -> str:
    """How many prompts and which peers are missing, and why peers are; empty where none are."""
    skipped, failed = digest.results.skipped, digest.results.failed
    total = digest.results.header.suite.get("count", "?")
    told = f" {len(skipped)} of {total} prompts could not be run on this pair." if skipped else ""
    return f"{told} Failed: {'; '.join(failed.values())}." if failed else told


def speed_table(digest: Digest) -> Table:
    """Speed, speedup and greedy identity, one row per candidate."""
    columns: Columns[Summary] = {
        "candidate": lambda one: one.candidate,
        "engine": lambda one: digest.results.header.engine_of(one.candidate) or UNKNOWN,
        "prompts": lambda one: str(one.prompts),
        "runs": lambda one: str(one.runs),
        f"tokens/s{UP}": lambda one: f"{one.tokens_per_second:.1f}",
        f"speedup (totals){UP}": lambda one: show_interval(one.speedup and one.speedup.of_totals),
        f"speedup (mean of prompts){UP}": lambda one: show_interval(one.speedup and one.speedup.of_prompts),
        f"first token ms{DOWN}": lambda one: number(one.latency.ttft_ms and one.latency.ttft_ms.mean, 1),
        f"differ{DOWN}": lambda one: count_differing(digest, one.candidate),
    }
    more = f"{_machine(digest)}{_counterparts(digest)}{threshold_note(digest.results)}"
    return Table.of("Speed", columns, digest.overall, note=f"{_about(digest)}{more}")


def _about(digest: Digest) -> str:
    """What holds for all numbers: where columns are explained, and what of the benchmark is missing."""
    note = DEFINITIONS
    if digest.results.header.synthetic:
        note = f"SYNTHETIC pair: random weights; how often target and draft agree was chosen, not trained. {note}"
    known = [one.speedup.of_totals for one in digest.overall if one.speedup is not None]
    if doubts := dict.fromkeys(one.doubt for one in known if one.doubt):
        note += f" Do not trust these intervals: {listed(list(doubts))}."
    return note if digest.unfinished is None else f"{note} {digest.unfinished[0].upper()}{digest.unfinished[1:]}."


def _counterparts(digest: Digest) -> str:
    """How to read candidates that run eagerly beside others; empty where there are none, or nothing else."""
    header = digest.results.header
    eager = [one.candidate for one in digest.overall if header.engine_of(one.candidate) == "eager"]
    faster = {header.engine_of(one.candidate) for one in digest.overall if one.candidate not in eager} - {None}
    peers = [one.label for one in header.candidates if one.label in eager and one.peer is not None]
    if not peers or not faster:
        return ""
    ours = [one for one in eager if one not in peers]
    compare = f"compare {listed(peers)} with {listed(ours)}" if ours else "run one of ours with --engine eager"
    others = listed(sorted(map(str, faster)))
    return (
        f" {listed(peers)} ran eagerly, as transformers runs models, and others on {others}; to see what the algorithm "
        f"brings, {compare}."
    )


def _machine(digest: Digest) -> str:
    """With how many threads the runs were made, and what else ran on their cores; empty where it was not recorded."""
    threads, busy = digest.results.header.threads, digest.results.header.others_busy
    if threads is None:
        return ""
    at_once = digest.results.header.batch
    several = "" if at_once == 1 else f", {at_once} prompts at once"
    others = "" if busy is None else f"; other processes kept {busy:.1f} cores busy when they began"
    return f" Runs with {threads} thread{'s'[: threads != 1]}{several}{others}."


def latency_table(digest: Digest) -> Table:
    """Mean and percentiles of each latency, one row per latency and candidate."""
    return latencies("candidate", {summary.candidate: summary.latency for summary in digest.overall})


def latencies(key: str, found: Mapping[str, Latency]) -> Table:
    """Mean and percentiles of each latency, one row for each and what ``key``, a heading, names."""
    columns = ("latency", key, f"mean ms{DOWN}", f"p50 ms{DOWN}", f"p90 ms{DOWN}", f"p99 ms{DOWN}")
    shown = (("TTFT", "ttft_ms", 1), ("TPOT", "tpot_ms", 2), ("ITL", "itl_ms", 2), ("E2EL", "e2el_ms", 1))
    rows = tuple(
        (name, label, *(number(value, decimals) for value in getattr(one, attribute) or [None] * 4))
        for name, attribute, decimals in shown
        for label, one in found.items()
    )
    return Table("Latency", columns, rows, labels=2)


def drafting_table(digest: Digest) -> Table:
    """Acceptance and draft lengths, one row per candidate; of trees their verified tokens too."""
    columns: Columns[Summary] = {
        "candidate": lambda one: one.candidate,
        **RATES,
        f"redundancy{DOWN}": lambda one: number(one.redundancy, 3),
        "draft length": lambda one: _spread(one.draft_length),
        "accepted length": lambda one: _spread(one.accepted_length),
    }
    if any(summary.nodes for summary in digest.overall):
        columns["nodes"] = lambda one: _spread(one.nodes)
    return Table.of("Drafting", columns, digest.overall)


def share_table(digest: Digest) -> Table:
    """Stop reasons as shares of rounds and parts of the time as shares of wall time, one row per candidate."""
    stops = [reason.value for reason in StopReason]
    parts = ("draft", "verify", "prefill", "other")
    rows = tuple(
        (
            summary.candidate,
            *(percent(summary.stops.get(stop, 0.0) if summary.stops else None) for stop in stops),
            *(percent(summary.wall.get(part)) for part in parts),
            f"{summary.ms_per_token:.2f}",
        )
        for summary in digest.overall
    )
    shares = (*(f"stop: {stop}" for stop in stops), *(f"time: {part}" for part in parts))
    return Table("Why drafting stopped, and where the time went", ("candidate", *shares, f"ms/token{DOWN}"), rows)


def part_table(title: str, key: str, parts: Mapping[Any, Sequence[Summary]]) -> Table:
    """Speed and acceptance in each part of the prompts, one row per part and candidate.

    Args:
        title: of the table.
        key: heading of the column that names the part.
        parts: summaries by part.
    """
    columns: Columns[tuple[Any, Summary]] = {
        key: lambda one: str(one[0]),
        "candidate": lambda one: one[1].candidate,
        "prompts": lambda one: str(one[1].prompts),
        f"tokens/s{UP}": lambda one: f"{one[1].tokens_per_second:.1f}",
        f"speedup (totals){UP}": lambda one: show_interval(one[1].speedup and one[1].speedup.of_totals),
        **{heading: partial(_of_part, cell) for heading, cell in RATES.items()},
    }
    each = ((name, summary) for name, summaries in parts.items() for summary in summaries)
    return Table.of(title, columns, each, labels=2)


def _of_part(cell: Callable[[Summary], str], one: tuple[Any, Summary]) -> str:
    return cell(one[1])


def count_differing(digest: Digest, candidate: str) -> str:
    """In how many runs greedy tokens differ from the baseline's; unknown when sampling."""
    if digest.compared is None:
        return UNKNOWN
    return str(sum(run.candidate == candidate for run, _ in digest.differing))


def _spread(spread: Spread | None) -> str:
    return UNKNOWN if spread is None else f"{spread.mean:.2f} ± {spread.sd:.2f}"


def threshold_note(results: RunSet) -> str:
    """A sentence for each candidate whose threshold transformers may move; empty where that was not recorded."""
    installed = results.header.versions.get(SCIKIT_LEARN)
    labels = [one.label for one in results.header.candidates if one.peer in MOVING]
    return "".join(_sentence(results, label, installed) for label in labels) if installed is not None else ""


def _sentence(results: RunSet, label: str, installed: str) -> str:
    turns = [turn for run in results.of(label) for turn in run.thresholds if turn is not None]
    if not turns:
        return ""
    first, last = turns[0][0], sorted(end for _, end in turns)
    moved = sum(begin != end for begin, end in turns)
    if not moved:
        why = " (scikit-learn is not installed, with which transformers moves it)" if installed == "none" else ""
        return f" The threshold of {label} stayed at {first:g}{why}."
    ends = f"between {last[0]:.2f} and {last[-1]:.2f} at their ends (median {median(last):.2f})"
    return (
        f" With scikit-learn {installed}, transformers moved the threshold of {label} in {moved} of {len(turns)} "
        f"answers, from {first:g} to {ends}."
    )
