"""The one thread that runs a server's engine, and its requests: waiting, running and ended."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from time import monotonic

from specctl.decoding.answers import NamedDrafters, failures_of_a_text
from specctl.decoding.session import Session, TextRequest
from specctl.errors import RecordError, SpecctlError
from specctl.models.running.context import common_beginning
from specctl.models.running.grammars.grammar import Compiled
from specctl.models.running.pair import Pair
from specctl.profile import Profile
from specctl.records import Completion, Round
from specctl.text_engine.dispatch import Dispatcher, GivenUp
from specctl.text_engine.engine import Answered, Part, Restarted, TextEngine, Writer

CLOSING, FAILED = "the server is shutting down", "the models have failed"
BUSY = 256  # The cost of a running text in prompt tokens when a replica is chosen


class BusyError(SpecctlError):
    """The queue of requests is full."""


class ClosedError(SpecctlError):
    """No more requests are taken, and waiting ones do not begin."""


@dataclass(frozen=True)
class Wrote:
    """A round of a text."""

    round: Round  # as it ended
    known: int = 0  # the number of its first tokens that were reported already, before the text started over

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The tokens not reported yet."""
        return self.round.emitted[self.known :]


@dataclass(frozen=True)
class Ended:
    """A text that has ended."""

    completion: Completion  # all of it
    kept: int = 0  # tokens of its prompt that were cached, and were not read
    begun: float | None = None  # `time.monotonic` at the end of its first round; None without one

    @cached_property
    def drafted_and_accepted(self) -> tuple[int, int]:
        """How many tokens were drafted, and how many of them were accepted."""
        rounds = self.completion.rounds
        drafted = sum(one.nodes if one.tree else len(one.steps) for one in rounds)
        return drafted, sum(one.accepted for one in rounds)


Event = Wrote | Ended | Exception
"""An event of a request: its rounds, if wanted, then its text or an error."""


class Ticket:
    """A request and its progress.

    Args:
        request: the text.
        receive: called with events, in order, in the event loop.
        every: whether each round is reported, or only the finished text.

    Attributes:
        cancelled: set when the text is no longer wanted.
        grammar: the compiled grammar, until the text has begun.
    """

    def __init__(
        self, request: TextRequest, receive: Callable[[Sequence[Event]], None] = lambda _: None, *, every: bool = True
    ) -> None:
        self.request, self.receive, self.every = request, receive, every
        self.cancelled = False
        self.grammar: Compiled | None = None
        self._reported: list[int] = []
        self._written = 0
        self._lost = False

    @property
    def reported(self) -> int:
        """The number of reported tokens."""
        return len(self._reported)

    def restart(self, *, lost: bool) -> None:
        """Note that the text starts over, because its replica ended or memory ran out."""
        self._written, self._lost = 0, lost

    def wrote(self, round_: Round) -> Wrote | RecordError:
        """The new part of a round; a RecordError if the text differs from the reported tokens."""
        tokens = round_.emitted
        known = self._reported[self._written : self._written + len(tokens)]
        if tuple(known) != tokens[: len(known)]:
            if self._lost:
                what = "the worker that wrote this text ended, and another one wrote a different text"
                return RecordError("worker_died", what)
            what = "memory ran out, and the text came out differently when it was started over"
            return RecordError("out_of_memory", what)
        self._written += len(tokens)
        self._reported += tokens[len(known) :]
        return Wrote(round_, len(known))


Reports = Sequence[tuple[Ticket, Event]]  # What happened, in order


