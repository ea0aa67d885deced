"""Measures the cost table of this machine: rounds of fixed lengths of one text or several, run as in decoding."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.logits.judging import judge
from specctl.decoding.lookup import LookupDrafter
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.passes.ordinary_tokens import ordinary_tokens
from specctl.models.passes.preparation_time import working_seconds
from specctl.models.passes.synchronisation import wait
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor, first_for, signal_of, state_predictors
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.observing.pass_times import fill, forget
from specctl.policies import LOOKUP_SIGNALS, SIGNALS, TRAINED_SIGNALS, Signal, StoppingPolicy
from specctl.policies.published import Constant
from specctl.records import DraftStep
from specctl.replay.costs import CostTable, signal_key
from specctl.text_engine.hub import Hub
from specctl.text_engine.pair_rows import passes_of, split, why_alone

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 15, 23, 40)
BATCH_LENGTHS = (0, 1, 2, 3, 4, 6, 9, 15, 40)  # Draft lengths that are timed, with one text and with several at once
IN_A_ROW, ALONE = 3, 12
"""Consecutive rounds of one length, and of those without a draft. The target alone runs the latter in sequence and
faster, because its weights are still in the processor's cache."""
NOT_COUNTED, WARMING = 1, 4  # Number of these rounds that only warm up
CATCHING_UP = (8, 32, 128)  # Numbers of text tokens for which a draft's catching up is timed
WARM_UPS = 1
PASSES = WARM_UPS + 4
BATCH_PASSES = WARM_UPS + 3  # Passes over all lengths, with one text and with several at once
TYPICAL = 4  # The draft length at which signals are priced

SignalSet = frozenset[Signal]


def measure(
    pair: Pair,
    contexts: Sequence[int],
    longest: int,
    signal_sets: Iterable[SignalSet],
    sampling: Sampling,
    overheads: Sequence[float],
    advance: Callable[[], None] = lambda: None,
) -> CostTable:
    """Time rounds of fixed lengths at each context; every cost is the median of interleaved repeats.

    In a hierarchy, each draft is timed together with its verifier only.

    Args:
        pair: with a draft.
        contexts: numbers of tokens in the caches.
        longest: the longest draft that has to be priced.
        signal_sets: the sets of signals that policies read; predictions are timed only for a draft that makes them.
        sampling: of the runs whose cost is predicted.
        overheads: for each draft, milliseconds of a round outside its phases, as measured in a live run.
        advance: called after each of `PASSES` over all lengths, for every draft.
    """
    sets = [signals for signals in dict.fromkeys(signal_sets) if signals]
    hierarchy, draft = len(pair.drafts) > 1, pair.drafts[0]
    missing = set(TRAINED_SIGNALS)
    missing -= {signal_of(predictor) for predictor in predictors(pair).values()}
    if draft.index is not None:
        missing = {*SIGNALS} - LOOKUP_SIGNALS
    elif hierarchy or draft.foresee is None:
        missing.add("next_accept_prob")
    own = [signals for signals in sets if signals.isdisjoint(missing)]
    most = longest if draft.longest is None else min(longest, draft.longest)
    least = 1 if draft.index is None else 2  # a copy needs a token that occurred before
    contexts_here = sorted({max(least, min(context, pair.shared_context - most - 2)) for context in contexts})
    table = _measure(_Texts(pair), contexts_here, most, own, sampling, overheads[0], advance)
    if not hierarchy:
        return table
    below = measure(pair.lower, contexts, longest, sets, sampling, overheads[1:], advance)
    return replace(table, below=below, reading_ms=_measure_reading(pair, int(table.contexts[0]), own, sampling))


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
    """`CostTable.batches`: rounds of fixed lengths over several texts, timed as the hub runs them.

    A round's two phases are the sums of all texts' shares and of their own work, so that the host's work for each text
    is counted.

    Args:
        pair: with one draft, that `require_batches` accepts.
        sizes: numbers of texts, each at least 2.
        alone: of one text; its shortest and longest contexts and its longest draft are taken.
        signal_sets: that policies read and the draft makes.
        sampling: of the runs whose cost is predicted.
        advance: called after each of `BATCH_PASSES` over all lengths, for every size.
    """
    contexts, longest = sorted({int(alone.contexts[0]), int(alone.contexts[-1])}), int(alone.lengths[-1])
    sets = list(signal_sets)
    return {
        rows: _measure(_Texts(pair, rows), contexts, longest, sets, sampling, alone.overhead_ms * rows, advance)
        for rows in sizes
    }


