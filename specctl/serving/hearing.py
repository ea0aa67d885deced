"""What is heard of an order: until its text has ended, its client has gone away, or its time is over."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import Receive

from specctl.serving.api_errors import too_late
from specctl.serving.order import Ended, Event, Wrote


class Gone(Exception):  # noqa: N818 - no error: nobody hears of it
    """The client has gone away."""


class Hearing:
    """Takes what happens, in the event loop: a text costs that nothing until it has ended, or rounds are to be sent.

    Args:
        receive: of the request, whose body has been read.
        seconds: until it is too late.
        rounds: called with the first round, and then with those that are heard of at once.

    Attributes:
        begun: done when a round was heard, or the end.
        ended: the text; raises what went wrong, `Gone` among it.
    """

    def __init__(
        self, receive: Receive, seconds: float, rounds: Callable[[Sequence[Wrote]], None] = lambda _: None
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._rounds = rounds
        self._heard: list[Wrote] = []  # and not told yet
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Ended] = loop.create_future()
        self._timer = loop.call_later(seconds, self.hear, too_late())
        self._watching = loop.create_task(self._watch(receive))

    def hear(self, event: Event) -> None:
        """Something has happened; what comes behind the end is nobody's."""
        if self.ended.done():
            return
        if isinstance(event, Wrote):
            self._heard.append(event)
            if not self.begun.done():
                self._tell()
            elif len(self._heard) == 1:
                self._loop.call_soon(self._tell)
        else:
            self._tell()
            if self.ended.done():  # what was heard before could not be told
                return
            if isinstance(event, Ended):
                self.ended.set_result(event)
            else:
                self.ended.set_exception(event)
        if not self.begun.done():
            self.begun.set_result(None)

    def close(self) -> None:
        """Nothing more is heard."""
        self._timer.cancel()
        self._watching.cancel()
        if not (self.ended.cancel() or self.ended.cancelled()):
            self.ended.exception()  # has been heard of

    def _tell(self) -> None:
        heard, self._heard = self._heard, []
        if not heard:
            return
        try:
            self._rounds(heard)
        except Exception as error:
            self.hear(error)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.hear(Gone())
