"""Answers that are sent as they are written."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specctl.serving.answer_body import AnswerBody, encoded
from specctl.serving.answer_text import AnswerText
from specctl.serving.api_errors import told
from specctl.serving.connection import WIRE
from specctl.serving.hearing import Gone, RequestWaiter
from specctl.serving.text_thread import Ended, Wrote

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class EventStream(Response):
    """Server-sent events: a JSON document each, and ``[DONE]`` at their end.

    Rounds that are heard of at once are one document. It is sent where they are heard of, without a task that wakes for
    each, if the connection takes it so; those that are heard of with the end are sent with it.

    Args:
        answer: makes documents.
        text: makes their pieces.
        ended: called with a text that has ended.
    """

    def __init__(self, answer: AnswerBody, text: AnswerText, ended: Callable[[Ended], None]) -> None:
        super().__init__()
        self._answer, self._text, self._ended = answer, text, ended
        self._unsent: list[str] = [] if (begins := answer.first()) is None else [encoded(begins)]
        self._write: Callable[[bytes], None] | None = None
        self._more = asyncio.Event()

    def rounds(self, heard: Sequence[Wrote], ended: bool) -> None:
        """Send what rounds add."""
        if (document := self._answer.more(self._text.add(heard))) is not None:
            self._unsent.append(document)
            if self._write is None:
                self._more.set()
            elif not ended:
                self._write(self._taken())

    def hold(self, hearing: RequestWaiter, held: ExitStack) -> None:
        """What is heard, and what is closed behind the stream."""
        self._hearing, self._held = hearing, held
        hearing.ended.add_done_callback(lambda _: self._more.set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - `RequestWaiter` receives
        log = scope["log"]
        with self._held:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                self._write = scope.get(WIRE)
                ended = await self._until_the_end(send)
                documents: Iterable[Any] = self._answer.last(ended, self._text.end(ended.completion))
                self._ended(ended)
            except Gone:
                log["gone"] = True
                return
            except Exception as error:
                log["error"] = told(error).message
                documents = [told(error).body]
            self._unsent += [*map(encoded, documents), "[DONE]"]
            await send({"type": "http.response.body", "body": self._taken()})

    async def _until_the_end(self, send: Send) -> Ended:
        if self._write is not None:
            if self._unsent:
                self._write(self._taken())
            return await self._hearing.ended
        while True:
            if self._unsent:
                await send({"type": "http.response.body", "body": self._taken(), "more_body": True})
            elif self._hearing.ended.done():
                return self._hearing.ended.result()
            else:
                self._more.clear()
                await self._more.wait()

    def _taken(self) -> bytes:
        """The events that were not sent yet."""
        unsent, self._unsent = self._unsent, []
        # A lone surrogate in a prompt's echo has no bytes.
        return "".join([f"data: {document}\n\n" for document in unsent]).encode("utf-8", "replace")
