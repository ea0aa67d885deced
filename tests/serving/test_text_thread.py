"""How requests are handed to an engine of processes, and what becomes of texts whose process ends."""

from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic, sleep
from typing import Any

import pytest
from attended import Scripted

from specctl.decoding.session import TextRequest
from specctl.errors import RecordError
from specctl.profile.schema import SamplingTable
from specctl.records import Completion, DraftStep, ExtraToken, FinishReason, Round, StopReason
from specctl.serving.request_body import api_error_of
from specctl.serving.text_thread import BUSY, Affinity, BusyError, ClosedError, Ended, Reports, TextThread, Ticket
from specctl.text_engine.engine import Answered, Lost, Part
from specctl.text_engine.job import ReplicaError

SECONDS = 60.0
"""More than anything here takes: a test that waits so long has failed."""


def request(*prompt: int) -> TextRequest:
    return TextRequest(prompt or (1,), SamplingTable())


class Tickets:
    """A `TextThread` over `Scripted` processes, and what is reported of its requests."""

    def __init__(self, scripted: Scripted, most_waiting: int = 8) -> None:
        self.scripted = scripted
        self.heard: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        affinity = Affinity(scripted.places)
        self.thread = TextThread(scripted, scripted.count, most_waiting, self._tell, affinity)  # type: ignore[arg-type]

    def _tell(self, happened: Reports) -> None:
        for ticket, event in happened:
            ticket.receive([event])

    def submit(self, prompt: int) -> Ticket:
        ticket = Ticket(request(prompt), lambda events: [self.heard.put((prompt, event)) for event in events])
        self.thread.submit(ticket)
        return ticket

    def begin(self) -> Ticket:
        """Start, with a text that the first replica writes."""
        self.thread.start()
        ticket = self.submit(1)
        self.until(lambda: 0 in self.asked())
        return ticket

    def next(self) -> tuple[int, Any]:
        return self.heard.get(timeout=SECONDS)

    def happens(self, event: Any) -> None:
        self.scripted.events.put(event)

    def asked(self) -> dict[int, int]:
        """The prompt that each replica has."""
        return {number: question[0].prompt[0] for number, question in dict(self.scripted.asked).items()}

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until something holds."""
        due = monotonic() + SECONDS
        while not true():
            assert monotonic() < due, "it never came true"
            sleep(0.001)


@pytest.fixture
def two() -> Tickets:
    """Two replicas of two places."""
    return Tickets(Scripted(2, 2))


def round_(*tokens: int) -> Round:
    steps = tuple(DraftStep(number, token) for number, token in enumerate(tokens[:-1], 1))
    return Round(0, steps, len(steps), tokens[-1], ExtraToken.BONUS, StopReason.POLICY)


def test_the_replica_with_the_fewest_texts_gets_the_next(two: Tickets) -> None:
    two.thread.start()
    for prompt in (1, 2, 3, 4, 5):
        two.submit(prompt)
    two.until(lambda: len(two.asked()) == 4)
    assert two.asked() == {0: 1, 2: 2, 1: 3, 3: 4}
    assert (two.thread.running, two.thread.waiting, two.thread.ready) == (4, 1, 2)
    two.happens(Answered(2, "text"))
    assert two.next() == (2, "text")
    two.until(lambda: two.asked().get(2) == 5)


def test_as_many_wait_as_may(two: Tickets) -> None:
    two.thread = TextThread(two.scripted, 4, 1, two._tell, Affinity(2))  # type: ignore[arg-type]
    two.submit(1)
    with pytest.raises(BusyError):
        two.submit(2)


def test_a_text_whose_replica_ended_goes_on_where_it_was(two: Tickets) -> None:
    two.begin()
    two.happens(Part(0, round_(5, 6)))
    assert two.next()[1].tokens == (5, 6)
    two.happens(Lost(0, "replica 1 was ended"))
    two.until(lambda: two.asked() == {0: 1})
    two.happens(Part(0, round_(5)))
    two.happens(Part(0, round_(6, 7)))
    two.happens(Part(0, round_(8)))
    assert two.next()[1].tokens == (7,)
    assert two.next()[1].tokens == (8,)
    two.happens(Answered(0, "text"))
    assert two.next() == (1, "text")


def test_a_text_that_goes_on_otherwise_is_an_error(two: Tickets) -> None:
    two.begin()
    two.happens(Part(0, round_(5, 6)))
    two.next()
    two.happens(Lost(0, "replica 1 was ended"))
    two.until(lambda: two.asked() == {0: 1})
    two.happens(Part(0, round_(9)))
    error = two.next()[1]
    assert isinstance(error, RecordError)
    assert (api_error_of(error).status, api_error_of(error).code) == (503, "worker_died")
    two.until(lambda: two.scripted.cancelled == [0])


def test_what_ends_two_replicas_alone_is_given_up(two: Tickets) -> None:
    two.thread.start()
    two.submit(1)
    for alone in (True, False, True):
        two.until(lambda: two.asked() == {0: 1})
        two.happens(Lost(0, "replica 1 was ended by signal 9", alone=alone))
    error = two.next()[1]
    assert error.kind == "worker_died"
    assert "signal 9" in error.message


def test_what_nobody_wants_is_withdrawn_once_and_not_told(two: Tickets) -> None:
    ticket = two.begin()
    two.thread.cancel(ticket)
    two.until(lambda: two.scripted.cancelled == [0])
    two.happens(Part(0, round_(5)))
    two.happens(Answered(0, None))
    two.submit(2)
    two.until(lambda: 2 in two.asked().values())
    two.happens(Answered({prompt: number for number, prompt in two.asked().items()}[2], "text"))
    assert two.next() == (2, "text")
    assert two.scripted.cancelled == [0]


def test_the_end_waits_for_texts_and_not_for_those_that_wait(two: Tickets) -> None:
    two.thread.start()
    for prompt in range(5):
        two.submit(prompt)
    two.until(lambda: len(two.asked()) == 4)
    two.thread.close()
    prompt, error = two.next()
    assert (prompt, type(error)) == (4, ClosedError)
    two.happens(Lost(0, "replica 1 was ended"))
    two.until(lambda: two.asked().get(0) == 0)
    assert two.thread.alive
    for number in range(4):
        two.happens(Answered(number, "text"))
    two.thread.join(SECONDS)
    assert not two.thread.alive
    assert {two.next()[1] for _ in range(4)} == {"text"}
    with pytest.raises(ClosedError):
        two.submit(6)


def test_a_second_signal_does_not_wait(two: Tickets) -> None:
    two.begin()
    two.thread.give_up()
    two.thread.join(SECONDS)
    assert not two.thread.alive
    assert isinstance(two.next()[1], ClosedError)


def test_when_no_replica_is_left_everybody_hears_it(two: Tickets) -> None:
    two.thread.start()
    for prompt in range(5):
        two.submit(prompt)
    two.until(lambda: len(two.asked()) == 4)
    two.happens(ReplicaError("no replica is left"))
    assert {type(two.next()[1]) for _ in range(5)} == {ClosedError}
    assert isinstance(two.thread.died, ReplicaError)
    assert two.thread.closing


def test_a_conversation_goes_on_where_it_was(two: Tickets) -> None:
    """Its prompt of the next turn begins with all that was said, and comes to the replica that has read it."""
    two.begin()
    prompt, tokens = tuple(range(100, 160)), tuple(range(200, 220))

    def ask(*ids: int) -> int:
        """The place that a prompt comes to."""
        before = two.asked()
        two.thread.submit(Ticket(request(*ids)))
        two.until(lambda: len(two.asked()) > len(before))
        (place,) = two.asked().keys() - before.keys()
        return place

    first = ask(*prompt)
    assert first >= 2, "the other replica"
    done = Completion(prompt, 0, tokens, "", FinishReason.LENGTH, (), 0.0, 0.0, 0.0)
    two.happens(Answered(first, Ended(done)))
    two.until(lambda: first not in two.asked())
    assert ask(7, 8) >= 2, "the one that writes nothing"
    assert ask(*range(300, 700)) // 2 == 0, "either writes a text"
    two.happens(Answered(0, "text"))
    two.until(lambda: 0 not in two.asked())
    assert ask(*prompt, *tokens, 5) >= 2, "both write one, and that replica knows it"


@pytest.mark.parametrize(
    ("busy", "expected"), [((), 4), ((3,), 4), ((3, 4), 0), ((0, 3, 4), 6), ((0, 3, 4, 6), 5), ((3, 4, 5), 0)]
)
def test_a_prompt_goes_where_the_least_is_left_to_do(busy: tuple[int, ...], expected: int) -> None:
    """What a replica knows is worth waiting for one text, and not for two."""
    affinity = Affinity(3)
    known = tuple(range(BUSY + BUSY // 2))
    affinity.holds(3, known)
    assert affinity.place((*known, 5), [place for place in range(9) if place not in busy], busy) == expected


def test_what_a_replica_that_ended_knew_is_forgotten() -> None:
    affinity = Affinity(2)
    known = tuple(range(64))
    affinity.holds(3, known)
    assert affinity.place(known, [0, 2], []) == 2
    affinity.lost(2)
    assert affinity.place(known, [0, 2], []) == 0
    affinity.holds(3, known[:20])
    assert affinity.place(known, [0, 2], []) == 0, "too little to be kept"