class _Texts:
    """Texts of a pair whose rounds are timed: one by itself, or several in step through the hub."""

    def __init__(self, pair: Pair, rows: int = 1) -> None:
        self.pair, self.rows = pair, rows
        self._hub: Hub[Any] | None = None
        if rows > 1:
            self._hub, self._pairs = split(pair, passes_of(pair, rows))

    def fill(self, sequence: list[int]) -> None:
        """Fill the caches of all texts with a sequence without its last token."""

        def fill_own(own: Pair) -> list[tuple[float, float]]:
            fill_models(own, sequence)
            return []

        self._together(fill_own)

    def rounds(
        self,
        sequence: list[int],
        length: int,
        signals: SignalSet,
        sampling: Sampling,
        count: int = 1,
        head: str | None = None,
    ) -> list[tuple[float, float]]:
        """Milliseconds of the two phases of consecutive rounds, of all texts together; see `timed_round`.

        Args:
            sequence: the cached tokens and one more.
            length: the tokens that each round drafts.
            signals: that are read.
            sampling: of the run.
            count: the number of rounds.
            head: name of the draft's head that predicts; None for the first that makes the signals.
        """

        def own_rounds(own: Pair) -> list[tuple[float, float]]:
            known = predictors(own)
            predictor = known[head] if head is not None else first_for(signals, known.values()) if signals else None
            return [timed_round(own, sequence, length, signals, sampling, predictor) for _ in range(count)]

        return self._together(own_rounds)

    def reading_ms(
        self, sequence: list[int], length: int, signals: SignalSet, sampling: Sampling, head: str | None = None
    ) -> float:
        """Milliseconds that reading signals adds for each drafted token of a text.

        A first round with these signals warms up; the difference is taken between the two rounds after it.
        """
        self.rounds(sequence, length, signals, sampling, head=head)
        ((bare, _),) = self.rounds(sequence, length, frozenset(), sampling)
        ((read, _),) = self.rounds(sequence, length, signals, sampling, head=head)
        return (read - bare) / length / self.rows

    def _together(self, work: Callable[[Pair], list[tuple[float, float]]]) -> list[tuple[float, float]]:
        """Do the same work with every text; returns the summed times of each round."""
        if self._hub is None:
            return work(self.pair)
        for row, own in enumerate(self._pairs):
            self._hub.begin(row, partial(work, own))
        ended: list[list[tuple[float, float]]] = []
        while self._hub.busy:
            ended += [times for _, times in self._hub.advance()]
        return [(sum(one[0] for one in each), sum(one[1] for one in each)) for each in zip(*ended, strict=True)]


def _measure(
    texts: _Texts,
    contexts: Sequence[int],
    longest: int,
    sets: Sequence[SignalSet],
    sampling: Sampling,
    overhead: float,
    advance: Callable[[], None],
) -> CostTable:
    """The cost table of the first draft, verified by the target."""
    pair, alone = texts.pair, texts.rows == 1
    lengths = sorted({length for length in (LENGTHS if alone else BATCH_LENGTHS) if length < longest} | {longest})
    plain: dict[tuple[int, int], list[tuple[float, float]]] = {(c, k): [] for c in contexts for k in lengths}
    read: dict[SignalSet, list[float]] = {signals: [] for signals in sets}
    catching_up = alone and pair.drafts[0].index is None
    missed: dict[int, list[float]] = {count: [] for count in CATCHING_UP if count < contexts[-1] and catching_up}
    on_states = state_predictors(predictors(pair)) if alone else {}
    # Heads of one shape cost the same; separate measurements would add noise. DISCO heads hardly differ.
    shapes = {
        name: (sum(weight.numel() for weight in predictor.parameters()), predictor.reads_signals)
        for name, predictor in (on_states if len(on_states) > 1 else {}).items()
    }
    predicting: dict[tuple[int, bool], list[float]] = {shape: [] for shape in shapes.values()}
    typical = min(TYPICAL, longest)
    with torch.inference_mode():
        for number in range(PASSES if alone else BATCH_PASSES):
            # Times of the warm-up pass are discarded.
            counted = number >= WARM_UPS
            for context in contexts:
                sequence = _sequence(pair, context)
                texts.fill(sequence)
                for length in lengths:
                    count, cold = (IN_A_ROW, NOT_COUNTED) if length else (ALONE, WARMING)
                    times = texts.rounds(sequence, length, frozenset(), sampling, count)
                    # At the first round of a length the processor's cache holds other weights than in a run.
                    plain[context, length] += times[cold:] if counted else []
            for count, found in missed.items():
                ms = _catching_up_ms(pair, sequence, count, sampling)
                found += [ms] if counted else []
            for signals, found in read.items():
                ms = texts.reading_ms(sequence, typical, signals, sampling)
                found += [ms] if counted else []
            for name, shape in shapes.items():
                ms = texts.reading_ms(sequence, typical, frozenset({"accept_prob"}), sampling, name)
                predicting[shape] += [ms] if counted else []
            advance()
    table = np.array([[np.median(plain[c, k], axis=0) for k in lengths] for c in contexts])  # (C, K, 2)
    return CostTable(
        np.array(contexts, dtype=np.float64),
        np.array(lengths, dtype=np.float64),
        table[..., 0],
        table[..., 1],
        {signal_key(signals): max(0.0, median(times)) for signals, times in read.items()},
        overhead,
        head_ms={name: max(0.0, median(predicting[shape])) for name, shape in shapes.items()},
        catch_up_ms={count: max(0.0, median(times)) for count, times in missed.items()},
    )


