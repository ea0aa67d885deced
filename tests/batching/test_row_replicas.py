"""Rows of a batch as replicas: which questions they have when memory runs out."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from specctl.batching.hub import Hub
from specctl.batching.row_replicas import RowReplicas
from specctl.models.running.passes import Request
from specctl.replicas.window import Task, in_order

OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()]


class Room:
    """`Passes` with room for so many texts.

    Attributes:
        passes: the rows of each that was made.
    """

    def __init__(self, room: int, error: Exception) -> None:
        self.room, self.error = room, error
        self.passes: list[list[int]] = []

    def run(self, requests: Sequence[Request]) -> list[int]:
        if len(requests) > self.room:
            raise self.error
        self.passes.append([request.slot for request in requests])
        return [request.slot for request in requests]


def rows_of(passes: Any, count: int, begun: list[tuple[int, int]], warn: Callable[[str], None]) -> RowReplicas:
    """Rows whose answer to a number takes so many passes; what they began with is noted."""
    hub = Hub[int]([passes])
    ask = hub.asker(passes)

    def answer(row: int) -> Callable[[int], Any]:
        def work(question: int) -> Any:
            begun.append((row, question))
            try:
                for _ in range(question):
                    ask(Request(row, 0, [1], 0))
            except (RuntimeError, MemoryError) as error:
                return error
            return question * 10

        return work

    return RowReplicas(hub, [answer(row) for row in range(count)], warn)


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
@pytest.mark.parametrize("room", [1, 2, 3])
def test_the_youngest_make_room_and_begin_again(error: Exception, room: int) -> None:
    passes, begun, said = Room(room, error), list[tuple[int, int]](), list[str]()
    questions = [5, 3, 4, 2, 0, 6, 1, 2]
    with rows_of(passes, 4, begun, said.append) as rows:
        found = list(in_order(rows, [Task(question, question) for question in questions]))
        assert len(rows.idle()) == min(room, 2), "so many are written from here on"
    assert found == [(question, question * 10) for question in questions]
    assert begun.count((0, 5)) == 1, "the oldest one goes on"
    assert len(begun) == len(questions) + (3 if room == 1 else 2)
    assert said[0] == "memory ran out with 4 texts at once; from here on it is 2"
    assert len(said) == (2 if room == 1 else 1)


def test_a_text_alone_is_told_that_memory_ran_out() -> None:
    error, begun, said = torch.OutOfMemoryError("CUDA out of memory."), list[tuple[int, int]](), list[str]()
    with rows_of(Room(0, error), 2, begun, said.append) as rows:
        found = dict(in_order(rows, [Task(question, question) for question in (3, 2)]))
    assert found == {3: error, 2: error}
    assert said == ["memory ran out with 2 texts at once; from here on it is 1"]


def test_another_error_takes_nobodys_place() -> None:
    error, begun, said = RuntimeError("a kernel failed"), list[tuple[int, int]](), list[str]()
    with rows_of(Room(1, error), 2, begun, said.append) as rows:
        assert dict(in_order(rows, [Task(question, question) for question in (3, 2)])) == {3: 30, 2: 20}
    assert (len(begun), said) == (2, [])


def test_a_text_that_waits_for_room_may_be_given_up_and_the_others_begin_again() -> None:
    passes, begun, said = Room(2, OUT_OF_MEMORY[0]), list[tuple[int, int]](), list[str]()
    with rows_of(passes, 4, begun, said.append) as rows:
        for row, question in enumerate((2, 2, 3, 3)):
            rows.ask(row, question)
        assert rows.wait() == []
        assert said == ["memory ran out with 4 texts at once; from here on it is 2"]
        rows.give_up(2)
        answers = dict[int, int]()
        for _ in range(20):
            answers |= {event.replica: event.answer for event in rows.wait()}  # type: ignore[union-attr]
        assert answers == {0: 20, 1: 20, 3: 30}
        assert begun.count((2, 3)) == 1
        assert 2 in rows.idle()
