"""The batch size of a pair, chosen from free memory and measured pass times."""

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
MOST = 64  # The largest batch size tried; beyond it, a hub spends more time on the host than in passes
GAIN = 1.1  # The least speedup for doubling the batch size, because each text takes memory and ends later
FIRST = 16  # The first batch size tried; then it is doubled, or halved if the gain is too small
ENDING = 0.3  # Time in which batch slots stay empty at the end of a run, as a multiple of one text's time
WRITTEN = 128
"""The most tokens after the prompt while passes are timed; else half of the new tokens' limit. For a small model,
attention to these tokens is most of an additional text's cost.
"""
DRAFTED, EMITTED = 3, 2.0
"""A typical round with drafts: the number of draft tokens, and of tokens written."""
ENOUGH = 0.01
"""Seconds of timing for each batch size. The least time counts, because other processes may use the processor
meanwhile.
"""
SPARED = 0.8  # The share of free memory for caches
PROMPT = 1024  # Prompt tokens for which that memory has room in each text; caches grow for longer prompts
WORTH = 4.0
"""If one text's passes take fewer seconds in total, building and timing batched passes costs more than it saves."""


def chosen_passes(
    pair: Pair,
    rows: Batch,
    texts: int,
    limit: int,
    settings: Sequence[Setting] = (),
    warn: Callable[[str], None] = lambda _: None,
) -> list[Passes] | None:
    """Passes over the requested number of texts; None for one text at a time.

    Args:
        pair: loaded.
        rows: the batch size; ``auto`` for the fastest.
        texts: the number of texts to write.
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
    if rows != "auto":  # the shape of invariant passes must not depend on the number of texts
        count = rows if fixed else min(rows, texts)
        return passes_of(pair, count) if count > 1 else None
    if fixed or texts < 2 or not worthwhile(pair, texts * limit):
        return None
    return fastest_passes(pair, min(texts, most_rows(pair, limit)), texts, limit)


def worthwhile(pair: Pair, tokens: int) -> bool:
    """Whether writing this number of tokens takes long enough for batching to be tried."""
    try:
        return tokens * _seconds(pair, [pair.target.bare.passes], [0], 0)[0] >= WORTH
    finally:
        pair.target.rollback(0)


def most_rows(pair: Pair, limit: int) -> int:
    """The number of texts for which free memory has room, from 1 to `MOST`.

    Args:
        pair: loaded.
        limit: new tokens of a text.
    """
    needed: dict[str, int] = {}
    for runner, model in pair.runners:
        bytes_ = runner.token_bytes
        if not bytes_ and model is not None:
            bytes_ = cached_values(model.config) * model.dtype.itemsize
        device = str(runner.device)
        needed[device] = needed.get(device, 0) + bytes_ * min(runner.context, limit + PROMPT)
    free = {memory.name: memory.free for memory in device_memory(set(needed))}
    room = [int(SPARED * free[device] / bytes_) for device, bytes_ in needed.items() if bytes_ and device in free]
    return max(1, min([MOST, *room]))


def fastest_passes(pair: Pair, most: int, texts: int, limit: int) -> list[Passes] | None:
    """Passes with the fastest batch size; None for one text at a time.

    Args:
        pair: a pair for which `why_alone` returns None; its caches are emptied.
        most: texts at once.
        texts: the number of texts to write. Larger batches are not tried if that costs more time than they could save.
        limit: new tokens of each.
    """
    chosen: list[Passes] | None = None
    written = max(0, min(limit // 2, WRITTEN, pair.shared_context - CONTEXT - DRAFTED - 1))
    ways, clock = [0, DRAFTED] if pair.drafts else [0], _clock(pair)
    found = _seconds(pair, [runner.bare.passes for runner in read_models(pair)], ways, written)

    def needed(rows: int, seconds: float) -> float:
        """Seconds for all texts with this batch size, given the seconds for one token of each."""
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
        each = max(0.0, seconds - fewer) / (count - rows)  # seconds of one more text
        chosen, rows, fewer, factor = more, count, seconds, 2
        # The larger the batch, the less drafts pay.
        ways = [way for way in ways if not way or found[way] <= found[0]]
        saved = needed(rows, seconds) - needed(2 * rows, seconds + each * rows)
        # Timing takes longer for larger batches, but less than twice as long for double the size.
        if saved < sqrt(2) * took:
            break
    for runner in read_models(pair):
        runner.rollback(0)
    return chosen


def _clock(pair: Pair) -> Callable[[], float]:
    """A clock for passes: on a single thread its CPU time, which other processes do not disturb."""
    alone = pair.thread_count == 1 and all(runner.device.type == "cpu" for runner in read_models(pair))
    return process_time if alone else perf_counter


@in_inference_mode
def _seconds(pair: Pair, passes: Sequence[Passes], ways: Sequence[int], written: int) -> dict[int, float]:
    """The least seconds for one token of each text, by the number of draft tokens in a round; 0 is without drafts.

    Args:
        written: the number of tokens in each text after a short prompt.
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
