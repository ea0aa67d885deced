"""Everything that tables, JSON and figures show, computed once from the results."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from specctl.benchmark.cost_model import (
    CandidateCost,
    CandidateLevels,
    CostModel,
    OracleBound,
    bare_model,
    candidate_costs,
    candidate_levels,
    fit,
    oracle_bound,
    signal_speed,
    simulated_speeds,
)
from specctl.benchmark.summaries import Summary, summarise
from specctl.observing.results import BASELINE, Difference, Run, RunSet, compare, speedup
from specctl.peers.engines import ASSISTED
from specctl.printable import counted
from specctl.replay.pearl import Simulated
from specctl.reporting.placing import Placed, level, placing
from specctl.statistics import Interval


@dataclass(frozen=True, slots=True)
class Digest:
    """The results with everything computed from them."""

    results: RunSet  # of an unfinished benchmark, those of complete rounds
    finished: int  # number of runs, incomplete rounds included
    # overall, by_category, by_length: one summary for each candidate with runs in that part
    overall: list[Summary]
    by_category: dict[str, list[Summary]]
    by_length: dict[int, list[Summary]]
    model: CostModel | None  # cost model fitted to the runs, or None
    bare: CostModel | None  # cost model from bare forward times, or None if they were not measured
    costs: list[CandidateCost]
    oracle: OracleBound | None
    # tokens/s of the best stopping rule on the draft's signals, by the fit; None if not computed
    signal_speed: float | None
    compared: int | None  # how many greedy runs were compared with the baseline, token by token; None when sampling
    differing: list[tuple[Run, Difference]]  # compared runs whose tokens differ from the baseline's
    levels: list[CandidateLevels]  # every candidate's passes by model; empty unless several drafts are loaded
    # how fast drafting in parallel would be on two devices; empty without stretches
    simulated: list[Simulated] = field(default_factory=list)
    sync_ms: float = 0.0  # the milliseconds for each step that this assumes

    @property
    def simulated_baseline_ms(self) -> float:
        """Milliseconds of the texts of `simulated` without a draft, by the same bare forward times."""
        costs = self.results.costs
        return self.simulated[0].tokens * costs.target[min(costs.target)] if self.simulated and costs else 0.0

    @property
    def expected_runs(self) -> int | None:
        """Number of runs of the whole benchmark; None if the header does not contain the number of prompts."""
        return expected_runs(self.results)

    @property
    def unfinished(self) -> str | None:
        """How much of the benchmark is finished, in words; None if all of it is, or if the total is unknown."""
        expected, shown = self.expected_runs, len(self.results.runs)
        if expected is None or self.finished >= expected:
            return None
        part = f" (only the {shown} in complete rounds count)" if shown < self.finished else ""
        return f"stopped after {self.finished} of {expected} runs{part}"


def expected_runs(results: RunSet) -> int | None:
    """Number of runs of the whole benchmark; None if the header does not contain the number of prompts."""
    header, count = results.header, results.header.suite.get("count")
    if not isinstance(count, int):
        return None
    count -= len(results.skipped)
    return count * len(header.candidates) * header.repeats * max(1, len(header.lengths))


def complete_rounds(results: RunSet) -> RunSet:
    """The results without incomplete rounds, so that all candidates ran the same prompts.

    A round is one prompt to one length. Candidates without any run, and peers that failed, are not waited for.
    """
    rounds: dict[tuple[str, int, int], set[str]] = {}
    for run in results.runs:
        rounds.setdefault((run.prompt, run.repeat, run.length), set()).add(run.candidate)
    awaited = {run.candidate for run in results.runs} - results.failed.keys()
    runs = [run for run in results.runs if rounds[run.prompt, run.repeat, run.length] >= awaited]
    return replace(results, runs=runs)


def digest(results: RunSet, sync_ms: float = 0.0) -> Digest:
    """Compute everything.

    Args:
        results: with at least a header.
        sync_ms: milliseconds that two devices are assumed to take in each step to synchronise, where drafting in
            parallel is simulated.
    """
    everything = results
    expected = expected_runs(results)
    if expected is not None and len(results.runs) < expected:
        results = complete_rounds(results)
    labels = [candidate.label for candidate in results.header.candidates]
    lengths = sorted({run.length for run in results.runs})
    overall = summarise(results.runs, labels)
    model = fit(results)
    bare = bare_model(results.costs) if results.costs else None
    greedy = not results.header.sampling.get("temperature")
    compared = compare(everything) if greedy else []
    return Digest(
        results=results,
        finished=len(everything.runs),
        overall=overall,
        by_category={
            category: summarise([run for run in results.runs if run.category == category], labels)
            for category in results.categories()
        },
        by_length={
            length: summarise([run for run in results.runs if run.length == length], labels) for length in lengths
        },
        model=model,
        bare=bare,
        costs=candidate_costs(results, overall, model),
        oracle=oracle_bound(results, BASELINE, model),
        signal_speed=signal_speed(results, model),
        compared=len(compared) if greedy else None,
        differing=[(run, difference) for run, difference in compared if difference],
        levels=candidate_levels(results, model if model and model.explains and min(model.drafts_ms) > 0 else bare),
        simulated=simulated_speeds(results, sync_ms),
        sync_ms=sync_ms,
    )


RARELY = 0.2  # A policy that drafts in a smaller share of its rounds hardly drafts


def verdict(digest: Digest) -> str:
    """A sentence with the fastest candidate within noise, its engine, and whether all gave the baseline's tokens."""
    parts = _same_engine(digest), _resting(digest), _identity(digest), (digest.unfinished or "")
    said = (f"verdict: {_fastest(digest)}", *parts)
    return "; ".join(filter(None, said))


