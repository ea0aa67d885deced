"""Times of bare forward passes on this machine, without the decoding loop."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from time import perf_counter

import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.passes.ordinary_tokens import ordinary_tokens
from specctl.models.passes.synchronisation import wait
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.models.running.threads import timed
from specctl.models.running.transforms import CheckedPasses
from specctl.models.sharding import is_sharded
from specctl.observing.results import PassTimes
from specctl.profile.schema import Profile

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
        # Single drafts, draft heads and lookups never verify, so they only run passes of one token.
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
                # A pass leaves its weights in the processor's cache. So each pass is timed in the order of a run:
                # verification after a draft pass, a one-token pass after a target pass.
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
    """Fill the cache with exactly these tokens; a draft head reads them with zero states."""
    runner.rollback(0)
    _show_zeros(runner, 0, len(tokens))
    if tokens:
        runner.extend(list(tokens), keep=0)


def forget(runner: Slot, length: int, last: int) -> None:
    """Roll back the ``last`` of ``length`` cached tokens; a draft head keeps zero states for them."""
    runner.rollback(length - last)
    _show_zeros(runner, length - last, last)


def _show_zeros(runner: Slot, start: int, count: int) -> None:
    if runner.reads_states and count:
        states = torch.zeros(count, runner.state_size, device=runner.device)
        runner.observe_states(start, dict.fromkeys(runner.layers, states))


PROMPT = "Once upon a time, there was a"
TOKENS = 32
CONTEXT, TRIED_WIDTHS = 32, (1, 6)  # Cached tokens while passes are timed, and tokens of a pass


@dataclass(frozen=True, slots=True)
class EnginePasses:
    """The times of a model's passes with an engine."""

    model: str  # ``target``, or ``draft`` with its number where there are several
    engine: str  # its name
    milliseconds: dict[int, float]  # the median in milliseconds, by tokens of a pass


@dataclass(frozen=True, slots=True)
class Trial:
    """The results of a trial."""

    tokens: int  # the number of tokens generated greedily; fewer than `TOKENS` if the text ended
    same: bool | None  # whether the output with drafts equals the target's own; None without a draft
    # the largest difference of logits between the target after a rollback and a fresh read, in standard deviations of
    # the logits
    difference: float
    # alone_per_second, drafted_per_second: tokens/s without and with drafts, including the time for the prompt
    alone_per_second: float
    drafted_per_second: float | None
    acceptance_rate: float | None  # accepted of drafted tokens
    # times of every model except draft heads and lookups, with its engine and, if that differs, with the eager engine
    passes: tuple[EnginePasses, ...]


def try_out(pair: Pair, profile: Profile) -> Trial:
    """Generate a few tokens with a pair that was loaded with ``check = true``, and roll the target back at least once.

    Raises:
        ModelError: the target's results depend on rejected tokens.
    """
    prompt: list[int] = pair.tokenizer.encode(PROMPT)
    settings = profile.sampling.model_copy(update={"temperature": 0.0, "max_new_tokens": TOKENS, "stop": []})
    Session(pair, None).generate(prompt, settings.model_copy(update={"max_new_tokens": 2}))  # the first pass is slow
    alone = Session(pair, None).generate(prompt, settings)
    drafter = build_drafter(pair, profile.draft.setting) if profile.draft is not None else None
    drafted = Session(pair, drafter).generate(prompt, settings) if drafter is not None else None
    rounds = drafted.rounds if drafted is not None else ()
    total = sum(round_.drafted for round_ in rounds)
    return Trial(
        tokens=len(alone.tokens),
        same=None if drafted is None else drafted.tokens == alone.tokens,
        difference=_difference(pair.target, [*prompt, *alone.tokens]),
        alone_per_second=len(alone.tokens) / alone.total_seconds,
        drafted_per_second=None if drafted is None else len(drafted.tokens) / drafted.total_seconds,
        acceptance_rate=sum(round_.accepted for round_ in rounds) / total if total else None,
        passes=tuple(_passes(pair)),
    )


def _passes(pair: Pair) -> Iterator[EnginePasses]:
    runners = [each for each in pair.runners if each[0].runs_model]
    for index, (runner, model) in enumerate(runners):
        name = "target" if index == 0 else "draft" if len(runners) == 2 else f"draft {index}"
        engines = {runner.engine: runner}
        if model is not None and not is_sharded(model) and not next(model.parameters()).is_meta:
            engines.setdefault("eager", Slot(EagerPasses(model, model.config.get_text_config().vocab_size)))
        yield from _passes_of(name, engines, ordinary_tokens(CONTEXT, pair.vocabulary, pair.eos))


@torch.inference_mode()
def _passes_of(model: str, engines: Mapping[str, Slot], tokens: Sequence[int]) -> list[EnginePasses]:
    """Time one model's passes by every engine in turn; the caches are empty afterwards."""
    for runner in engines.values():
        fill(runner, tokens)

    def run(choice: tuple[str, int]) -> None:
        engine, width = choice
        runner = engines[engine]
        runner.extend(tokens[:width], keep=width)
        wait(runner.device)
        runner.rollback(CONTEXT)

    seconds = timed(run, [*product(engines, TRIED_WIDTHS)])
    for runner in engines.values():
        runner.rollback(0)
    return [
        EnginePasses(model, engine, {width: median(seconds[engine, width]) * 1e3 for width in TRIED_WIDTHS})
        for engine in engines
    ]


def _difference(target: Slot, text: list[int]) -> float:
    """The result of the target's check; if no token was rejected so far, some tokens are rolled back."""
    checked = next(each for each in target.transforms if isinstance(each, CheckedPasses))  # it is loaded with check
    if checked.difference is None:
        with torch.inference_mode():
            slot = Slot(checked)
            slot.rollback(0)
            slot.extend(text[:-1], keep=0)
            slot.rollback(len(text) - 1)
            slot.extend([text[-1], *text[:3]], keep=4)
            slot.rollback(len(text))
            slot.extend([*text[checked.length :], text[0]], keep=1)
            slot = Slot(checked)
            slot.rollback(0)
    assert checked.difference is not None
    return checked.difference
