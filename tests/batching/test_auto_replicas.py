"""Questions that come when they come: alone where one is there, in rows where several are."""

from collections.abc import Iterator

import pytest

from specctl.batching.auto_replicas import AutoReplicas
from specctl.batching.hub import Hub
from specctl.batching.row_replicas import RowReplicas
from specctl.models.running.passes import Request
from specctl.replicas.window import Task, in_order

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
    """A pair whose answer to a number takes so many passes, with what it did.

    Attributes:
        alone: questions that were answered alone.
        counts: how many questions were there when rows were asked for.
    """

    def __init__(self, *, pays: bool = True) -> None:
        self.passes, self.alone, self.counts, self._pays = Silent(), list[int](), list[int](), pays

    def replicas(self, places: int = 4) -> AutoReplicas:
        hub = Hub[int]([self.passes])  # type: ignore[list-item]

        ask = hub.asker(self.passes)

        def in_row(row: int, question: int) -> int:
            for _ in range(question):
                ask(Request(row, 0, [1], 0))
            return question * 10

        def rows(count: int) -> RowReplicas | None:
            self.counts.append(count)
            return RowReplicas(hub, [lambda one, row=row: in_row(row, one) for row in range(2)]) if self._pays else None

        def alone(question: int) -> int:
            self.alone.append(question)
            return question * 10

        return AutoReplicas(alone, rows, places)


def answers(played: Played, questions: Iterator[int | None]) -> list[tuple[int, int]]:
    with played.replicas() as replicas:
        tasks = (None if one is None else Task(one, one) for one in questions)
        return list(in_order(replicas, tasks))


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
    with played.replicas() as replicas:
        for place, question in enumerate((5, 2)):
            replicas.ask(place, question)
        assert replicas.wait() == []
        assert [(event.replica, event.answer) for event in replicas.wait()] == [(1, 20)]  # type: ignore[union-attr]
        replicas.ask(3, 2)
        replicas.wait()
        assert played.passes.passes[-1] == [0, 1]
        assert replicas.idle() == [1, 2]


def test_where_rows_do_not_pay_all_are_answered_alone() -> None:
    played = Played(pays=False)
    assert answers(played, iter([3, 2, None, 2])) == [(3, 30), (2, 20), (2, 20)]
    assert played.alone == [3, 2, 2]


def test_rows_that_do_not_pay_are_tried_again_only_with_twice_as_many() -> None:
    played = Played(pays=False)
    with played.replicas(8) as replicas:
        for place in range(3):
            replicas.ask(place, 1)
        for _ in range(2):
            replicas.wait()
        for place in range(3, 8):
            replicas.ask(place, 1)
        for _ in range(6):
            replicas.wait()
    assert played.counts == [3, 6]


def test_its_rows_are_closed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[RowReplicas] = []
    monkeypatch.setattr(RowReplicas, "close", lambda rows: closed.append(rows))
    with Played().replicas() as replicas:
        for place in range(2):
            replicas.ask(place, 1)
        replicas.wait()
        assert not closed
    assert closed
