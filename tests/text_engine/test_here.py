"""The engine of this process: texts alone and in rows, and which begin again when memory runs out."""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch

from specctl.models.running.passes import Request
from specctl.text_engine.dispatch import in_order
from specctl.text_engine.engine import Answered, Part, Restarted, Writer, whole
from specctl.text_engine.here import HereEngine, Rows
from specctl.text_engine.hub import Hub

OUT_OF_MEMORY = [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()]


class Room:
    """`Passes` with room for this many texts.

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


def rows_of(passes: Any, count: int, begun: list[tuple[int, int]], warn: Callable[[str], None]) -> HereEngine:
    """Rows whose answer to a number takes that many passes; the questions they began with are noted."""
    hub = Hub[int]([passes])
    ask = hub.asker(passes)

    def writer(row: int) -> Writer:
        def work(question: int) -> Any:
            begun.append((row, question))
            try:
                for _ in range(question):
                    ask(Request(row, 0, [1], 0))
            except (RuntimeError, MemoryError) as error:
                return error
            return question * 10

        return whole(work)

    return HereEngine(None, Rows(hub, [writer(row) for row in range(count)], warn))


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
@pytest.mark.parametrize("room", [1, 2, 3])
def test_the_youngest_make_room_and_begin_again(error: Exception, room: int) -> None:
    passes, begun, said = Room(room, error), list[tuple[int, int]](), list[str]()
    questions = [5, 3, 4, 2, 0, 6, 1, 2]
    with rows_of(passes, 4, begun, said.append) as rows:
        found = list(in_order(rows, [(question, question) for question in questions]))
        assert len(rows.free()) == min(room, 2), "this many are written from here on"
    assert found == [(question, question * 10) for question in questions]
    assert begun.count((0, 5)) == 1, "the oldest one goes on"
    assert len(begun) == len(questions) + (3 if room == 1 else 2)
    assert said[0] == "memory ran out with 4 texts at once; the limit is 2 from now on"
    assert len(said) == (2 if room == 1 else 1)


def test_a_text_alone_is_told_that_memory_ran_out() -> None:
    error, begun, said = torch.OutOfMemoryError("CUDA out of memory."), list[tuple[int, int]](), list[str]()
    with rows_of(Room(0, error), 2, begun, said.append) as rows:
        found = dict(in_order(rows, [(question, question) for question in (3, 2)]))
    assert found == {3: error, 2: error}
    assert said == ["memory ran out with 2 texts at once; the limit is 1 from now on"]


def test_another_error_takes_nobodys_place() -> None:
    error, begun, said = RuntimeError("a kernel failed"), list[tuple[int, int]](), list[str]()
    with rows_of(Room(1, error), 2, begun, said.append) as rows:
        assert dict(in_order(rows, [(question, question) for question in (3, 2)])) == {3: 30, 2: 20}
    assert (len(begun), said) == (2, [])


def test_a_text_that_waits_for_room_may_be_cancelled_and_the_others_begin_again() -> None:
    passes, begun, said = Room(2, OUT_OF_MEMORY[0]), list[tuple[int, int]](), list[str]()
    with rows_of(passes, 4, begun, said.append) as rows:
        for place, question in enumerate((2, 2, 3, 3)):
            rows.submit(place, question)
        assert rows.step() == [Restarted(2), Restarted(3)]
        assert said == ["memory ran out with 4 texts at once; the limit is 2 from now on"]
        rows.cancel(2)
        answers = dict[int, int]()
        while len(answers) < 3:
            answers |= {event.place: event.answer for event in rows.step()}  # type: ignore[union-attr]
        assert answers == {0: 20, 1: 20, 3: 30}
        assert begun.count((2, 3)) == 1
        assert len(rows.free()) == 2, "that many are written from here on"


LATE = [None] * 40
"""Nothing is there until what was has been answered."""


class Silent:
    """`Passes` that answer nothing.

    Attributes:
        passes: the rows of each.
    """

    rows = 2

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    def run(self, requests: list[Request]) -> list[None]:
        self.passes.append([request.slot for request in requests])
        return [None] * len(requests)


class Played:
    """A pair whose answer to a number takes that many passes, with a record of its actions.

    Attributes:
        alone: questions that were answered alone.
        counts: how many questions were there when rows were asked for.
    """

    def __init__(self, *, pays: bool = True) -> None:
        self.passes, self.alone, self.counts, self._pays = Silent(), list[int](), list[int](), pays

    def engine(self, places: int = 4) -> HereEngine:
        hub = Hub[int]([self.passes])  # type: ignore[list-item]

        ask = hub.asker(self.passes)

        def in_row(row: int, question: int) -> int:
            for _ in range(question):
                ask(Request(row, 0, [1], 0))
            return question * 10

        def rows(count: int) -> Rows | None:
            self.counts.append(count)
            return Rows(hub, [whole(partial(in_row, row)) for row in range(2)]) if self._pays else None

        def alone(question: int) -> int:
            self.alone.append(question)
            return question * 10

        return HereEngine(whole(alone), make=rows, places=places)


def answers(played: Played, questions: Iterator[int | None]) -> list[tuple[int, int]]:
    with played.engine() as engine:
        tasks = (None if one is None else (one, one) for one in questions)
        return list(in_order(engine, tasks))


def test_a_question_that_is_there_alone_waits_for_no_other() -> None:
    played = Played()
    assert answers(played, iter([3, *LATE, 5, *LATE, 2])) == [(3, 30), (5, 50), (2, 20)]
    assert (played.alone, played.counts, played.passes.passes) == ([3, 5, 2], [], [])


@pytest.mark.slow
def test_several_that_are_there_share_passes() -> None:
    played = Played()
    assert answers(played, iter([3, 2, 2, *LATE, 7, *LATE, 1])) == [(3, 30), (2, 20), (2, 20), (7, 70), (1, 10)]
    assert played.counts == [3]
    assert played.passes.passes[0] == [0, 1]
    assert played.alone == [7, 1], "these came when all others had ended"


def test_one_that_comes_takes_a_free_row_while_another_is_written() -> None:
    played = Played()
    with played.engine() as engine:
        for place, question in enumerate((5, 2)):
            engine.submit(place, question)
        assert engine.step() == []
        assert [(event.place, event.answer) for event in engine.step()] == [(1, 20)]  # type: ignore[union-attr]
        engine.submit(3, 2)
        engine.step()
        assert played.passes.passes[-1] == [0, 1]
        assert engine.free() == [1, 2]


def test_where_rows_do_not_pay_all_are_answered_alone() -> None:
    played = Played(pays=False)
    assert answers(played, iter([3, 2, None, 2])) == [(3, 30), (2, 20), (2, 20)]
    assert played.alone == [3, 2, 2]


def test_rows_that_do_not_pay_are_tried_again_only_with_twice_as_many() -> None:
    played = Played(pays=False)
    with played.engine(8) as engine:
        for place in range(3):
            engine.submit(place, 1)
        for _ in range(2):
            engine.step()
        for place in range(3, 8):
            engine.submit(place, 1)
        for _ in range(6):
            engine.step()
    assert played.counts == [3, 6]


def test_its_rows_are_closed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Rows] = []
    monkeypatch.setattr(Rows, "close", lambda rows: closed.append(rows))
    with Played().engine() as engine:
        for place in range(2):
            engine.submit(place, 1)
        engine.step()
        assert not closed
    assert closed


def words(question: str) -> Generator[str | None, None, str]:
    """Tells the words of a question."""
    for word in question.split():
        yield None if word == "-" else word
    return question


def rows_of_words(count: int) -> HereEngine:
    """Words are answered alone, or in rows in which each takes a pass."""
    passes = Silent()
    hub = Hub[str]([passes])  # type: ignore[list-item]
    ask = hub.asker(passes)

    def writer(row: int) -> Writer:
        def write(question: str) -> Generator[str | None, None, str]:
            for word in words(question):
                ask(Request(row, 0, [1], 0))
                yield word
            return question

        return write

    return HereEngine(words, Rows(hub, [writer(row) for row in range(count)]))


def test_a_text_that_is_alone_is_played_round_by_round_beside_those_that_come() -> None:
    with rows_of_words(2) as engine:
        assert engine.free() == [0, 1]
        engine.submit(0, "a b c d")
        assert engine.step() == [Part(0, "a")]
        assert engine.free() == [1, 2], "it takes no row"
        engine.submit(1, "x y")
        engine.submit(2, "-")
        assert engine.free() == []
        found = [event for _ in range(3) for event in engine.step()]
        assert [event for event in found if event.place == 0] == [Part(0, "b"), Part(0, "c"), Part(0, "d")]
        assert [event for event in found if event.place == 1] == [Part(1, "x"), Part(1, "y"), Answered(1, "x y")]
        assert [event for event in found if event.place == 2] == [Answered(2, "-")]
        assert engine.step() == [Answered(0, "a b c d")]


def test_what_is_cancelled_is_closed_and_makes_room() -> None:
    closed = list[str]()

    def write(question: str) -> Generator[str, None, None]:
        try:
            while True:
                yield question
        finally:
            closed.append(question)

    with HereEngine(write) as engine:
        engine.submit(0, "a")
        assert engine.step() == [Part(0, "a")]
        assert engine.free() == []
        engine.cancel(0)
        assert (closed, engine.free()) == (["a"], [0])
        engine.submit(0, "b")
        engine.cancel(0)
        assert (closed, engine.free()) == (["a"], [0])


def test_what_is_prepared_holds_up_no_other_text() -> None:
    futures: dict[str, Future[Any]] = {"a": Future(), "b": Future()}
    engine = HereEngine(words, prepare=futures.get, places=3)
    for place, question in enumerate(("a", "b", "c")):
        engine.submit(place, question)
    assert engine.free() == []
    assert [event for _ in range(2) for event in engine.step()] == [Part(2, "c"), Answered(2, "c")]
    assert engine.step(0.0) == []
    futures["a"].set_exception(ValueError("no grammar"))
    (failed,) = engine.step()
    assert isinstance(failed, Answered)
    assert (failed.place, str(failed.answer)) == (0, "no grammar")
    engine.cancel(1)
    assert futures["b"].cancelled()
    assert engine.free() == [0, 1, 2]
