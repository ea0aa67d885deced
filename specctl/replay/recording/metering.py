"""Measures the cost table of this machine: times rounds of fixed lengths, run as the decoding loop runs them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np
import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.rows.judging import judge
from specctl.decoding.sampling import Sampling
from specctl.models.passes.ordinary_tokens import ordinary_tokens
from specctl.models.passes.preparation_time import working_seconds
from specctl.models.passes.synchronisation import wait
from specctl.models.predictors.predictor_checkpoint import TrainedPredictor, first_for, signal_of, state_predictors
from specctl.models.running.pair import Pair
from specctl.observing.pass_times import fill, forget
from specctl.policies import TRAINED_SIGNALS, Signal
from specctl.policies.rules.constant import Constant
from specctl.records import DraftStep
from specctl.replay.costs import CostTable, signal_key

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 15, 23, 40)
IN_A_ROW, ALONE = 3, 12
"""Consecutive rounds of one length, and of those without a draft, which follow one another in a run of the target
alone and are faster then: its weights are still in the processor's cache. The first is not counted, and of the others
the first four."""
NOT_COUNTED, WARMING = 1, 4
CATCHING_UP = (8, 32, 128)
"""Tokens that a draft reads at once, where what it takes to catch up with a text is priced."""
WARM_UPS = 1
PASSES = WARM_UPS + 4
TYPICAL = 4
"""The draft length at which signals are priced."""

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
    hierarchy = len(pair.drafts) > 1
    missing = set(TRAINED_SIGNALS)
    missing -= {signal_of(predictor) for predictor in predictors(pair).values()}
    if hierarchy or pair.drafts[0].foresee is None:
        missing.add("next_accept_prob")
    own = [signals for signals in sets if signals.isdisjoint(missing)]
    table = _measure_top(pair, contexts, longest, own, sampling, overheads[0], advance)
    if not hierarchy:
        return table
    below = measure(pair.lower, contexts, longest, sets, sampling, overheads[1:], advance)
    return replace(table, below=below, reading_ms=_measure_reading(pair, int(table.contexts[0]), own, sampling))


def _measure_top(
    pair: Pair,
    contexts: Sequence[int],
    longest: int,
    sets: Sequence[SignalSet],
    sampling: Sampling,
    overhead: float,
    advance: Callable[[], None],
) -> CostTable:
    """The cost table of the first draft, verified by the target."""
    if (draft := pair.drafts[0]).longest is not None:
        longest = min(longest, draft.longest)
    lengths = sorted({length for length in LENGTHS if length < longest} | {longest})
    contexts = sorted({max(1, min(context, pair.shared_context - longest - 2)) for context in contexts})
    plain: dict[tuple[int, int], tuple[list[float], list[float]]] = {
        (c, k): ([], []) for c in contexts for k in lengths
    }
    read: dict[SignalSet, list[float]] = {signals: [] for signals in sets}
    missed: dict[int, list[float]] = {count: [] for count in CATCHING_UP if count < contexts[-1]}
    on_states = state_predictors(predictors(pair))
    several = on_states if len(on_states) > 1 else {}
    # Heads of one shape cost the same, which separate measurements would not show. DISCO heads hardly differ.
    shapes = {
        name: (sum(weight.numel() for weight in predictor.parameters()), predictor.reads_signals)
        for name, predictor in several.items()
    }
    predicting: dict[tuple[int, bool], list[float]] = {shape: [] for shape in shapes.values()}
    typical = min(TYPICAL, longest)
    with torch.inference_mode():
        for number in range(PASSES):
            for context in contexts:
                sequence = ordinary_tokens(context, pair.vocabulary, pair.eos)
                fill_models(pair, sequence)
                for length in lengths:
                    for again in range(IN_A_ROW if length else ALONE):
                        times = timed_round(pair, sequence, length, frozenset(), sampling)
                        # At the first round of a length the processor's cache holds other weights than in a run.
                        if number >= WARM_UPS and again >= (NOT_COUNTED if length else WARMING):
                            for measured, time in zip(plain[context, length], times, strict=True):
                                measured.append(time)
            for count, found in missed.items():
                catching_up = _catching_up_ms(pair, sequence, count, sampling)
                if number >= WARM_UPS:
                    found.append(catching_up)
            for signals in sets:
                predictor = first_for(signals, predictors(pair).values())
                reading = _reading_ms(pair, sequence, typical, signals, sampling, predictor)
                if number >= WARM_UPS:
                    read[signals].append(reading)
            for name, shape in shapes.items():
                reading = _reading_ms(pair, sequence, typical, frozenset({"accept_prob"}), sampling, several[name])
                if number >= WARM_UPS:
                    predicting[shape].append(reading)
            advance()
    table = np.array([[[median(times) for times in plain[c, k]] for k in lengths] for c in contexts])  # (C, K, 2)
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


def _catching_up_ms(pair: Pair, sequence: list[int], count: int, sampling: Sampling) -> float:
    """Milliseconds by which a draft of one token takes longer that begins by reading ``count`` tokens of the text."""
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


def _reading_ms(
    pair: Pair,
    sequence: list[int],
    length: int,
    signals: SignalSet,
    sampling: Sampling,
    predictor: TrainedPredictor | None,
) -> float:
    """Milliseconds that reading signals adds for each drafted token of a round.

    A first round with these signals warms up; the difference is taken between the two rounds after it.
    """
    timed_round(pair, sequence, length, signals, sampling, predictor)
    bare = timed_round(pair, sequence, length, frozenset(), sampling)[0]
    return (timed_round(pair, sequence, length, signals, sampling, predictor)[0] - bare) / length


def _measure_reading(pair: Pair, context: int, sets: Sequence[SignalSet], sampling: Sampling) -> dict[str, float]:
    """By `signal_key`, the milliseconds that signals add to a pass in which the first draft verifies the second."""
    typical = Constant(draft_length=TYPICAL)
    sequence = ordinary_tokens(context, pair.vocabulary, pair.eos)
    found: dict[SignalSet, list[float]] = {signals: [] for signals in sets}

    def verifying(signals: SignalSet) -> float:
        inner = ModelDrafter(pair.drafts[1], typical)
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
    """Drafts like `constant`, but is asked after each token, as policies are that read signals.

    Where a device need not wait for such an answer (`specctl.decoding.steps_ahead`), `constant` drafts faster.
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

    A draft head begins a round by reading what the round before it emitted, as many tokens as were accepted and one
    more. It is timed after a round of the same length of which half was accepted.
    """
    reread = min(length // 2, len(sequence) - 1) if pair.drafts[0].reads_states else 0
    forget(pair.drafts[0], len(sequence) - 1, reread)
    policy = (Asked if signals else Constant)(draft_length=max(1, length))
    drafter = ModelDrafter(pair.drafts[0], policy, signals, predictor)
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
    """Let all caches hold a sequence but for its last token."""
    for runner in (pair.target, *pair.drafts):
        fill(runner, sequence[:-1])
