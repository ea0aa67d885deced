"""What every request goes through: the access log, and the key that it must have."""

import asyncio
import hmac
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specctl.serving.api_errors import ApiError, told
from specctl.serving.page_files import FILES
from specctl.serving.server_metrics import ServerMetrics
from specctl.serving.text_thread import CLOSING, ClosedError

OPEN = frozenset({"/health", *FILES})
"""Paths that need no key."""


class AccessLog:
    """Tells of each request when it has ended: no prompt, no text, no key.

    Args:
        app: answers.
        log: takes the line; None for none.
        metrics: count requests.
    """

    def __init__(self, app: ASGIApp, log: Callable[[dict[str, Any]], None] | None, metrics: ServerMetrics) -> None:
        self._app, self._log, self._metrics = app, log, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        more: dict[str, Any] = {}
        scope["log"] = more
        status: int | None = None

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:  # the server ends, and waits for this client no longer
            more["error"] = CLOSING
            if status is None:
                await _told_closing(scope, receive, noting)
        finally:
            self._metrics.request(scope["path"], 499 if more.get("gone") else status or 500)
            if self._log is not None:
                client = scope.get("client")
                self._log(
                    {
                        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                        "client": client[0] if client else None,
                        "method": scope["method"],
                        "path": scope["path"],
                        "status": status or 500,
                        "ms": round((time.monotonic() - began) * 1e3, 1),
                        **more,
                    }
                )


async def _told_closing(scope: Scope, receive: Receive, send: Send) -> None:
    error = told(ClosedError(CLOSING))
    await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)


class Hosts:
    """Answers those that call the server by a name of its own.

    A page of another site whose name was made to lead here would be let read answers by its browser, but not without
    that name.

    Args:
        app: answers.
        names: that may be asked for, without a port; None for any.
        told: makes the answer of an error.
    """

    def __init__(
        self, app: ASGIApp, names: frozenset[str] | None, told: Callable[[Request, Exception], Response]
    ) -> None:
        self._app, self._names, self._told = app, names, told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._names is not None:
            name = Headers(scope=scope).get("host", "localhost").lower()
            name = name[: name.find("]") + 1] if name.startswith("[") else name.partition(":")[0]
            if name not in self._names:
                what = "this server is not known by the host of the request; ask localhost, or set an API key"
                await self._told(Request(scope), ApiError(403, what, code="unknown_host"))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Key:
    """Lets in who has the key.

    Args:
        app: answers.
        key: that is needed; None to ask for none.
        told: makes the answer of an error.
    """

    def __init__(self, app: ASGIApp, key: str | None, told: Callable[[Request, Exception], Response]) -> None:
        self._app, self._told = app, told
        self._key = (key or "").encode("utf-8", "surrogateescape")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._key and scope["path"] not in OPEN and not self._known(scope):
            error = ApiError(
                401, "the API key is missing or wrong", code="invalid_api_key", kind="authentication_error"
            )
            await self._told(Request(scope), error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return False
        # As bytes: those of a letter in UTF-8 may look like white space.
        return hmac.compare_digest(given.strip(" \t").encode("latin-1"), self._key)