def served_writer(pair: Pair, profile: Profile, saved: Callable[[], int] = lambda: 0) -> Writer:
    """The writer of a server's texts: it takes a `TextRequest` and whether rounds are wanted, and returns `Ended`.

    Args:
        pair: a loaded pair, or a row's.
        profile: has the draft and its policy.
        saved: returns the number of prompt tokens that the target copied from another row.
    """
    session, drafters = Session(pair, None, keep_caches=True), NamedDrafters(pair, profile.draft)

    def write(asked: tuple[TextRequest, bool]) -> Generator[Round | None, None, Ended | SpecctlError]:
        request, every = asked
        before, begun = saved(), None
        try:
            session.drafter = drafters.of(request.policy, drafts=request.draft, place="specctl.policy")
            with failures_of_a_text(), closing(session.play(request.prompt, request.settings)) as playing:
                yield from session.read(request.prompt)
                while True:
                    try:
                        round_ = next(playing)
                    except StopIteration as end:
                        completion: Completion = end.value
                        break
                    begun = begun or monotonic()
                    yield round_ if every and round_.emitted else None
        except SpecctlError as error:
            return error
        kept = session.kept + saved() - before
        # A text that is read again past a rotary border (LongRoPE) finds its prompt a second time.
        return Ended(completion, min(kept, completion.prompt_tokens - 1), begun)

    return write


