"""A target answers prompts; what is made of the answers goes to a folder, shard by shard, here or in replicas."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic

from specctl.batching.row_replicas import RowReplicas
from specctl.decoding.answers import Answerer
from specctl.observing.findings import Skipped
from specctl.observing.progress import Advance, ignored
from specctl.observing.prompt_answers import Answered, answer_each
from specctl.prompts.suites import SuitePrompt
from specctl.replicas.job import Answer, ReplicaError
from specctl.replicas.replica import Replicas
from specctl.replicas.window import GivenUp, Task, in_order
from specctl.training.material import Item, Material

PROMPTS_PER_SHARD = 16
"""Prompts that are lost at most when a run is killed."""
SHARDS_AHEAD = 2
"""Shards for each replica that may wait in memory for an earlier one; they hold hidden states."""


_Shard = tuple[int, list[SuitePrompt]]
"""Index of its first prompt in the suite, and its prompts."""
_Made = tuple[int, bytes, dict[str, str]]
"""How many prompts a shard has, the content of its file, and by id why some could not be answered."""


@dataclass(frozen=True, slots=True)
class Collector(Generic[Item]):
    """How prompts are answered and what is made of the answers.

    Attributes:
        answers: makes an answerer for the prompt of an index. If one served several prompts and its policy kept its
            state, an answer would depend on where a run was resumed. Or rows that do so.
        make: what to store of an answered prompt.
    """

    answers: Callable[[int], Answerer] | RowReplicas
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
        for found in answer_each(self.answers, prompts, first=first, advance=advance):
            if isinstance(found, Skipped):
                left_out[found.prompt] = found.reason
            else:
                items += self.make(found)
        return items, left_out

    def answering(self, material: type[Material[Item]]) -> Answer:
        """What a replica does: a shard's prompts become the bytes of its file, which the replica does not write."""

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            counts: list[int] = []

            def count(tokens: int = 0) -> None:
                counts.append(tokens)

            items, left_out = self.shard(question["prompts"], question["first"], count)
            return {"content": material.content(items), "left_out": left_out, "tokens": counts}

        return answer


def collect(
    material: Material[Item],
    prompts: Sequence[SuitePrompt],
    source: Collector[Item] | Replicas,
    advance: Advance = ignored,
) -> None:
    """Answer the prompts that a folder has no answers to.

    What is stored of a prompt depends on its index and the seed only, not on where an earlier run ended, nor on who
    answered it.

    Args:
        material: the folder.
        prompts: all prompts of the suite, including those that are already answered.
        source: answers them here, or replicas that do as `Collector.answering` says.
        advance: called after each prompt.

    Raises:
        ReplicaError: no replica survived the prompts of a shard, or none is left.
    """
    shards = [
        (first, list(prompts[first : first + PROMPTS_PER_SHARD]))
        for first in range(material.done, len(prompts), PROMPTS_PER_SHARD)
    ]
    made = _here(source, material, shards, advance) if isinstance(source, Collector) else _away(source, shards, advance)
    began = perf_counter()
    for count, content, left_out in made:
        now = perf_counter()
        material.add(content, count, left_out, now - began)
        began = now


def _here(
    collector: Collector[Item], material: Material[Item], shards: Iterable[_Shard], advance: Advance
) -> Iterator[_Made]:
    for first, shard in shards:
        items, left_out = collector.shard(shard, first, advance)
        yield len(shard), material.content(items), left_out


def _away(replicas: Replicas, shards: Iterable[_Shard], advance: Advance) -> Iterator[_Made]:
    tasks = (Task((first, len(shard)), {"first": first, "prompts": shard}) for first, shard in shards)
    for (first, count), answer in in_order(replicas, tasks, SHARDS_AHEAD * replicas.count):
        if isinstance(answer, GivenUp):
            raise ReplicaError(
                f"no replica survived prompts {first + 1} to {first + count}; {answer.why}",
                "what was finished is kept; run them with one process to see why",
            )
        yield count, answer["content"], answer["left_out"]
        for tokens in answer["tokens"]:
            advance(tokens)
