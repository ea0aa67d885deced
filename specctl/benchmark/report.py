"""A benchmark's results as tables, as one JSON document and as a report."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from specctl.benchmark.cost_model import CandidateCost, CandidateLevels
from specctl.benchmark.digest import Digest, verdict
from specctl.benchmark.papers import left_out_lines, sources
from specctl.benchmark.summaries import Latency, Spread, Summary
from specctl.errors import UsageError
from specctl.files import SCHEMA_VERSION
from specctl.observing.results import (
    BASELINE,
    OF_HIERARCHIES,
    SCIKIT_LEARN,
    Candidate,
    Difference,
    Run,
    RunSet,
    as_record,
)
from specctl.peers.engines import MOVING
from specctl.printable import counted
from specctl.profile.wording import short_names
from specctl.records import StopReason
from specctl.replay.pearl import Simulated
from specctl.reporting.document import write_document
from specctl.reporting.placing import listed
from specctl.reporting.style import Picture
from specctl.reporting.table import (
    DEFINITIONS,
    Columns,
    Table,
    number,
    plain,
)

SHOWN_DIFFERENCES = 20
MORE = "--details shows latency, drafting and costs too."
_DIFFERS = "GREEDY OUTPUT DIFFERS"
RATES: Columns[Summary] = {
    "acceptance rate": lambda one: one.acceptance_rate,
    "mean acceptance length": lambda one: one.mean_acceptance_length,
    "verification rate": lambda one: one.verification_rate,
    "discard rate": lambda one: one.discard_rate,
}
"""What drafts achieved."""


def tables(digest: Digest) -> list[Table]:
    """All tables that the results can fill, in reading order."""
    results = digest.results
    header = results.header
    count = header.suite.get("count", "?")
    skipped = f"{len(results.skipped)} of {count} prompts could not be run on this pair."
    failed = "These did not finish their runs; --resume asks them again."
    found = [
        speed_table(digest),
        paper_table(digest) if header.papers is not None else None,
        latency_table("candidate", {summary.candidate: summary.latency for summary in digest.overall}),
        drafting_table(digest),
        share_table(digest),
        part_table("By category", "category", digest.by_category) if len(digest.by_category) > 1 else None,
        part_table("By length limit", "length", digest.by_length) if len(digest.by_length) > 1 else None,
        level_table(digest) if digest.levels else None,
        cost_table(digest),
        pass_table(digest) if results.costs is not None else None,
        parallel_table(digest) if digest.simulated else None,
        _differences(digest),
        reasons("Prompts left out", "prompt", results.skipped, skipped) if results.skipped else None,
        reasons("Peers that failed", "candidate", results.failed, failed) if results.failed else None,
        _peers(digest) if any(one.way is not None for one in header.candidates) else None,
    ]
    return [table for table in found if table is not None]


def brief_tables(digest: Digest) -> list[Table]:
    """Speeds and alarms, which fit a screen of 80 columns and 40 lines."""
    speed = brief_table(digest)
    shown = [replace(speed, note=f"{speed.note} {MORE}")]
    if digest.differing:
        run, found = digest.differing[0]
        first = f"The first: {run.candidate} on prompt {run.prompt}, turn {found.turn}, position {found.position}."
        shown.append(Table(_DIFFERS, (), (), note=f"In {_of_compared(digest)}. {first}", alarm=True))
    return shown


def as_json(digest: Digest) -> dict[str, Any]:
    """Every number of the tables and its provenance, rounded to six decimals."""
    results = digest.results
    document: dict[str, Any] = {
        "provenance": {**as_record(results.header), "schema_version": SCHEMA_VERSION},
        "verdict": verdict(digest),
        "engines": {one.label: results.header.engine_of(one.label) for one in results.header.candidates},
        "runs": digest.finished,
        "expected_runs": digest.expected_runs,
        "overall": digest.overall,
        "by_category": digest.by_category,
        "by_length": digest.by_length,
        "cost_model": digest.model,
        "bare_costs": results.costs,
        "costs": digest.costs,
        "oracle": digest.oracle,
        "signal_bound": results.signal_bound
        and {**asdict(results.signal_bound), "tokens_per_second": digest.signal_speed},
    }
    if digest.simulated:
        alone = digest.simulated_baseline_ms
        simulated = [{**asdict(one), "speedup": alone / one.milliseconds} for one in digest.simulated]
        document["parallel"] = {"sync_ms": digest.sync_ms, "simulated": simulated}
    if digest.levels:
        document["levels"] = digest.levels
    document["compared"] = digest.compared
    document["differences"] = [
        {"candidate": run.candidate, "prompt": run.prompt, "repeat": run.repeat, "length": run.length, **asdict(found)}
        for run, found in digest.differing
    ]
    if results.failed:
        document["failed"] = results.failed
    return {name: plain(value, digits=6, optional=OF_HIERARCHIES) for name, value in document.items()}


def brief_table(digest: Digest) -> Table:
    """Speedup, speed and greedy identity, one row per candidate, narrow enough for 80 columns."""
    header = digest.results.header
    prompts = {one.prompts for one in digest.overall}
    engines = {header.engine_of(one.candidate) for one in digest.overall} - {None}
    shares = {one.candidate: one.time_share for one in digest.costs}
    columns: dict[str, Callable[[Summary], object]] = {"candidate": lambda one: one.candidate}
    if len(engines) > 1:
        columns["engine"] = lambda one: header.engine_of(one.candidate)
    if len(prompts) > 1:
        columns["prompts"] = lambda one: one.prompts
    columns["speedup"] = lambda one: "1.00" if one.candidate == BASELINE else one.speedup and one.speedup.of_totals
    columns["tokens/s"] = lambda one: one.tokens_per_second
    columns["differ"] = lambda one: count_differing(digest, one.candidate)
    if any(share is not None for share in shares.values()):
        columns["oracle time / time"] = lambda one: shares[one.candidate]
    conditions = [counted(prompts.pop(), "prompt")] if len(prompts) == 1 else []
    conditions += [str(engine) for engine in engines] if len(engines) == 1 else []
    title = f"Speed ({', '.join(conditions)})" if conditions else "Speed"
    more = f"{_machine(digest)}{_counterparts(digest)}{_not_run(digest)}"
    return Table.of(title, columns, digest.overall, labels=1 + (len(engines) > 1), note=f"{_about(digest)}{more}")


def speed_table(digest: Digest) -> Table:
    """Speed, speedup and greedy identity, one row per candidate."""
    columns: Columns[Summary] = {
        "candidate": lambda one: one.candidate,
        "engine": lambda one: digest.results.header.engine_of(one.candidate),
        "prompts": lambda one: one.prompts,
        "runs": lambda one: one.runs,
        "tokens/s": lambda one: one.tokens_per_second,
        "speedup (totals)": lambda one: one.speedup and one.speedup.of_totals,
        "speedup (mean of prompts)": lambda one: one.speedup and one.speedup.of_prompts,
        "first token ms": lambda one: one.latency.ttft_ms and one.latency.ttft_ms.mean,
        "differ": lambda one: count_differing(digest, one.candidate),
    }
    more = f"{_machine(digest)}{_counterparts(digest)}{threshold_note(digest.results)}"
    return Table.of("Speed", columns, digest.overall, note=f"{_about(digest)}{more}")


def paper_table(digest: Digest) -> Table:
    """The papers' metrics for each policy, with the source of its settings; other policies follow `none`."""
    header = digest.results.header
    known = sources(header.candidates)
    order = [*(one.label for one in header.candidates if one.label not in known), *known]
    columns: Columns[Summary] = {
        "candidate": lambda one: one.candidate,
        "settings of": lambda one: known.get(one.candidate, ""),
        "speedup (totals)": lambda one: one.speedup and one.speedup.of_totals,
        "mean acceptance length": lambda one: one.mean_acceptance_length,
        "acceptance rate": lambda one: one.acceptance_rate,
        "draft rate": lambda one: one.draft_rate,
        "verification rate": lambda one: one.verification_rate,
        "differ": lambda one: count_differing(digest, one.candidate),
    }
    shown = sorted(digest.overall, key=lambda one: order.index(one.candidate))
    note = " ".join(f"{line[0].upper()}{line[1:]}." for line in left_out_lines(header.papers or {}))
    return Table.of("The papers' policies", columns, shown, labels=2, note=note)


