"""A loaded pair tried out: whether the target forgets rejected tokens, and a few tokens with and without drafts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.models.passes.ordinary_tokens import ordinary_tokens
from specctl.models.passes.synchronisation import wait
from specctl.models.running.around import Around
from specctl.models.running.checked import CheckedRunner
from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.models.running.threads import timed
from specctl.models.sharding import is_sharded
from specctl.observing.pass_times import fill
from specctl.profile.schema import Profile

PROMPT = "Once upon a time, there was a"
TOKENS = 32
CONTEXT, WIDTHS = 32, (1, 6)
"""Cached tokens while passes are timed, and tokens of a pass."""


@dataclass(frozen=True, slots=True)
class EnginePasses:
    """How long a model's passes take with an engine.

    Attributes:
        model: ``target``, or ``draft`` with its number where there are several.
        engine: its name.
        milliseconds: by tokens of a pass, the median.
    """

    model: str
    engine: str
    milliseconds: dict[int, float]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial showed.

    Attributes:
        tokens: how many were generated, greedily; fewer than `TOKENS` where the text ended.
        same: whether drafting gave the target's own tokens; None without a draft that is used.
        difference: between the target after a rollback and a fresh read, as a share of the logits' standard deviation.
        alone_per_second, drafted_per_second: tokens a second without and with drafts, the prompt's time included.
        acceptance_rate: accepted of drafted tokens.
        passes: of every model but draft heads and lookups, with the engine that runs it and, where that is another,
            eagerly.
    """

    tokens: int
    same: bool | None
    difference: float
    alone_per_second: float
    drafted_per_second: float | None
    acceptance_rate: float | None
    passes: tuple[EnginePasses, ...]


def try_out(pair: Pair, profile: Profile) -> Trial:
    """Generate a few tokens with a pair that was loaded with ``check = true``, and roll the target back at least once.

    Raises:
        ModelError: the target does not forget rejected tokens.
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
    runners = [pair.target, *(draft for draft in pair.drafts if draft.runs_model)]
    for index, (runner, model) in enumerate(zip(runners, pair.models, strict=True)):
        name = "target" if index == 0 else "draft" if len(runners) == 2 else f"draft {index}"
        engines = {runner.engine: runner}
        if not is_sharded(model):
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

    seconds = timed(run, [*product(engines, WIDTHS)])
    for runner in engines.values():
        runner.rollback(0)
    return [
        EnginePasses(model, engine, {width: median(seconds[engine, width]) * 1e3 for width in WIDTHS})
        for engine in engines
    ]


def _difference(target: Slot, text: list[int]) -> float:
    """What the check of the target found; where nothing was rejected so far, some of a text is taken back."""
    checked = target
    while isinstance(checked, Around) and not isinstance(checked, CheckedRunner):
        checked = checked.runner
    assert isinstance(checked, CheckedRunner), "the target is loaded with check"
    if checked.difference is None:
        with torch.inference_mode():
            checked.rollback(0)
            checked.extend(text[:-1], keep=0)
            checked.rollback(len(text) - 1)
            checked.extend([text[-1], *text[:3]], keep=4)
            checked.rollback(len(text))
            checked.extend([*text[checked.length :], text[0]], keep=1)
            checked.rollback(0)
    assert checked.difference is not None
    return checked.difference
