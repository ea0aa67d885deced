"""A replica of a served pair: the models' thread of a process of its own."""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock

from specctl.errors import reason
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Passes
from specctl.models.running.rules.grammar import Compiled, grammars_of, source_of
from specctl.profile import Profile
from specctl.replicas.job import portable
from specctl.replicas.places import Asked, Attendant, Send
from specctl.serving.offer import offer
from specctl.serving.order import Event, Order, Ticket, Told, Wrote
from specctl.serving.pair_thread import PairThread
from specctl.serving.workers.replicated_pair import PairFacts

FAILED = 3
"""The exit code of a process whose models failed: whoever started it starts another."""


class ReplicaWriter(Attendant):
    """Writes texts that are asked for as pairs of an `Order` and whether each round is wanted.

    Parts are what the text's `Ticket` would hear besides its end, and the answer is what it hears last.

    Args:
        pair: loaded; nobody else uses it.
        profile: how it is used, with the draft that is at work.
        name: what clients call it.
        passes, warn: as of `PairThread`.
    """

    def __init__(
        self,
        pair: Pair,
        profile: Profile,
        name: str,
        passes: Sequence[Passes] | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._pair = pair
        self.about = PairFacts.of(pair, offer(pair, profile, name), 1 if passes is None else passes[-1].slots)
        self.places = self.about.rows
        # Who asks has a line of its own, and asks no more than there are places.
        self._thread = PairThread(pair, profile, passes, sys.maxsize, self._told, warn)
        self._lock = Lock()
        self._tickets: dict[int, Ticket] = {}  # by place
        self._compiling: dict[int, Future[Compiled | None]] = {}
        self._part: Send = lambda *_: None
        self._answer: Send = lambda *_: None

    def attend(self, questions: Asked, part: Send, answer: Send) -> None:
        self._part, self._answer = part, answer
        self._thread.start()
        while True:
            place, asked = questions.get()
            if asked is None:
                self._withdraw(place)
            else:
                self._begin(place, *asked)

    def _begin(self, place: int, order: Order, every: bool) -> None:
        def hear(events: Sequence[Event]) -> None:
            for event in events:
                if isinstance(event, Wrote):
                    self._part(place, event)
                else:
                    del self._tickets[place]
                    self._answer(place, portable(event) if isinstance(event, Exception) else event)

        self._tickets[place] = ticket = Ticket(order, hear, every=every)
        if (source := source_of(order.settings)) is None:
            self._thread.submit(ticket)
            return
        try:  # other texts go on meanwhile
            self._compiling[place] = found = grammars_of(self._pair.tokenizer, self._pair.eos).compiling(source)
        except Exception as error:
            self._told([(ticket, error)])
        else:
            found.add_done_callback(lambda _: self._compiled(ticket, found))

    def _compiled(self, ticket: Ticket, found: "Future[Compiled | None]") -> None:
        if found.cancelled():
            return
        try:
            ticket.grammar = found.result()
        except Exception as error:
            self._told([(ticket, error)])
        else:
            self._thread.submit(ticket)

    def _withdraw(self, place: int) -> None:
        with self._lock:
            if (ticket := self._tickets.pop(place, None)) is not None:  # else its answer is on the way
                if (compiling := self._compiling.pop(place, None)) is not None:
                    compiling.cancel()
                self._thread.cancel(ticket)
                self._answer(place, None)

    def _told(self, told: Told) -> None:
        """Called in the models' thread, and in those of grammars."""
        if (died := self._thread.died) is not None:
            print(f"the models failed: {type(died).__name__}: {reason(died)}", file=sys.stderr, flush=True)
            os._exit(FAILED)  # the orders are not to hear of it: another replica writes their texts
        with self._lock:  # of one that is withdrawn nothing may follow its answer
            for ticket, event in told:
                if not ticket.cancelled:
                    ticket.hear([event])
