"""Tables of forward passes by model, and of the speeds that the cost model predicts from them."""

from collections.abc import Iterator, Mapping

from specctl.benchmark.cost_model import CandidateCost
from specctl.benchmark.digest import Digest
from specctl.benchmark.hierarchy_levels import CandidateLevels
from specctl.printable import counted
from specctl.profile.model_names import short_names
from specctl.replay.parallel_replay import Simulated
from specctl.reporting.placing import listed
from specctl.reporting.table import DOWN, UNKNOWN, UP, Columns, Table, number, percent


def level_table(digest: Digest) -> Table:
    """Passes per token and HSDDW's sigma and eta of each model, one row per candidate."""
    names = short_names(digest.results.header.drafts)
    rows = []
    for found in digest.levels:
        by_draft = {level.draft: level for level in found.levels}
        cells = [number(passes, 3) for passes in found.passes]
        for draft in range(len(names)):
            level = by_draft.get(draft)
            cells += [number(value, 3) for value in ((level.redundancy, level.utilisation) if level else (None, None))]
        rows.append((found.candidate, *cells, _pays(found)))
    columns = (
        "candidate",
        *(f"{name} passes/token" for name in names),
        f"target passes/token{DOWN}",
        *(column for name in names for column in (f"{name} sigma{DOWN}", f"{name} eta{DOWN}")),
        "pays at target ms",
    )
    return Table("Levels", columns, tuple(rows))


def cost_table(digest: Digest) -> Table:
    """Measured speed, predicted speed and the bounds, one row per candidate."""
    columns: Columns[CandidateCost] = {
        "candidate": lambda one: one.candidate,
        f"measured tokens/s{UP}": lambda one: f"{one.measured:.1f}",
        f"predicted tokens/s{UP}": lambda one: number(one.predicted, 1),
        f"ms/token (eq. 5.1){DOWN}": lambda one: number(one.latency_ms, 3),
        f"loop overhead{DOWN}": lambda one: number(one.overhead, 3),
    }
    if digest.oracle is not None:
        columns |= {
            f"fewest passes / passes{UP}": lambda one: percent(one.passes_share),
            f"oracle time / time{UP}": lambda one: percent(one.time_share),
        }
    if digest.results.signal_bound is not None:
        columns |= {f"signal bound / time{UP}": lambda one: percent(one.signal_share)}
    return Table.of("Cost model", columns, digest.costs, note=" ".join(_cost_notes(digest)))


def pass_table(digest: Digest) -> list[Table]:
    """Bare forward times, one row for each width that was timed; nothing where none were."""
    costs = digest.results.costs
    if costs is None:
        return []
    names = short_names(digest.results.header.drafts) or ["draft"]
    models: list[Mapping[int, float]] = [*(costs.drafts or ({1: costs.draft},)), costs.target]
    widths = sorted({width for times in models for width in times})
    rows = tuple((str(width), *(number(times.get(width), 3) for times in models)) for width in widths)
    columns = ("tokens in a pass", *(f"{name} ms{DOWN}" for name in names), f"target ms{DOWN}")
    note = "" if costs.head is None else f"The draft's head adds {costs.head:.3f} ms to a draft step."
    return [Table("Bare forward times", columns, rows, labels=0, note=note)]


def parallel_table(digest: Digest) -> Table:
    """What a second device would bring, simulated from the stretches of the baseline's texts."""
    alone = digest.simulated_baseline_ms
    columns: Columns[Simulated] = {
        "simulated": lambda one: (
            "in parallel, t_target / t_draft" if one.ratio else "in parallel" if one.parallel else "in turns"
        ),
        "block": lambda one: str(one.block),
        "steps": lambda one: str(one.steps),
        f"tokens/step{UP}": lambda one: number(one.tokens / one.steps, 2),
        f"ms/step{DOWN}": lambda one: number(one.milliseconds / one.steps, 3),
        f"simulated tokens/s{UP}": lambda one: number(one.tokens_per_second, 1),
        f"simulated speedup{UP}": lambda one: number(alone / one.milliseconds, 2),
    }
    note = (
        "Simulated for two devices that do not slow each other down, from the draft's token at every place of none's "
        f"texts and the bare forward times above; a step in parallel takes {digest.sync_ms:g} ms more to synchronise "
        "(--sync-ms). The time of prompts is left out."
    )
    return Table.of("In parallel (simulated: two devices)", columns, digest.simulated, note=note)


def _cost_notes(digest: Digest) -> Iterator[str]:
    """The fitted and the measured times of a pass, and the bounds, as far as the results contain them."""
    names = short_names(digest.results.header.drafts)
    if model := digest.model:
        fitted = f"R² {model.r_squared:.4f}" if model.r_squared is not None else "R² unknown"
        if not model.explains:
            fitted += ": it explains less than half of how the runs' times differ, so do not trust what it predicts"
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
            yield f"{listed(above)} measured faster than the {name}, so what the fit gives for it bounds nothing here."


def _pays(found: CandidateLevels) -> str:
    if found.pays_ms is None:
        return "never" if found.nested else UNKNOWN
    low, high = found.pays_ms
    return f"from {low:.2f}" if high is None else f"{low:.2f} to {high:.2f}"


def _by_the_fit(tokens_per_second: float | None) -> str:
    return f", {tokens_per_second:.1f} tokens/s by the fit" if tokens_per_second else ""
