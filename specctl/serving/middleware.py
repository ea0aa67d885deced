"""Middleware of every request: metrics, access log, host check and API key."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specctl.serving.request_body import ApiError, api_error_of
from specctl.serving.text_thread import CLOSING, ClosedError, Ended, TextThread

PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/specctl", "/", "/health", "/metrics"})
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """A server's metrics.

    Args:
        thread: has the numbers of running and waiting texts and of ready pairs.
    """

    MEDIA_TYPE = CONTENT_TYPE_LATEST

    def __init__(self, thread: TextThread) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "specctl_requests",
            "Requests that have ended, by path and HTTP status.",
            ["path", "status"],
            registry=registry,
        )
        tokens = Counter("specctl_tokens", "Tokens of prompts and of texts.", ["kind"], registry=registry)
        drafted = Counter(
            "specctl_draft_tokens", "Drafted tokens, accepted and rejected.", ["outcome"], registry=registry
        )
        self._rounds = Counter("specctl_rounds", "Passes of the target that verify.", registry=registry)
        self._first = Histogram(
            "specctl_first_token_seconds", "From a request to its first round.", buckets=SECONDS, registry=registry
        )
        self._seconds = Histogram(
            "specctl_text_seconds", "From a request to the end of its text.", buckets=SECONDS, registry=registry
        )
        running = Gauge("specctl_texts_running", "Texts that are being written.", registry=registry)
        running.set_function(lambda: thread.running)
        prompts = Counter(
            "specctl_prompt_tokens", "Tokens of prompts: read, or found in caches.", ["how"], registry=registry
        )
        # Label lookups are slower than counting, so they are done once.
        self._prompt, self._completion = map(tokens.labels, ("prompt", "completion"))
        self._accepted, self._rejected = map(drafted.labels, ("accepted", "rejected"))
        self._kept, self._read = map(prompts.labels, ("kept", "read"))
        waiting = Gauge("specctl_requests_waiting", "Requests that wait for a row.", registry=registry)
        waiting.set_function(lambda: thread.waiting)
        ready = Gauge("specctl_workers_ready", "Pairs that are loaded and can write.", registry=registry)
        ready.set_function(lambda: thread.ready)

    def request(self, path: str, status: int) -> None:
        """A request has ended."""
        self._requests.labels(path if path in PATHS else "other", str(status)).inc()

    def ended(self, text: Ended, began: float) -> None:
        """A text has ended; its request arrived at this `time.monotonic`."""
        self._seconds.observe(time.monotonic() - began)
        if text.begun is not None:
            self._first.observe(text.begun - began)
        completion = text.completion
        drafted, accepted = text.drafted_and_accepted
        self._kept.inc(text.kept)
        self._read.inc(completion.prompt_tokens - text.kept)
        self._prompt.inc(completion.prompt_tokens)
        self._completion.inc(len(completion.tokens))
        self._accepted.inc(accepted)
        self._rejected.inc(drafted - accepted)
        self._rounds.inc(len(completion.rounds))

    def page(self) -> bytes:
        return generate_latest(self._registry)


FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""By path: a file, and what it is."""
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[Route]:
    """A route for each file."""
    folder = files("specctl.serving") / "page"
    return [Route(path, _sends((folder / name).read_bytes(), kind)) for path, (name, kind) in FILES.items()]


def _sends(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send


OPEN = frozenset({"/health", *FILES})  # Paths that need no key


class AccessLog:
    """Logs each request at its end, without prompt, text or key.

    Args:
        app: answers.
        log: receives the line; None for no log.
        metrics: counts requests.
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
        except asyncio.CancelledError:  # the server ends and no longer waits for this client
            more["error"] = CLOSING
            if status is None:
                await _answer_closing(scope, receive, noting)
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


async def _answer_closing(scope: Scope, receive: Receive, send: Send) -> None:
    error = api_error_of(ClosedError(CLOSING))
    await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)


class Hosts:
    """Rejects requests whose host is not one of this server's names.

    Prevents DNS rebinding: a foreign page whose host name resolves to this server could read answers in a browser.

    Args:
        app: answers.
        names: allowed hosts, without a port; None for any.
        answer_error: makes the response to an error.
    """

    def __init__(
        self, app: ASGIApp, names: frozenset[str] | None, answer_error: Callable[[Request, Exception], Response]
    ) -> None:
        self._app, self._names, self._answer_error = app, names, answer_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._names is not None:
            name = Headers(scope=scope).get("host", "localhost").lower()
            name = name[: name.find("]") + 1] if name.startswith("[") else name.partition(":")[0]
            if name not in self._names:
                what = "this server is not known by the host of the request; ask localhost, or set an API key"
                await self._answer_error(Request(scope), ApiError(403, what, code="unknown_host"))(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Key:
    """Rejects requests without the API key.

    Args:
        app: answers.
        key: the required key; None for none.
        answer_error: makes the response to an error.
    """

    def __init__(self, app: ASGIApp, key: str | None, answer_error: Callable[[Request, Exception], Response]) -> None:
        self._app, self._answer_error = app, answer_error
        self._key = (key or "").encode("utf-8", "surrogateescape")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._key and scope["path"] not in OPEN and not self._known(scope):
            error = ApiError(
                401, "the API key is missing or wrong", code="invalid_api_key", kind="authentication_error"
            )
            await self._answer_error(Request(scope), error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return False
        # Compared as bytes, because UTF-8 bytes of a letter may look like white space.
        return hmac.compare_digest(given.strip(" \t").encode("latin-1"), self._key)
