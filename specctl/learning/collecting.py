"""A target answers prompts; what is made of the answers goes to a folder, shard by shard."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from specctl.decoding.answers import Answerer
from specctl.learning.shards import Item, ShardFolder
from specctl.observing.answering import Answered, answer_each
from specctl.observing.findings import Skipped
from specctl.observing.progress import Advance, ignored
from specctl.prompts.suites import Suite, SuitePrompt

PROMPTS_PER_SHARD = 16
"""Prompts that are lost at most when a run is killed."""


def collect_shards(
    folder: ShardFolder[Item],
    prompts: Sequence[SuitePrompt],
    answerer: Callable[[int], Answerer],
    make: Callable[[Answered], Iterable[Item]],
    advance: Advance = ignored,
) -> None:
    """Answer the prompts that the folder has no answers to.

    What is stored of a prompt depends on its index and the seed only, not on where an earlier run ended.

    Args:
        folder: receives what is made of the answers.
        prompts: all prompts of the suite, including those that are already answered.
        answerer: makes an answerer for the prompt of an index. If one served several prompts and its policy kept its
            state, an answer would depend on where a run was resumed.
        make: what to store of an answered prompt.
        advance: called after each prompt.
    """
    for first in range(folder.done, len(prompts), PROMPTS_PER_SHARD):
        shard = prompts[first : first + PROMPTS_PER_SHARD]
        items: list[Item] = []
        left_out: dict[str, str] = {}
        began = perf_counter()
        for number, prompt in enumerate(shard, start=first):
            for found in answer_each(answerer(number), [prompt], first=number, advance=advance):
                if isinstance(found, Skipped):
                    left_out[found.prompt] = found.reason
                else:
                    items += make(found)
        folder.add(items, len(shard), left_out, perf_counter() - began)


def prompt_facts(suite: Suite) -> dict[str, Any]:
    """Which prompts were answered, wherever their file lies."""
    return {"name": Path(suite.name).name, "sha256": suite.sha256, "count": len(suite.prompts)}