def _sequence(pair: Pair, context: int) -> list[int]:
    """Ids of a text. For a lookup the last one occurred before, so that any number is copied: at least two tokens."""
    sequence = ordinary_tokens(context, pair.vocabulary, pair.eos)
    return sequence if pair.drafts[0].index is None else [*sequence[:-1], sequence[0]]


def _drafter(
    draft: Slot, policy: StoppingPolicy, signals: SignalSet = frozenset(), predictor: TrainedPredictor | None = None
) -> LookupDrafter | ModelDrafter:
    """A draft's drafter, which records these signals."""
    if draft.index is not None:
        return LookupDrafter(draft, policy, signals)
    return ModelDrafter(draft, policy, signals, predictor)


def _catching_up_ms(pair: Pair, sequence: list[int], count: int, sampling: Sampling) -> float:
    """Additional milliseconds of a draft of one token if it first reads ``count`` tokens of the text."""
    draft = pair.drafts[0]
    taken = []
    for unread in (count, count, 0):  # the first warms up
        forget(draft, len(sequence) - 1, unread)
        drafter = ModelDrafter(draft, Constant(draft_length=1))
        drafter.begin(sampling, frozenset(), None)
        wait(draft.device)
        began = perf_counter()
        drafter.draft(sequence, 1)
        wait(draft.device)
        taken.append(perf_counter() - began)
        draft.rollback(len(sequence) - 1)
    return (taken[1] - taken[2]) * 1e3


def _measure_reading(pair: Pair, context: int, sets: Sequence[SignalSet], sampling: Sampling) -> dict[str, float]:
    """By `signal_key`, the milliseconds that signals add to a pass in which the first draft verifies the second."""
    typical = Constant(draft_length=TYPICAL)
    sequence = _sequence(pair.lower, context)
    found: dict[SignalSet, list[float]] = {signals: [] for signals in sets}

    def verifying(signals: SignalSet) -> float:
        inner = _drafter(pair.drafts[1], typical)
        block = Constant(draft_length=TYPICAL + 1)
        predictor = first_for(signals, predictors(pair).values())
        drafter = PreVerifiedDrafter(inner, pair.drafts[0], block, once=True, record=signals, predictor=predictor)
        drafter.begin(sampling, frozenset(), None)
        (round_,) = drafter.draft(sequence, TYPICAL + 1).inner
        wait(pair.drafts[0].device)
        drafter.rollback(len(sequence) - 1)
        return round_.verify_seconds * 1e3

    with torch.inference_mode():
        fill_models(pair, sequence)
        for number in range(PASSES):
            for signals in sets:
                bare, reading = verifying(frozenset()), verifying(signals)
                if number >= WARM_UPS:
                    found[signals].append(reading - bare)
    return {signal_key(signals): max(0.0, median(times)) for signals, times in found.items()}


class Asked(Constant):
    """Like `constant`, but decides after each token, as policies that read signals do.

    `constant` itself drafts faster on devices that need not wait for a decision (`specctl.decoding.steps_ahead`).
    """

    def should_stop(self, step: DraftStep) -> bool:  # noqa: ARG002 - signature of the interface
        return False


def timed_round(
    pair: Pair,
    sequence: list[int],
    length: int,
    signals: SignalSet,
    sampling: Sampling,
    predictor: TrainedPredictor | None = None,
) -> tuple[float, float]:
    """Milliseconds of drafting and of verifying one round of a fixed length; in a batch, this text's shares.

    A draft head begins a round by reading the tokens of the round before: the accepted ones and one more. It is timed
    after a half-accepted round of the same length.
    """
    reread = min(length // 2, len(sequence) - 1) if pair.drafts[0].reads_states else 0
    forget(pair.drafts[0], len(sequence) - 1, reread)
    policy = (Asked if signals else Constant)(draft_length=max(1, length))
    drafter = _drafter(pair.drafts[0], policy, signals, predictor)
    drafter.begin(sampling, frozenset(), None)
    draft_device, target_device = pair.drafts[0].device, pair.target.device
    wait(draft_device)
    began = working_seconds()
    draft = drafter.draft(sequence, length)
    wait(draft_device)
    drafted = working_seconds()
    forward = pair.target.extend([sequence[-1], *draft.tokens], keep=length + 1)
    judge(draft, forward, sampling, None)
    wait(target_device)
    verified = working_seconds()
    for runner in (pair.target, pair.drafts[0]):
        runner.rollback(len(sequence) - 1)
    return (drafted - began) * 1e3, (verified - drafted) * 1e3


def predictors(pair: Pair) -> Mapping[str, TrainedPredictor]:
    """The heads of the first draft by name."""
    return pair.named_predictors[0] if pair.named_predictors else {}


def fill_models(pair: Pair, sequence: list[int]) -> None:
    """Fill all caches with a sequence without its last token."""
    for runner in (pair.target, *pair.drafts):
        fill(runner, sequence[:-1])
