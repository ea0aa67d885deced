"""A benchmark's results as tables: worked out once, shown as plain text, Markdown, JSON or by `specctl.terminal`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from specctl.benchmark.digest import Digest, digest
from specctl.benchmark.hierarchy import EntrantLevels
from specctl.benchmark.summaries import Spread, Summary
from specctl.observing.results import OF_HIERARCHIES, RunSet, header_record
from specctl.profile.model_names import short_name
from specctl.records import StopReason
from specctl.reporting.table import UNKNOWN, Table, number, percent, show_interval

SHOWN_DIFFERENCES = 20


def tables(results: RunSet | Digest) -> list[Table]:
    """All tables that the results can fill, in reading order."""
    whole = results if isinstance(results, Digest) else digest(results)
    return [
        _speed(whole),
        _drafting(whole),
        _shares(whole),
        *([_by_category(whole)] if len(whole.by_category) > 1 else []),
        *([_by_length(whole)] if len(whole.by_length) > 1 else []),
        *([_levels(whole)] if whole.levels else []),
        _cost_model(whole),
        _differences(whole),
        *([_skipped(whole)] if whole.results.skipped else []),
    ]


def as_json(results: RunSet | Digest) -> dict[str, Any]:
    """Everything the tables say and where it comes from, unrounded but for noise beyond six decimals."""
    whole = results if isinstance(results, Digest) else digest(results)
    document: dict[str, Any] = {
        "provenance": header_record(whole.results.header),
        "runs": len(whole.results.runs),
        "expected_runs": whole.expected_runs,
        "overall": whole.overall,
        "by_category": whole.by_category,
        "by_length": whole.by_length,
        "cost_model": whole.model,
        "bare_costs": whole.results.costs,
        "costs": whole.costs,
        "oracle": whole.oracle,
        "signal_bound": whole.results.signal_bound
        and {
            **asdict(whole.results.signal_bound),
            "tokens_per_second": whole.signal_speed,
        },
        **({"levels": whole.levels} if whole.levels else {}),
        "compared": whole.compared,
        "differences": [
            {"entrant": run.entrant, "prompt": run.prompt, "repeat": run.repeat, "length": run.length, **asdict(found)}
            for run, found in whole.differing
        ],
    }
    return {name: _plain(value) for name, value in document.items()}


def _speed(whole: Digest) -> Table:
    rows = []
    for summary in whole.overall:
        speed = summary.speedup
        rows.append(
            (
                summary.entrant,
                str(summary.prompts),
                str(summary.runs),
                f"{summary.tokens_per_second:.1f}",
                show_interval(speed and speed.of_totals),
                show_interval(speed and speed.of_prompts),
                f"{summary.first_token_ms:.1f}",
                _count_differing(whole, summary.entrant),
            )
        )
    columns = (
        "entrant",
        "prompts",
        "runs",
        "tokens/s",
        "speedup (totals)",
        "speedup (mean of prompts)",
        "first token ms",
        "differ",
    )
    note = (
        "Speedup over none on the prompts both finished, with 95% bootstrap intervals over prompts: of all tokens "
        "by all seconds (totals), and the mean of each prompt's own ratio. Differ: runs whose greedy tokens are not "
        "those of none."
    )
    if whole.results.header.synthetic:
        note = f"SYNTHETIC pair: random weights, the agreement of target and draft set by hand. {note}"
    expected, done = whole.expected_runs, len(whole.results.runs)
    if expected is not None and done < expected:
        note += f" Unfinished: {done} of {expected} runs."
    return Table("Speed", columns, tuple(rows), note=note)


def _drafting(whole: Digest) -> Table:
    columns = (
        "entrant",
        "acceptance rate",
        "mean acceptance length",
        "verification rate",
        "discard rate",
        "redundancy",
        "draft length",
        "accepted length",
    )
    rows = tuple(
        (
            summary.entrant,
            percent(summary.acceptance_rate),
            number(summary.mean_acceptance_length, 2),
            number(summary.verification_rate, 3),
            number(summary.discard_rate, 3),
            number(summary.redundancy, 3),
            _spread(summary.draft_length),
            _spread(summary.accepted_length),
        )
        for summary in whole.overall
    )
    return Table(
        "Drafting",
        columns,
        rows,
        note="Mean acceptance length counts the verifier's own token, accepted length does not; lengths are mean ± sd "
        "over rounds. Verification and discard rate are per generated token.",
    )


def _shares(whole: Digest) -> Table:
    stops = [reason.value for reason in StopReason]
    parts = ("draft", "verify", "prefill", "other")
    rows = tuple(
        (
            summary.entrant,
            *(percent(summary.stops.get(stop, 0.0) if summary.stops else None) for stop in stops),
            *(percent(summary.wall.get(part)) for part in parts),
            f"{summary.ms_per_token:.2f}",
        )
        for summary in whole.overall
    )
    columns = ("entrant", *(f"stop: {stop}" for stop in stops), *(f"time: {part}" for part in parts), "ms/token")
    return Table(
        "Why drafting stopped, and where the time went",
        columns,
        rows,
        note="Stop reasons are shares of rounds, times are shares of wall time. Other is the loop between rounds.",
    )


def _parts(key: str, parts: Mapping[Any, Sequence[Summary]], title: str) -> Table:
    rows = tuple(
        (
            str(name),
            summary.entrant,
            str(summary.prompts),
            f"{summary.tokens_per_second:.1f}",
            show_interval(summary.speedup and summary.speedup.of_totals),
            percent(summary.acceptance_rate),
            number(summary.mean_acceptance_length, 2),
            number(summary.verification_rate, 3),
            number(summary.discard_rate, 3),
        )
        for name, summaries in parts.items()
        for summary in summaries
    )
    columns = (
        key,
        "entrant",
        "prompts",
        "tokens/s",
        "speedup (totals)",
        "acceptance rate",
        "mean acceptance length",
        "verification rate",
        "discard rate",
    )
    return Table(title, columns, rows, labels=2)


def _by_category(whole: Digest) -> Table:
    return _parts("category", whole.by_category, "By category")


def _by_length(whole: Digest) -> Table:
    return _parts("length", whole.by_length, "By length limit")


def _levels(whole: Digest) -> Table:
    names = list(map(short_name, whole.results.header.drafts))
    rows = []
    for one in whole.levels:
        of = {level.draft: level for level in one.levels}
        cells = [number(passes, 3) for passes in one.passes]
        for draft in range(len(names)):
            level = of.get(draft)
            cells += [number(value, 3) for value in ((level.redundancy, level.utilisation) if level else (None, None))]
        rows.append((one.entrant, *cells, _pays(one)))
    columns = (
        "entrant",
        *(f"{name} passes/token" for name in names),
        "target passes/token",
        *(column for name in names for column in (f"{name} sigma", f"{name} eta")),
        "pays at target ms",
    )
    note = (
        "Sigma: share of a draft's tokens that its verifier refused. Eta: its passes for each token it handed up, 1 "
        "where nobody drafts for it; the target's is its passes/token. Pays at: where a target pass takes that long, "
        "the hierarchy is faster than every entrant with one draft or none, by the cost model."
    )
    return Table("Levels", columns, tuple(rows), note=note)


def _pays(one: EntrantLevels) -> str:
    if one.pays_ms is None:
        return "never" if one.nested else UNKNOWN
    low, high = one.pays_ms
    return f"from {low:.2f}" if high is None else f"{low:.2f} to {high:.2f}"


def _cost_model(whole: Digest) -> Table:
    columns = (
        "entrant",
        "measured tokens/s",
        "predicted tokens/s",
        "ms/token (eq. 5.1)",
        "loop overhead",
        "fewest passes / passes",
        "oracle time / time",
        "signal bound / time",
    )
    rows = tuple(
        (
            cost.entrant,
            f"{cost.measured:.1f}",
            number(cost.predicted, 1),
            number(cost.latency_ms, 3),
            number(cost.overhead, 3),
            percent(cost.passes_share),
            percent(cost.time_share),
            percent(cost.signal_share),
        )
        for cost in whole.costs
    )
    notes = ["Without the prompt's own time, which only a peer's holds."]
    if whole.model:
        fitted = f"R² {whole.model.r_squared:.4f}" if whole.model.r_squared is not None else "R² unknown"
        names = list(map(short_name, whole.results.header.drafts)) or ["draft"]
        drafts = "".join(f"t_{name} {ms:.3f} ms, " for name, ms in zip(names, whole.model.drafts_ms, strict=True))
        notes.append(f"Fit over {whole.model.runs} runs: {drafts}t_target {whole.model.target_ms:.3f} ms, {fitted}.")
    else:
        notes.append("No fit: the runs cannot tell the cost of a draft step from that of a target pass.")
    if costs := whole.results.costs:
        bare = [f"draft {costs.draft:.3f} ms"]
        if costs.drafts:
            by_name = zip(map(short_name, whole.results.header.drafts), costs.drafts, strict=True)
            bare = [f"{name} {_by_width(times)}" for name, times in by_name]
        head = "" if costs.head is None else f" The draft's head adds {costs.head:.3f} ms to a draft step."
        notes.append(f"Bare forward times: {', '.join(bare)}, target {_by_width(costs.target)}.{head}")
        notes.append("Loop overhead is wall time over the bare time of the same passes.")
    if bound := whole.oracle:
        speed = f", {bound.tokens_per_second:.1f} tokens/s by the fit" if bound.tokens_per_second else ""
        notes.append(
            f"Oracle (Theorem 4.1): {bound.passes} target passes for {bound.tokens:.0f} tokens on {bound.prompts} "
            f"prompts{speed}."
        )
    if found := whole.results.signal_bound:
        speed = f", {whole.signal_speed:.1f} tokens/s by the fit" if whole.signal_speed else ""
        notes.append(
            f"Signal bound (the best stopping rule on a round's entropy and top probability, for each category of "
            f"prompts, in hindsight): {found.passes} target passes and {found.drafted} draft steps for "
            f"{found.tokens} tokens{speed}."
        )
    return Table("Cost model", columns, rows, note=" ".join(notes))


def _by_width(times: Mapping[int, float]) -> str:
    return ", ".join(f"{times[width]:.3f} ms at width {width}" for width in sorted(times))


def _differences(whole: Digest) -> Table:
    title = "Greedy identity"
    if whole.compared is None:
        temperature = whole.results.header.sampling.get("temperature")
        return Table(title, (), (), note=f"Not compared: sampling at temperature {temperature}.")
    if not whole.compared:
        return Table(title, (), (), note="Not compared: no prompt that another entrant and none finished.")
    if not whole.differing:
        return Table(title, (), (), note=f"All {whole.compared} runs gave exactly the tokens of none.")
    columns = ("entrant", "prompt", "repeat", "length", "turn", "position", "none's token", "its token", "logit gap")
    rows = tuple(
        (
            run.entrant,
            run.prompt,
            str(run.repeat),
            str(run.length),
            str(found.turn),
            str(found.position),
            "end" if found.expected is None else str(found.expected),
            "end" if found.found is None else str(found.found),
            UNKNOWN if found.gap is None else f"{found.gap:.2e}",
        )
        for run, found in whole.differing[:SHOWN_DIFFERENCES]
    )
    hidden = len(whole.differing) - len(rows)
    note = (
        f"GREEDY OUTPUT DIFFERS in {len(whole.differing)} of {whole.compared} runs. The first difference of each run"
        + (f"; {hidden} more runs are in the JSON." if hidden else ".")
        + " A logit gap near 0 is a tie between the target's two best tokens."
    )
    return Table("GREEDY OUTPUT DIFFERS", columns, rows, labels=2, note=note, alarm=True)


def _skipped(whole: Digest) -> Table:
    skipped = whole.results.skipped
    note = f"{len(skipped)} of {whole.results.header.suite.get('count', '?')} prompts could not be run on this pair."
    return Table("Prompts left out", ("prompt", "why"), tuple(skipped.items()), labels=2, note=note)


def _count_differing(whole: Digest, entrant: str) -> str:
    if whole.compared is None:
        return UNKNOWN
    return str(sum(run.entrant == entrant for run, _ in whole.differing))


def _spread(spread: Spread | None) -> str:
    return UNKNOWN if spread is None else f"{spread.mean:.2f} ± {spread.sd:.2f}"


def _plain(value: Any) -> Any:
    """Dataclasses and named tuples as dicts, numbers rounded, so that any JSON writer takes it."""
    if is_dataclass(value) and not isinstance(value, type):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return {name: _plain(item) for name, item in fields.items() if item or name not in OF_HIERARCHIES}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: _plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value