class Affinity:
    """Chooses a replica's place for a text by the text that each place last cached.

    This is a guess. A wrong one only costs time, because a replica checks its own caches.

    Args:
        places: the number of places of each replica; the first replica's places come first.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._texts: dict[int, Sequence[int]] = {}  # ids by place, most recently changed last

    def choose(self, asked: tuple[TextRequest, bool], free: Sequence[int], busy: Iterable[int]) -> int:
        """Choose a text's place and note its prompt there."""
        place = self.place(asked[0].prompt, free, busy)
        self.holds(place, asked[0].prompt)
        return place

    def place(self, prompt: Sequence[int], free: Sequence[int], busy: Iterable[int]) -> int:
        """The best place for a prompt: the replica with the least work, and there the place with the oldest text.

        Args:
            prompt: ids.
            free: places; at least one.
            busy: places whose texts are being written.
        """
        texts, kept = Counter(place // self._places for place in busy), Counter[int]()
        for place, text in self._texts.items():
            replica = place // self._places
            kept[replica] = max(kept[replica], common_beginning(text, prompt))

        changed = {place: number for number, place in enumerate(self._texts, 1)}

        def cost(place: int) -> tuple[int, int]:
            replica = place // self._places
            return BUSY * texts[replica] - kept[replica], changed.get(place, 0)

        return min(free, key=cost)

    def holds(self, place: int, text: Sequence[int]) -> None:
        """Note a place's text, or its known part."""
        self._texts.pop(place, None)
        self._texts[place] = text

    def lost(self, place: int) -> None:
        """Forget the caches of a replica that has ended, given one of its places."""
        first = place // self._places * self._places
        for one in range(first, first + self._places):
            self._texts.pop(one, None)


class TextThread:
    """Runs an engine. Requests wait in one queue for a place; new text is reported after every round.

    A text may start over because memory ran out or its replica ended. Reported tokens stay valid: a text that then
    differs is an error. A sampled text may differ if its policy reads clocks.

    Args:
        engine: of `served_writer`; the thread alone uses it, and closes it at its end.
        texts: the number of texts it writes at once.
        most_waiting: requests that may wait.
        report: called with events, in this thread and in those that close it.
        affinity: chooses places; None for the engine's best.

    Attributes:
        texts: as given.
        died: the error that ended the thread, if any.
    """

    def __init__(
        self,
        engine: TextEngine,
        texts: int,
        most_waiting: int,
        report: Callable[[Reports], None],
        affinity: Affinity | None = None,
    ) -> None:
        self._engine, self.texts, self._most, self._report, self._affinity = (
            engine,
            texts,
            most_waiting,
            report,
            affinity,
        )
        self._dispatcher: Dispatcher[Ticket] = Dispatcher(engine, None if affinity is None else affinity.choose)
        self._unwanted = deque[Ticket]()  # tickets whose texts are to be stopped
        self._lock = threading.Lock()  # of the two that follow
        self._line: deque[Ticket] = deque()
        self._closing = False
        self.died: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="texts", daemon=True)

    @property
    def ready(self) -> int:
        """Pairs that are loaded and can write."""
        return self._engine.ready if self.died is None else 0

    @property
    def running(self) -> int:
        """Texts that are being written."""
        return self._dispatcher.running

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._line) + self._dispatcher.waiting

    @property
    def closing(self) -> bool:
        """Whether no more requests are taken."""
        return self._closing

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Take a request.

        Raises:
            BusyError: too many wait.
            ClosedError: it is closing, or the models have failed.
        """
        with self._lock:
            if self._closing:
                raise ClosedError(CLOSING if self.died is None else FAILED)
            if len(self._line) >= self._most:
                raise BusyError(f"{self._most} request{'s'[: self._most != 1]} wait already")
            self._line.append(ticket)
        self._engine.wake()

    def cancel(self, ticket: Ticket) -> None:
        """Stop a text within a round; no further event of it is reported."""
        ticket.cancelled = True
        with self._lock:
            if ticket in self._line:
                self._line.remove(ticket)
                return
        self._unwanted.append(ticket)
        self._engine.wake()

    def close(self) -> None:
        """Take no more requests, reject waiting ones, and finish running texts."""
        self._report([(ticket, ClosedError(CLOSING)) for ticket in self._close()])
        self._engine.wake()

    def give_up(self) -> None:
        """Like `close`, but stop running texts."""
        self.close()
        written = self._dispatcher.begun
        for ticket in written:
            ticket.cancelled = True
            self._unwanted.append(ticket)
        self._report([(ticket, ClosedError(CLOSING)) for ticket in written])
        self._engine.wake()

    def join(self, seconds: float) -> None:
        """Wait until running texts are finished."""
        self._thread.join(seconds)

    def _close(self, died: Exception | None = None) -> list[Ticket]:
        with self._lock:
            self._closing, self.died = True, died or self.died
            waiting, self._line = [*self._line], deque()
        return waiting

    def _work(self) -> None:
        happened: list[tuple[Ticket, Event]] = []
        try:
            while True:
                while self._unwanted:
                    self._dispatcher.cancel(self._unwanted.popleft())
                if self._line:
                    self._take()
                if self._closing and not self._dispatcher.begun:
                    return
                happened = []
                for ticket, event in self._dispatcher.step():
                    happened += self._events(ticket, event)
                if happened:
                    self._report(happened)
        except Exception as error:
            ended = [*self._dispatcher.begun, *self._close(error)]
            self._report([(ticket, ClosedError(FAILED)) for ticket in ended if not ticket.cancelled])
        finally:
            self._engine.close()

    def _take(self) -> None:
        """Give waiting requests to the engine's free places."""
        while self._line and self._dispatcher.room():
            with self._lock:
                if not self._line:  # its client has just left
                    return
                ticket = self._line.popleft()
            if not ticket.cancelled:
                self._dispatcher.submit(ticket, (ticket.request, ticket.every))

    def _events(self, ticket: Ticket, event: Part | Restarted | Answered | GivenUp) -> Reports:
        """Report an event, if it is wanted."""
        if isinstance(event, Part):
            if ticket.cancelled:
                return []
            new = ticket.wrote(event.value)
            if isinstance(new, RecordError):
                ticket.cancelled = True
                self._unwanted.append(ticket)
                return [(ticket, new)]
            return [(ticket, new)] if new.tokens else []
        if isinstance(event, Restarted):
            ticket.restart(lost=event.lost)
            if event.lost and self._affinity is not None:
                self._affinity.lost(event.place)
            return []
        if isinstance(event, Answered) and isinstance(event.answer, Ended) and self._affinity is not None:
            done = event.answer.completion
            self._affinity.holds(event.place, done.prompt + done.tokens)
        if ticket.cancelled:
            return []
        if isinstance(event, Answered):
            return [(ticket, event.answer)]
        return [(ticket, RecordError("worker_died", f"no worker survived this text; {event.why}"))]
