"""Times of bare forward passes on this machine, without the loop around them."""

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch

from specctl.models.passes.ordinary_tokens import ordinary_tokens
from specctl.models.passes.synchronisation import wait
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.observing.results import PassTimes

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 41)


class PassMeter:
    """Times bare forward passes several times during a run, so that a machine that slows down slows them too.

    Args:
        pair: loaded models.
        context: tokens in the caches while timing.
        widest: the number of tokens in the widest verifying pass of this run.
    """

    def __init__(self, pair: Pair, context: int, widest: int) -> None:
        self._pair = pair
        self._context = max(1, min(context, pair.shared_context - widest - 1))
        self._widths = sorted({width for width in WIDTHS if width < widest} | {widest})
        self._draft: list[float] = []
        self._with_predictor: list[float] = []
        self._target: dict[int, list[float]] = {width: [] for width in self._widths}
        # A single draft never verifies, so it only runs passes of one token; neither does a draft head or a lookup.
        several = pair.drafts if len(pair.drafts) > 1 else ()
        self._drafts = [
            (runner, {width: list[float]() for width in (self._widths if runner.verifies else [1])})
            for runner in several
        ]

    @torch.inference_mode()
    def measure(self, repeats: int = 5) -> PassTimes:
        """Time every width ``repeats`` more times; returns medians over all measurements so far, in milliseconds."""
        for _ in range(repeats):
            for width in self._widths:
                # A pass leaves its weights in the processor's cache, so each is timed after the one that precedes it in
                # a run: verification after a draft pass, a pass of one token after a target pass.
                verifies = self._pair.drafts and width > 1
                self._time(self._pair.drafts[0] if verifies else self._pair.target, 1)
                self._target[width].append(self._time(self._pair.target, width))
                for runner, times in self._drafts:
                    if width in times:
                        times[width].append(self._time(runner, width))
            for _ in range(4):
                if self._pair.drafts:
                    self._draft.append(self._time(self._pair.drafts[0], 1))
                if self._pair.drafts and isinstance(head := self._pair.predictor, StatePredictor):
                    self._with_predictor.append(self._time(self._pair.drafts[0], 1, head))
        draft = median(self._draft) if self._draft else 0.0
        more = median(self._with_predictor) - draft if self._with_predictor else None
        return PassTimes(draft, _medians(self._target), tuple(_medians(times) for _, times in self._drafts), more)

    def _time(self, runner: Slot, width: int, head: StatePredictor | None = None) -> float:
        if runner.length != self._context:
            fill(runner, self._tokens(self._context))
        tokens = self._tokens(width)
        signals = torch.zeros(3, device=runner.device)
        wait(runner.device)
        began = perf_counter()
        forward = runner.extend(tokens, keep=width, hidden=head is not None)
        if head is not None and forward.hidden is not None:
            head.accept_prob(forward.hidden[-1], signals)
        wait(runner.device)
        elapsed = perf_counter() - began
        runner.rollback(self._context)
        return elapsed * 1e3

    def _tokens(self, number: int) -> list[int]:
        return ordinary_tokens(number, self._pair.vocabulary, self._pair.eos)


def _medians(times: dict[int, list[float]]) -> dict[int, float]:
    return {width: median(values) for width, values in times.items()}


def fill(runner: Slot, tokens: Sequence[int]) -> None:
    """Make the cache hold these tokens and nothing else; a draft head reads them with states of zeros."""
    runner.rollback(0)
    _show_zeros(runner, 0, len(tokens))
    if tokens:
        runner.extend(list(tokens), keep=0)


def forget(runner: Slot, length: int, last: int) -> None:
    """Take back the ``last`` of ``length`` cached tokens; a draft head keeps states of zeros for them."""
    runner.rollback(length - last)
    _show_zeros(runner, length - last, last)


def _show_zeros(runner: Slot, start: int, count: int) -> None:
    if runner.reads_states and count:
        states = torch.zeros(count, runner.state_size, device=runner.device)
        runner.observe_states(start, dict.fromkeys(runner.layers, states))
