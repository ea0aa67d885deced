"""A connection that waits for its client only so long."""

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

WIRE = "specctl.wire"
"""Where the scope of a request has what sends a piece of its answer at once, and waits for nobody."""


class Connection(H11Protocol):
    """uvicorn's, which is closed where a request's headers do not come, or nobody reads the answer.

    Attributes:
        HEADER_SECONDS: until a request's headers are there, from its first byte on, or from the connection's beginning.
        UNREAD_SECONDS: for which a client may take nothing of what waits for it.
    """

    HEADER_SECONDS = 30.0
    UNREAD_SECONDS = 60.0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._headers: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._answering, self.app = self.app, self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1":  # whose answers of unknown length are sent in chunks
            scope[WIRE] = self._write
        await self._answering(scope, receive, send)

    def _write(self, piece: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._headers = self.loop.call_later(self.HEADER_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._headers = cancelled(self._headers)
        elif self._headers is None:
            self._headers = self.loop.call_later(self.HEADER_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread = cancelled(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers, self._unread = cancelled(self._headers), cancelled(self._unread)
        super().connection_lost(exc)


def cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """No timer any more."""
    if timer is not None:
        timer.cancel()
    return None
