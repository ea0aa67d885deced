"""What is heard of an order: until its text has ended, its client has gone away, or its time is over."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import Receive

from specctl.serving.api_errors import too_late
from specctl.serving.text_thread import Ended, Event, Wrote


class Gone(Exception):  # noqa: N818 - no error: nobody hears of it
    """The client has gone away."""


class RequestWaiter:
    """Takes what happens, in the event loop: a text costs that nothing until it has ended, or rounds are to be sent.

    Args:
        receive: of the request, whose body has been read.
        seconds: until it is too late.
        rounds: called with those that are heard of at once, and whether the end is heard of with them.

    Attributes:
        begun: done when a round was heard, or the end.
        ended: the text; raises what went wrong, `Gone` among it.
    """

    def __init__(
        self, receive: Receive, seconds: float, rounds: Callable[[Sequence[Wrote], bool], None] = lambda *_: None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._rounds = rounds
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Ended] = loop.create_future()
        self._timer = loop.call_later(seconds, self.hear, [too_late()])
        self._watching = loop.create_task(self._watch(receive))

    def hear(self, events: Sequence[Event]) -> None:
        """Something has happened; what comes behind the end is nobody's."""
        if self.ended.done():
            return
        rounds: list[Wrote] = []
        end: Ended | Exception | None = None
        for event in events:
            if not isinstance(event, Wrote):
                end = event
                break
            rounds.append(event)
        if rounds:
            try:
                self._rounds(rounds, end is not None)
            except Exception as error:
                end = error
        if isinstance(end, Ended):
            self.ended.set_result(end)
        elif end is not None:
            self.ended.set_exception(end)
        if not self.begun.done():
            self.begun.set_result(None)

    def close(self) -> None:
        """Nothing more is heard."""
        self._timer.cancel()
        self._watching.cancel()
        if not (self.ended.cancel() or self.ended.cancelled()):
            self.ended.exception()  # has been heard of

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.hear([Gone()])
