"""The outcome of a benchmark in one line, which can be searched for in a log."""

from specctl.benchmark.digest import Digest
from specctl.observing.results import BASELINE
from specctl.statistics.intervals import Interval


def verdict(digest: Digest) -> str:
    """Which candidate was fastest, how sure that is, and whether it gave the baseline's tokens."""
    return "; ".join(filter(None, (f"verdict: {_fastest(digest)}", _identity(digest), _unfinished(digest))))


def _fastest(digest: Digest) -> str:
    speedups = {
        summary.candidate: summary.speedup.of_totals
        for summary in digest.overall
        if summary.speedup is not None and summary.candidate != BASELINE
    }
    if not speedups:
        return f"no candidate shares a prompt with {BASELINE}"
    name, speedup = max(speedups.items(), key=lambda entry: entry[1].value)
    if speedup.value <= 1:
        return f"{BASELINE} is fastest, before {name}: {_times(speedup)}"
    return f"{name} is fastest: {_times(speedup)}"


def _identity(digest: Digest) -> str:
    if digest.compared is None:
        return "tokens not compared, since they were sampled"
    if not digest.compared:
        return "tokens not compared"
    if digest.differing:
        return f"GREEDY OUTPUT DIFFERS in {len(digest.differing)} of {digest.compared} runs"
    return f"all {digest.compared} runs gave the tokens of {BASELINE}"


def _unfinished(digest: Digest) -> str:
    expected, done = digest.expected_runs, len(digest.results.runs)
    return f"unfinished: {done} of {expected} runs" if expected is not None and done < expected else ""


def _times(speedup: Interval) -> str:
    if speedup.low is None or speedup.high is None:
        return f"{speedup.value:.2f}x"
    return f"{speedup.value:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"
