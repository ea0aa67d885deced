"""What is heard of an order: until its text has ended, its client has gone away, or its time is over."""

import asyncio
from collections.abc import Callable

from starlette.types import Receive

from specctl.serving.api_errors import too_late
from specctl.serving.order import Ended, Event, Wrote


class Gone(Exception):  # noqa: N818 - no error: nobody hears of it
    """The client has gone away."""


class Hearing:
    """Takes what happens, in the event loop: a text costs that nothing until it has ended, or a round is to be sent.

    Args:
        receive: of the request, whose body has been read.
        seconds: until it is too late.
        round_: called with each round.

    Attributes:
        begun: done when a round was heard, or the end.
        ended: the text; raises what went wrong, `Gone` among it.
    """

    def __init__(self, receive: Receive, seconds: float, round_: Callable[[Wrote], None] = lambda _: None) -> None:
        loop = asyncio.get_running_loop()
        self._round = round_
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Ended] = loop.create_future()
        self._timer = loop.call_later(seconds, self.hear, too_late())
        self._watching = loop.create_task(self._watch(receive))

    def hear(self, event: Event) -> None:
        """Something has happened; what comes behind the end is nobody's."""
        if self.ended.done():
            return
        if isinstance(event, Wrote):
            try:
                self._round(event)
            except Exception as error:
                self.hear(error)
                return
        elif isinstance(event, Ended):
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

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.hear(Gone())