def latency_table(key: str, found: Mapping[str, Latency]) -> Table:
    """Mean and percentiles of each latency, one row for each latency and each item."""
    shown = (("TTFT", "ttft_ms", 1), ("TPOT", "tpot_ms", 2), ("ITL", "itl_ms", 2), ("E2EL", "e2el_ms", 1))
    rows = (
        [name, label, *(number(value, decimals) for value in getattr(one, attribute) or [None] * 4)]
        for name, attribute, decimals in shown
        for label, one in found.items()
    )
    names = ("latency", key, "mean ms", "p50 ms", "p90 ms", "p99 ms")
    return Table.filled("Latency", names, rows, labels=2)


def drafting_table(digest: Digest) -> Table:
    """Acceptance and draft lengths, one row per candidate; for trees also their verified tokens."""
    columns: dict[str, Callable[[Summary], object]] = {
        "candidate": lambda one: one.candidate,
        **RATES,
        "redundancy": lambda one: one.redundancy,
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
    names = ("candidate", *(f"stop: {stop}" for stop in stops), *(f"time: {part}" for part in parts), "ms/token")
    rows = (
        [
            one.candidate,
            *(one.stops.get(stop, 0.0) if one.stops else None for stop in stops),
            *map(one.wall.get, parts),
            one.ms_per_token,
        ]
        for one in digest.overall
    )
    return Table.filled("Why drafting stopped, and where the time went", names, rows)


def part_table(title: str, key: str, parts: Mapping[Any, Sequence[Summary]]) -> Table:
    """Speed and acceptance in each part of the prompts, one row per part and candidate."""
    columns: Columns[Summary] = {
        "candidate": lambda one: one.candidate,
        "prompts": lambda one: one.prompts,
        "tokens/s": lambda one: one.tokens_per_second,
        "speedup (totals)": lambda one: one.speedup and one.speedup.of_totals,
        **RATES,
    }
    rows = (
        [str(part), *(value(summary) for value in columns.values())]
        for part, summaries in parts.items()
        for summary in summaries
    )
    return Table.filled(title, (key, *columns), rows, labels=2)


def level_table(digest: Digest) -> Table:
    """Passes per token and HSDDW's sigma and eta of each model, one row per candidate."""
    names = short_names(digest.results.header.drafts)
    columns = (
        "candidate",
        *(f"{name} passes/token" for name in (*names, "target")),
        *(f"{name} {rate}" for name in names for rate in ("sigma", "eta")),
        "pays at target ms",
    )
    rows = []
    for found in digest.levels:
        rates = {level.draft: (level.redundancy, level.utilisation) for level in found.levels}
        known = [rate for draft in range(len(names)) for rate in rates.get(draft, (None, None))]
        rows.append([found.candidate, *found.passes, *known, _pays(found)])
    return Table.filled("Levels", columns, rows)


def cost_table(digest: Digest) -> Table:
    """Measured speed, predicted speed and the bounds, one row per candidate."""
    columns: dict[str, Callable[[CandidateCost], object]] = {
        "candidate": lambda one: one.candidate,
        "measured tokens/s": lambda one: one.measured,
        "predicted tokens/s": lambda one: one.predicted,
        "ms/token (eq. 5.1)": lambda one: one.latency_ms,
        "loop overhead": lambda one: one.overhead,
    }
    if digest.oracle is not None:
        columns["fewest passes / passes"] = lambda one: one.passes_share
        columns["oracle time / time"] = lambda one: one.time_share
    if digest.results.signal_bound is not None:
        columns["signal bound / time"] = lambda one: one.signal_share
    return Table.of("Cost model", columns, digest.costs, note=" ".join(_cost_notes(digest)))


def pass_table(digest: Digest) -> Table:
    """Bare forward times, one row for each width that was timed."""
    costs = digest.results.costs
    assert costs is not None
    names = short_names(digest.results.header.drafts) or ["draft"]
    models: list[Mapping[int, float]] = [*(costs.drafts or ({1: costs.draft},)), costs.target]
    columns = ("tokens in a pass", *(f"{name} ms" for name in (*names, "target")))
    widths = sorted({width for times in models for width in times})
    rows = ([str(width), *(times.get(width) for times in models)] for width in widths)
    note = "" if costs.head is None else f"The draft's head adds {costs.head:.3f} ms to a draft step."
    return Table.filled("Bare forward times", columns, rows, labels=0, note=note)


def parallel_table(digest: Digest) -> Table:
    """The speedup from a second device, simulated from the stretches of the baseline's texts."""
    alone = digest.simulated_baseline_ms
    columns: Columns[Simulated] = {
        "simulated": lambda one: (
            "in parallel, t_target / t_draft" if one.ratio else "in parallel" if one.parallel else "in turns"
        ),
        "block": lambda one: one.block,
        "steps": lambda one: one.steps,
        "tokens/step": lambda one: one.tokens / one.steps,
        "ms/step": lambda one: one.milliseconds / one.steps,
        "simulated tokens/s": lambda one: one.tokens_per_second,
        "simulated speedup": lambda one: alone / one.milliseconds,
    }
    note = (
        "Simulated for two devices that do not slow each other down, from the draft's token at every place of none's "
        f"texts and the bare forward times above; a step in parallel takes {digest.sync_ms:g} ms more to synchronise "
        "(--sync-ms). The time of prompts is left out."
    )
    return Table.of("In parallel (simulated: two devices)", columns, digest.simulated, note=note)


def _differences(digest: Digest) -> Table:
    title = "Greedy identity"
    if digest.compared is None:
        temperature = digest.results.header.sampling.get("temperature")
        return Table(title, (), (), note=f"Not compared: sampling at temperature {temperature}.")
    if not digest.compared:
        return Table(title, (), (), note="Not compared: no prompt was finished both by none and by another candidate.")
    if not digest.differing:
        compared = counted(digest.compared, "run")
        return Table(title, (), (), note=f"{compared} gave exactly the tokens of none.")
    columns: Columns[tuple[Run, Difference]] = {
        "candidate": lambda one: one[0].candidate,
        "prompt": lambda one: one[0].prompt,
        "repeat": lambda one: one[0].repeat,
        "length": lambda one: one[0].length,
        "turn": lambda one: one[1].turn,
        "position": lambda one: one[1].position,
        "none's token": lambda one: "end" if one[1].expected is None else one[1].expected,
        "its token": lambda one: "end" if one[1].found is None else one[1].found,
        "logit gap": lambda one: None if one[1].gap is None else f"{one[1].gap:.2e}",
    }
    shown = digest.differing[:SHOWN_DIFFERENCES]
    hidden = len(digest.differing) - len(shown)
    note = (
        f"{_DIFFERS} in {_of_compared(digest)}. The first difference of each run"
        + (f"; {counted(hidden, 'more run')} in the JSON." if hidden else ".")
        + " A logit gap near 0 is a tie between the target's two best tokens."
    )
    return Table.of(_DIFFERS, columns, shown, labels=2, note=note, alarm=True)


def _of_compared(digest: Digest) -> str:
    return f"{len(digest.differing)} of {digest.compared} runs"


def reasons(title: str, key: str, why: Mapping[str, str], note: str = "") -> Table:
    """A row for each missing item with the reason; ``key`` is the column that names the items."""
    return Table.filled(title, (key, "why"), why.items(), labels=2, note=note)


def _peers(digest: Digest) -> Table:
    """The conditions of each peer's process, one row for each."""
    header = digest.results.header
    columns: Columns[Candidate] = {
        "candidate": lambda one: one.label,
        "version": lambda one: header.versions.get(one.name),
        "device": lambda one: header.devices.get(one.name),
        "weights": lambda one: one.values.get("weights"),
        "cache": lambda one: one.values.get("cache"),
    }
    note = (
        "Each ran in a process of its own, stopped while others ran, on prompts given as ids. Its times are its own "
        "clock's, from the prompt's ids to the last token."
    )
    return Table.of("Peers", columns, (one for one in header.candidates if one.way is not None), labels=5, note=note)


def count_differing(digest: Digest, candidate: str) -> int | None:
    """The number of runs whose greedy tokens differ from the baseline's; None when sampling."""
    if digest.compared is None:
        return None
    return sum(run.candidate == candidate for run, _ in digest.differing)


def _spread(spread: Spread | None) -> str | None:
    return spread and f"{spread.mean:.2f} ± {spread.sd:.2f}"


def _pays(found: CandidateLevels) -> str | None:
    if found.pays_ms is None:
        return "never" if found.nested else None
    low, high = found.pays_ms
    return f"from {low:.2f}" if high is None else f"{low:.2f} to {high:.2f}"


def _about(digest: Digest) -> str:
    """Notes on all numbers: where columns are explained, and which parts of the benchmark are missing."""
    note = DEFINITIONS
    if digest.results.header.synthetic:
        note = f"SYNTHETIC pair: random weights; how often target and draft agree was chosen, not trained. {note}"
    known = [one.speedup.of_totals for one in digest.overall if one.speedup is not None]
    if doubts := dict.fromkeys(one.doubt for one in known if one.doubt):
        note += f" Do not trust these intervals: {listed(list(doubts))}."
    return note if digest.unfinished is None else f"{note} {digest.unfinished[0].upper()}{digest.unfinished[1:]}."


def _not_run(digest: Digest) -> str:
    """The number of missing prompts, and missing peers with the reason; empty if nothing is missing."""
    skipped, failed = digest.results.skipped, digest.results.failed
    total = digest.results.header.suite.get("count", "?")
    told = f" {len(skipped)} of {total} prompts could not be run on this pair." if skipped else ""
    return f"{told} Failed: {'; '.join(failed.values())}." if failed else told


def _counterparts(digest: Digest) -> str:
    """A note on candidates that run eagerly next to others; empty unless there are both."""
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
    """The number of threads, and the load from other processes; empty if it was not recorded."""
    threads, busy = digest.results.header.threads, digest.results.header.others_busy
    if threads is None:
        return ""
    at_once = digest.results.header.batch
    several = "" if at_once == 1 else f", {at_once} prompts at once"
    others = "" if busy is None else f"; other processes kept {busy:.1f} cores busy when they began"
    return f" Runs with {threads} thread{'s'[: threads != 1]}{several}{others}."


def _cost_notes(digest: Digest) -> Iterator[str]:
    """The fitted and the measured pass times and the bounds that the results contain."""
    names = short_names(digest.results.header.drafts)
    if model := digest.model:
        fitted = f"R² {model.r_squared:.4f}" if model.r_squared is not None else "R² unknown"
        if not model.explains:
            fitted += ": it explains less than half of the variance of the runs' times, so do not trust its predictions"
        drafts = "".join(
            f"t_{name} {ms:.3f} ms, " for name, ms in zip(names or ["draft"], model.drafts_ms, strict=True)
        )
        yield f"Fit over {counted(model.runs, 'run')}: {drafts}t_target {model.target_ms:.3f} ms, {fitted}."
    else:
        yield "No fit: these runs do not separate the cost of a draft step from the cost of a target pass."
    if oracle := digest.oracle:
        counts = f"{oracle.passes} target passes for {oracle.tokens:.0f} tokens on {counted(oracle.prompts, 'prompt')}"
        yield f"Oracle: {counts}{_by_the_fit(oracle.tokens_per_second)}."
    if bound := digest.results.signal_bound:
        counts = f"{bound.passes} target passes and {bound.drafted} draft steps for {bound.tokens} tokens"
        yield f"Signal bound: {counts}{_by_the_fit(digest.signal_speed)}."
    oracle_speed = None if digest.oracle is None else digest.oracle.tokens_per_second
    bounds = {"oracle": oracle_speed, "signal bound": digest.signal_speed}
    for name, speed in bounds.items():
        if above := [one.candidate for one in digest.costs if speed is not None and one.measured > speed]:
            yield f"{listed(above)} measured faster than the {name}, so what the fit gives for it is not a bound here."


def _by_the_fit(tokens_per_second: float | None) -> str:
    return f", {tokens_per_second:.1f} tokens/s by the fit" if tokens_per_second else ""


def threshold_note(results: RunSet) -> str:
    """A sentence for each candidate whose threshold transformers may adapt; empty if that was not recorded."""
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


def write_report(digest: Digest, folder: Path) -> list[Path]:
    """Write tables, figures and their provenance into the folder; return the paths of the files.

    A figure without data is replaced by a line with the reason.

    Raises:
        UsageError: there is no run to report, or matplotlib is missing.
        OutputError: a file cannot be written.
    """
    if not digest.results.runs:
        raise UsageError("there is no finished run to report")
    from specctl.benchmark.figures import draw_all

    found = list(draw_all(digest))
    return write_document(
        "Speculative decoding benchmark",
        tables(digest),
        [picture for _, picture in found if isinstance(picture, Picture)],
        _provenance(digest),
        folder,
        command="bench",
        verdict=verdict(digest),
        remarks=[f"{title}: not drawn, {reason}." for title, reason in found if not isinstance(reason, Picture)],
        profile=digest.results.header.profile,
    )


def _provenance(digest: Digest) -> dict[str, str]:
    header = digest.results.header
    expected = f" of {digest.expected_runs}" if digest.expected_runs else ""
    return {
        "Command": shlex.join(header.argv),
        "Started": header.created,
        "Prompts": _pairs(header.suite),
        "Runs": f"{digest.finished}{expected}, repeats {header.repeats}, "
        f"length limits {', '.join(map(str, header.lengths)) or 'of the profile'}"
        f"{f', {header.batch} prompts at once' if header.batch > 1 else ''}",
        "Sampling": _pairs(header.sampling),
        "Devices": _pairs(header.devices),
        "Engines": _pairs(header.engines),
        "Versions": _pairs(header.versions),
        "Candidates": "; ".join(
            f"{candidate.label} ({_pairs(candidate.values)})" if candidate.values else candidate.label
            for candidate in header.candidates
        ),
    }


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
