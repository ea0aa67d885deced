"""A target answers prompts; what is made of the answers goes to a folder, shard by shard."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Generic

from specctl.decoding.answers import Answerer
from specctl.observing.findings import Skipped
from specctl.observing.progress import Advance, ignored
from specctl.observing.prompt_answers import Answered, answer_each
from specctl.prompts.suites import Suite, SuitePrompt
from specctl.training.material import Item, ShardFolder

PROMPTS_PER_SHARD = 16
"""Prompts that are lost at most when a run is killed."""


@dataclass(frozen=True, slots=True)
class Lesson(Generic[Item]):
    """How prompts are answered and what is made of the answers.

    Attributes:
        answerer: makes an answerer for the prompt of an index. If one served several prompts and its policy kept its
            state, an answer would depend on where a run was resumed.
        make: what to store of an answered prompt.
    """

    answerer: Callable[[int], Answerer]
    make: Callable[[Answered], Iterable[Item]]

    def shard(
        self, prompts: Sequence[SuitePrompt], first: int, advance: Advance = ignored
    ) -> tuple[list[Item], dict[str, str]]:
        """What is made of the answers to some prompts, and by id why some could not be answered.

        Args:
            prompts: the shard's.
            first: index of the first of them in the suite.
            advance: called after each prompt.
        """
        items: list[Item] = []
        left_out: dict[str, str] = {}
        for number, prompt in enumerate(prompts, start=first):
            for found in answer_each(self.answerer(number), [prompt], first=number, advance=advance):
                if isinstance(found, Skipped):
                    left_out[found.prompt] = found.reason
                else:
                    items += self.make(found)
        return items, left_out


def collect_shards(
    folder: ShardFolder[Item], prompts: Sequence[SuitePrompt], lesson: Lesson[Item], advance: Advance = ignored
) -> None:
    """Answer the prompts that the folder has no answers to.

    What is stored of a prompt depends on its index and the seed only, not on where an earlier run ended.

    Args:
        folder: receives what is made of the answers.
        prompts: all prompts of the suite, including those that are already answered.
        lesson: answers them.
        advance: called after each prompt.
    """
    for first in range(folder.done, len(prompts), PROMPTS_PER_SHARD):
        shard = prompts[first : first + PROMPTS_PER_SHARD]
        began = perf_counter()
        items, left_out = lesson.shard(shard, first, advance)
        folder.add(items, len(shard), left_out, perf_counter() - began)


def prompt_facts(suite: Suite) -> dict[str, Any]:
    """Which prompts were answered, wherever their file lies."""
    return {"name": Path(suite.name).name, "sha256": suite.sha256, "count": len(suite.prompts)}
