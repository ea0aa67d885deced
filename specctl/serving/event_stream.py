"""Answers that are sent as they are written."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: a stream has many events
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: a JSON document each, and ``[DONE]`` at their end.

    Where the client goes away, the documents' generator is closed at once, whatever it or the client waited for.

    Args:
        documents: of the events.
        held: closed behind them.
    """

    def __init__(self, documents: AsyncIterator[dict[str, Any]], held: AsyncExitStack) -> None:
        super().__init__()
        self._documents, self._held = documents, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            writing = asyncio.ensure_future(self._write(send))
            gone = asyncio.ensure_future(disconnected(receive))
            try:
                await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not writing.done():
                    scope["log"]["gone"] = True
                    writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            finally:
                writing.cancel()
                gone.cancel()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async with aclosing(self._documents) as documents:  # type: ignore[type-var]
            async for document in documents:
                await self._send(send, f"data: {encoded(document)}\n\n")
        await self._send(send, "data: [DONE]\n\n", more=False)

    @staticmethod
    async def _send(send: Send, text: str, *, more: bool = True) -> None:
        # A lone surrogate in a prompt's echo has no bytes.
        await send({"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": more})
