"""Shards made by replicas or here, and committed in order."""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

from specctl.observing.progress import Advance, Progress, ignored
from specctl.prompts.suites import SuitePrompt
from specctl.replicas.job import Answer, ReplicaError
from specctl.replicas.replica import Replicas
from specctl.replicas.window import GivenUp, Task, in_order
from specctl.training.collected import PROMPTS_PER_SHARD, Lesson, collect_shards
from specctl.training.material import Item, ShardFolder

SHARDS_AHEAD = 2
"""Shards for each replica that may wait in memory for an earlier one; they hold hidden states."""


def answering(lesson: Lesson[Item], folder: type[ShardFolder[Item]]) -> Answer:
    """What a replica does: a shard's prompts become the bytes of its file, never written by the replica itself."""

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        counts: list[int] = []

        def count(tokens: int = 0) -> None:
            counts.append(tokens)

        items, left_out = lesson.shard(question["prompts"], question["first"], count)
        return {"content": folder.content(items), "left_out": left_out, "tokens": counts}

    return answer


def collect(
    folder: ShardFolder[Item], prompts: Sequence[SuitePrompt], source: Lesson[Item] | Replicas, progress: Progress
) -> None:
    """`collect_shards` by a lesson in this process, or `collect_by_replicas`; progress counts the prompts."""
    with progress.counting("answers", len(prompts), folder.done) as advance:
        if isinstance(source, Lesson):
            collect_shards(folder, prompts, source, advance)
        else:
            collect_by_replicas(folder, prompts, source, advance)


def collect_by_replicas(
    folder: ShardFolder[Item], prompts: Sequence[SuitePrompt], replicas: Replicas, advance: Advance = ignored
) -> None:
    """As `collect_shards`, by replicas that answer as `answering` says; what is stored is the same.

    Raises:
        ReplicaError: no replica survived the prompts of a shard, or none is left.
    """

    def tasks() -> Iterator[Task[tuple[int, int]]]:
        for first in range(folder.done, len(prompts), PROMPTS_PER_SHARD):
            shard = list(prompts[first : first + PROMPTS_PER_SHARD])
            yield Task((first, len(shard)), {"first": first, "prompts": shard})

    began = perf_counter()
    for (first, count), answer in in_order(replicas, tasks(), SHARDS_AHEAD * replicas.count):
        if isinstance(answer, GivenUp):
            raise ReplicaError(
                f"no replica survived prompts {first + 1} to {first + count}; {answer.why}",
                "what was finished is kept; run them with one process to see why",
            )
        now = perf_counter()
        folder.commit(answer["content"], count, answer["left_out"], now - began)
        began = now
        for tokens in answer["tokens"]:
            advance(tokens)
