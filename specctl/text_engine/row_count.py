"""How many texts a pair writes at once, chosen from free memory and measured pass times."""

from collections.abc import Callable, Sequence
from math import log2, sqrt
from time import perf_counter, process_time
from typing import Literal

from specctl.errors import out_of_memory
from specctl.models.passes.inference import in_inference_mode
from specctl.models.passes.layer_sizes import cached_values
from specctl.models.passes.ordinary_tokens import ordinary_tokens
from specctl.models.placing.memory import device_memory
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes, Request
from specctl.models.running.threads import CONTEXT, timed
from specctl.policies import Setting
from specctl.text_engine.pair_rows import passes_of, read_models, why_alone

Batch = int | Literal["auto"]  # How many texts a pair writes at once; ``auto`` for as many as are fastest
MOST = 64  # The most texts that are tried; a hub of more waits longer for its host than for its passes
GAIN = 1.1  # How much faster twice as many at once must be: each takes memory, and its result comes later
FIRST = 16  # How many texts are tried first; then twice as many, or half as many where that brings too little
ENDING = 0.3  # How long places stand empty at the end of a run, where no text is left for them, in times of one text
WRITTEN = 128
"""The most tokens that a text holds after its prompt while passes are timed, else half of those that it may write:
attention to them is most of the cost of one more text for a small model."""
DRAFTED, EMITTED = 3, 2.0
"""Draft tokens before the verification in a round with drafts that stands for decoding, and tokens that it writes."""
ENOUGH = 0.01
"""Seconds of timing of each number of texts; the least time counts, for others may take the processor meanwhile."""
SPARED = 0.8  # The share of free memory that caches may take
PROMPT = 1024  # Tokens of a prompt for which each text has room in that memory; of a longer one, caches grow
WORTH = 4.0
"""Seconds of one text's passes below which building and timing passes of several takes longer than they save."""


def chosen_passes(
    pair: Pair,
    rows: Batch,
    texts: int,
    limit: int,
    settings: Sequence[Setting] = (),
    warn: Callable[[str], None] = lambda _: None,
) -> list[Passes] | None:
    """Passes over as many texts as are asked for; None for one text at a time.

    Args:
        pair: loaded.
        rows: how many.
        texts: how many there are to write.
        limit: new tokens of each.
        settings: of the drafts at work.
        warn: receives the reason why the number asked for is not possible.
    """
    if rows == 1:
        return None
    if (why := why_alone(pair, *settings)) is not None:
        if rows != "auto":
            warn(f"--batch {rows}: texts are written one at a time, for {why}")
        return None
    fixed = pair.target.fixed_width is not None
    if rows != "auto":  # the shape of passes that are to be the same does not follow from how many texts there are
        count = rows if fixed else min(rows, texts)
        return passes_of(pair, count) if count > 1 else None
    if fixed or texts < 2 or not worthwhile(pair, texts * limit):
        return None
    return fastest_passes(pair, min(texts, most_rows(pair, limit)), texts, limit)


def worthwhile(pair: Pair, tokens: int) -> bool:
    """Whether this number of tokens takes a pair long enough for several texts at once to be tried."""
    try:
        return tokens * _seconds(pair, [pair.target.bare.passes], [0], 0)[0] >= WORTH
    finally:
        pair.target.rollback(0)


def most_rows(pair: Pair, limit: int) -> int:
    """How many texts free memory has room for, at least 1 and at most `MOST`.

    Args:
        pair: loaded.
        limit: new tokens of a text.
    """
    needed: dict[str, int] = {}
    held: dict[str, int] = {}  # by the two numbers of texts of which one is tried
    models = iter(pair.models)
    for runner in (pair.target, *pair.drafts):
        model = next(models, None) if runner.runs_model else None
        bytes_ = runner.token_bytes
        if not bytes_ and model is not None:
            bytes_ = cached_values(model.config) * model.dtype.itemsize
        device = str(runner.device)
        needed[device] = needed.get(device, 0) + bytes_ * min(runner.context, limit + PROMPT)
        held[device] = held.get(device, 0) + 2 * runner.rows_bytes
    free = {memory.name: memory.free for memory in device_memory(set(needed))}
    room = [
        int((SPARED * free[device] - held[device]) / bytes_)
        for device, bytes_ in needed.items()
        if bytes_ and device in free
    ]
    return max(1, min([MOST, *room]))