def standings(digest: Digest, labels: Iterable[str] | None = None) -> list[Placed]:
    """The candidates that share a prompt with the baseline and with the fastest of them, the fastest first."""
    known = {one.candidate: one.speedup.of_totals for one in digest.overall if one.speedup is not None}
    order = sorted(known.keys() if labels is None else known.keys() & set(labels), key=lambda one: -known[one].value)
    if not order:
        return []
    runs = digest.results.of(order[0])
    found = []
    for label in order:
        # Paired by prompt, so that differences between prompts cancel.
        distance = speedup(runs, digest.results.of(label))
        if distance is not None:
            own = Interval(1.0) if label == BASELINE else known[label]
            found.append(Placed(label, own, distance.of_totals))
    return found


def _fastest(digest: Digest) -> str:
    placed = standings(digest)
    if len(digest.results.header.candidates) == 1:
        return f"{BASELINE} ran alone, with nothing to compare it with; name a draft with --draft MODEL"
    if all(one.name == BASELINE for one in placed):
        return f"no candidate shares a prompt with {BASELINE}"
    # A label may name its engine.
    engines = {
        one.name: engine
        for one in placed
        if (engine := digest.results.header.engine_of(one.name)) is not None and engine not in one.name
    }
    leading = {engines.get(one.name) for one in level(placed)}
    if len(leading) == 1:
        engine = leading.pop()
        return placing(placed, f" on {engine}" if engine is not None else "")
    return placing(
        [one._replace(name=f"{one.name} on {engines[one.name]}") if one.name in engines else one for one in placed]
    )


def _same_engine(digest: Digest) -> str:
    """Compare our policy with transformers' loops where both ran eagerly and the other candidates did not."""
    header = digest.results.header
    ours = [one.label for one in header.candidates if one.engine is not None]
    theirs = [one.label for one in header.candidates if one.peer in ASSISTED]
    placed = standings(digest, [*ours, *theirs])
    names = {one.name for one in placed}
    if not names & {*ours} or not names & {*theirs}:
        return ""
    return f"of those that ran eagerly, {placing(placed)}"


def _resting(digest: Digest) -> str:
    """Name the policies that hardly drafted, because drafts do not pay or a lookup found nothing to copy."""
    found = []
    for one in digest.results.header.candidates:
        rounds = [round_ for run in digest.results.of(one.label) for round_ in run.rounds]
        share = sum(round_.drafted > 0 for round_ in rounds) / len(rounds) if rounds else 1.0
        if one.label != BASELINE and share < RARELY:
            found.append(f"{one.label} drafted in {share:.0%} of its rounds")
    return "; ".join(found)


def _identity(digest: Digest) -> str:
    if digest.compared is None:
        return "tokens not compared, since they were sampled"
    if not digest.compared:
        return "tokens not compared"
    if digest.differing:
        return f"GREEDY OUTPUT DIFFERS in {len(digest.differing)} of {digest.compared} runs"
    return f"{'all ' * (digest.compared > 1)}{counted(digest.compared, 'run')} gave the tokens of {BASELINE}"
