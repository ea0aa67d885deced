"""The outcome of a benchmark in one line, which can be searched for in a log."""

from collections.abc import Iterable

from specctl.benchmark.digest import Digest
from specctl.observing.results import BASELINE
from specctl.observing.speedup import speedup
from specctl.peers.names import ASSISTED
from specctl.printable import counted
from specctl.reporting.placing import Placed, level, placing
from specctl.statistics.intervals import Interval

RARELY = 0.2
"""The share of rounds below which a policy hardly drafts."""


def verdict(digest: Digest) -> str:
    """Who was fastest as far as the runs tell, on which engine, and whether all gave the baseline's tokens."""
    parts = _same_engine(digest), _resting(digest), _identity(digest), (digest.unfinished or "")
    said = (f"verdict: {_fastest(digest)}", *parts)
    return "; ".join(filter(None, said))


def standings(digest: Digest, labels: Iterable[str] | None = None) -> list[Placed]:
    """The candidates that share a prompt with the baseline and with the fastest of them, the fastest first.

    Args:
        digest: of the results.
        labels: of some candidates; None for all, the baseline included.
    """
    known = {one.candidate: one.speedup.of_totals for one in digest.overall if one.speedup is not None}
    order = sorted(known.keys() if labels is None else known.keys() & set(labels), key=lambda one: -known[one].value)
    if not order:
        return []
    runs = digest.results.of(order[0])
    found = []
    for label in order:
        # Paired: what makes a prompt quick or slow for all does not count.
        behind = speedup(runs, digest.results.of(label))
        if behind is not None:
            own = Interval(1.0) if label == BASELINE else known[label]
            found.append(Placed(label, own, behind.of_totals))
    return found


def _fastest(digest: Digest) -> str:
    placed = standings(digest)
    if len(digest.results.header.candidates) == 1:
        return f"{BASELINE} ran alone, with nothing to compare it with; name a draft with --draft MODEL"
    if all(one.name == BASELINE for one in placed):
        return f"no candidate shares a prompt with {BASELINE}"
    # A label that names its engine says so itself.
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
    """Our policy against transformers' loops where both ran eagerly and the other candidates did not."""
    header = digest.results.header
    ours = [one.label for one in header.candidates if one.engine is not None]
    theirs = [one.label for one in header.candidates if one.peer in ASSISTED]
    placed = standings(digest, [*ours, *theirs])
    names = {one.name for one in placed}
    if not names & {*ours} or not names & {*theirs}:
        return ""
    return f"of those that ran eagerly, {placing(placed)}"


def _resting(digest: Digest) -> str:
    """The policies that hardly drafted: drafts do not pay, or a lookup found nothing to copy."""
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
