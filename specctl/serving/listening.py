"""The application on a port, from the first request to the end of the last one."""

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from specctl.errors import ModelError, SpecctlError, UsageError, reason
from specctl.serving.service import Service

WIRE = "specctl.wire"
"""Key in a request's scope: the function that writes a piece of the answer at once, without waiting."""


class Connection(H11Protocol):
    """uvicorn's connection, closed if a request's headers do not arrive or the client does not read the answer.

    Attributes:
        HEADER_SECONDS: time for a request's headers to arrive, from its first byte or the connection's start.
        UNREAD_SECONDS: time within which a client must read part of its answer.
    """

    HEADER_SECONDS = 30.0
    UNREAD_SECONDS = 60.0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._headers: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._answering, self.app = self.app, self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1":  # whose answers of unknown length are chunked
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
    """Cancel a timer, and return None."""
    if timer is not None:
        timer.cancel()
    return None


TERMINATED = 143
SPARE_CONNECTIONS = 256
"""Connections beyond those of waiting and running requests: for rejected requests and for metrics."""
SWITCH_SECONDS = 5e-4
"""Python's switch interval while the models' thread computes, so that pieces are sent in time: the default of 5 ms
lasts a round.
"""
DATE_SECONDS = 1.0  # For this time, answers repeat the same date
LAST_SECONDS = 5.0  # How long to wait for a running pass after a second signal


def bound(host: str, port: int) -> socket.socket:
    """Open a listening socket; raises UsageError if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
            found.listen(2048)
        except OSError:
            found.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = "choose another with --port, or 0 for any that is free; --host is an address of this machine"
        raise UsageError(f"cannot listen on {host} port {port}: {why}", hint) from error
    return found


def address_of(listening: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def known_hosts(host: str, listening: socket.socket) -> frozenset[str] | None:
    """The host names of a loopback address; None for an address that other machines reach."""
    address = listening.getsockname()[0]
    if not ip_address(address).is_loopback:
        return None
    return frozenset({"localhost", "127.0.0.1", "[::1]", host.lower(), f"[{address}]" if ":" in address else address})


class Listener(uvicorn.Server):
    """Serves until a signal: the first lets running texts finish, the second stops them.

    Args:
        app: answers.
        service: writes texts.
        grace: seconds at the end in which clients may receive their answers.
    """

    def __init__(self, app: Starlette, service: Service, grace: float) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=max(1, round(grace)),
            limit_concurrency=service.limits.waiting + service.thread.texts + SPARE_CONNECTIONS,
        )
        super().__init__(config)
        self._service = service
        self._signals: list[int] = []
        self._draining: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        service.failed = self._stop

    def serve_on(self, listening: socket.socket) -> None:
        """Serve until the end.

        Raises:
            ModelError: the models failed.
            KeyboardInterrupt, SystemExit: a second signal came.
        """
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            self.run(sockets=[listening])
        finally:
            sys.setswitchinterval(before)
        self._service.thread.join(LAST_SECONDS)
        if (died := self._service.thread.died) is not None:
            what = (
                reason(died)
                if isinstance(died, SpecctlError)
                else f"{type(died).__name__}: {reason(died)}".rstrip(": ")
            )
            raise ModelError(f"the models failed: {what}", "SPECCTL_DEBUG=1 shows where it happened.") from died
        if len(self._signals) > 1:
            if self._signals[-1] == signal.SIGINT:
                raise KeyboardInterrupt
            sys.exit(TERMINATED)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Like uvicorn's, but the first signal lets texts finish and is not raised again."""
        loop = asyncio.get_running_loop()

        def press(number: int, _frame: FrameType | None) -> None:
            with suppress(RuntimeError):  # the loop is closed already
                loop.call_soon_threadsafe(self._press, number)

        before = {number: signal.signal(number, press) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def main_loop(self) -> None:
        """Like uvicorn's, but woken at the end instead of polling ten times a second."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(DATE_SECONDS):
                    await self._stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn does not stop the application, which would end in a traceback
            await self.lifespan.shutdown()

    def _press(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            self.force_exit = True
            self._stop()
            self._service.thread.give_up()
        elif self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.drain()
        self._stop()

    def _stop(self) -> None:
        self.should_exit = True
        self._stopping.set()