def fastest_passes(pair: Pair, most: int, texts: int, limit: int) -> list[Passes] | None:
    """Passes over as many texts as are fastest, where twice as many bring little; None for one text at a time.

    Args:
        pair: of which `why_alone` says nothing; its caches are emptied.
        most: texts at once.
        texts: to write. Where they take less time than trying more of them at once could save, that is not tried.
        limit: new tokens of each.
    """
    chosen: list[Passes] | None = None
    written = max(0, min(limit // 2, WRITTEN, pair.shared_context - CONTEXT - DRAFTED - 1))
    ways, clock = [0, DRAFTED] if pair.drafts else [0], _clock(pair)
    found = _seconds(pair, [runner.bare.passes for runner in read_models(pair)], ways, written)

    def needed(rows: int, seconds: float) -> float:
        """Seconds for all texts with this many at once, if a token of each takes these seconds."""
        return limit * seconds * (texts / rows + ENDING * (1 - 1 / rows))

    rows, factor, fewer = 1, FIRST, min(found.values())
    while factor > 1:
        if (count := rows * factor) > most:
            factor //= 2
            continue
        began = clock()
        try:
            more = passes_of(pair, count)
            found = _seconds(pair, more, ways, written)
        except Exception as error:
            if not out_of_memory(error):
                raise
            most = count - 1
            continue
        took, seconds = clock() - began, min(found.values())
        if (needed(rows, fewer) / needed(count, seconds)) ** (1 / log2(factor)) <= GAIN:
            most = count - 1
            continue
        each = max(0.0, seconds - fewer) / (count - rows)  # seconds that one text more takes
        chosen, rows, fewer, factor = more, count, seconds, 2
        # Drafts pay less the more texts there are.
        ways = [way for way in ways if not way or found[way] <= found[0]]
        saved = needed(rows, seconds) - needed(2 * rows, seconds + each * rows)
        # To find out takes the longer the more texts, but not twice as long for twice as many.
        if saved < sqrt(2) * took:
            break
    for runner in read_models(pair):
        runner.rollback(0)
    return chosen


def _clock(pair: Pair) -> Callable[[], float]:
    """Seconds that passes take; where one thread makes them its own, which other processes do not disturb."""
    alone = pair.thread_count == 1 and all(runner.device.type == "cpu" for runner in read_models(pair))
    return process_time if alone else perf_counter


@in_inference_mode
def _seconds(pair: Pair, passes: Sequence[Passes], ways: Sequence[int], written: int) -> dict[int, float]:
    """The least seconds for a token of each text, by how many tokens are drafted in a round; 0 is a pass alone.

    Args:
        written: tokens that each text holds after a short prompt.
    """
    cached = CONTEXT + written
    tokens = ordinary_tokens(cached + max(ways) + 1, pair.vocabulary, pair.eos)
    *drafts, target = passes

    def ask(passes: Passes, after: int, new: Sequence[int], keep: int) -> None:
        passes.forward([Request(row, after, new, keep) for row in range(passes.slots)])

    def play(steps: int) -> None:
        for _ in range(steps):
            for draft in drafts:
                ask(draft, cached, tokens[-1:], 1)
        ask(target, cached, tokens[cached : cached + steps + 1], steps + 1)

    for each in passes:
        each.forward([Request(0, 0, tokens[:cached], 0)])
        for row in range(1, each.slots):
            each.copy(0, row, 0, cached)
    for steps in ways:  # the first pass of a kind takes longer
        play(steps)
    times = timed(play, ways, _clock(pair), ENOUGH)
    return {steps: min(found) / (EMITTED if steps else 1.0) for steps, found in times.items()}
