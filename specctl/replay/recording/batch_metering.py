"""Measures what rounds cost in which several texts draft and are verified together."""

from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

import numpy as np

from specctl.batching.pair_rows import passes_of, split, why_alone
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.passes.ordinary_tokens import ordinary_tokens
from specctl.models.predictors.predictor_checkpoint import first_for
from specctl.models.running.pair import Pair
from specctl.replay.costs import CostTable, signal_key
from specctl.replay.recording.metering import TYPICAL, SignalSet, fill_models, predictors, timed_round

LENGTHS = (0, 1, 2, 3, 4, 6, 9, 15, 40)
IN_A_ROW, NOT_COUNTED = 4, 1
"""Consecutive rounds of one length, and those of them that warm up."""
REPEATS = 3


def require_batches(pair: Pair) -> None:
    """Raise UsageError for a pair that writes one text at a time."""
    if (why := why_alone(pair)) is not None:
        raise UsageError(f"--batch: texts are written one at a time, for {why}", "leave --batch out")


def measure_batches(
    pair: Pair,
    sizes: Iterable[int],
    alone: CostTable,
    signal_sets: Iterable[SignalSet],
    sampling: Sampling,
    advance: Callable[[], None] = lambda: None,
) -> dict[int, CostTable]:
    """`CostTable.batches`: rounds of fixed lengths over so many texts, timed as the hub runs them.

    A round's two phases are the sums of all texts' shares and of their own work, so that what the host does for each
    text is counted.

    Args:
        pair: with one draft; `require_batches` says nothing.
        sizes: numbers of texts, each at least 2.
        alone: of one text, whose shortest and longest contexts and longest draft are taken.
        signal_sets: that policies read and the draft makes.
        sampling: of the runs whose cost is predicted.
        advance: called after each size.
    """
    found = {}
    for rows in sizes:
        found[rows] = _measure(pair, rows, alone, list(signal_sets), sampling)
        advance()
    return found


def _measure(pair: Pair, rows: int, alone: CostTable, sets: list[SignalSet], sampling: Sampling) -> CostTable:
    longest = int(alone.lengths[-1])
    lengths = sorted({length for length in LENGTHS if length < longest} | {longest})
    contexts = sorted({int(alone.contexts[0]), int(alone.contexts[-1])})
    hub, pairs = split(pair, passes_of(pair, rows))
    phases: dict[tuple[int, int], tuple[float, float]] = {}
    reading: dict[str, float] = {}

    def together(work: Callable[[Pair], list[tuple[float, float]]]) -> list[tuple[float, float]]:
        """What each round took of all texts that did the same work in step."""
        for row, own in enumerate(pairs):
            hub.begin(row, partial(work, own))
        ended: list[list[tuple[float, float]]] = []
        while hub.busy:
            ended += [times for _, times in hub.advance()]
        return [(sum(one[0] for one in each), sum(one[1] for one in each)) for each in zip(*ended, strict=True)]

    def rounds(sequence: list[int], length: int, signals: SignalSet, own: Pair) -> list[tuple[float, float]]:
        predictor = first_for(signals, predictors(own).values()) if signals else None
        return [timed_round(own, sequence, length, signals, sampling, predictor) for _ in range(IN_A_ROW)][NOT_COUNTED:]

    for context in contexts:
        sequence = ordinary_tokens(context, pair.vocabulary, pair.eos)

        def filled(own: Pair, sequence: list[int] = sequence) -> list[tuple[float, float]]:
            fill_models(own, sequence)
            return []

        together(filled)
        taken: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
        for _ in range(REPEATS):
            for length, times in taken.items():
                times += together(partial(rounds, sequence, length, frozenset()))
        for length, times in taken.items():
            phases[context, length] = median(one[0] for one in times), median(one[1] for one in times)
    typical = min(TYPICAL, longest)
    for signals in sets:
        more = []
        for _ in range(REPEATS):
            read, bare = (together(partial(rounds, sequence, typical, each)) for each in (signals, frozenset()))
            more.append(median(one[0] for one in read) - median(one[0] for one in bare))
        reading[signal_key(signals)] = max(0.0, median(more)) / typical / rows
    table = np.array([[phases[context, length] for length in lengths] for context in contexts])  # (C, K, 2)
    return CostTable(
        np.array(contexts, dtype=np.float64),
        np.array(lengths, dtype=np.float64),
        table[..., 0],
        table[..., 1],
        reading,
        alone.overhead_ms * rows,
    )
