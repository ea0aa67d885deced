"""The handlers of each path: they answer as a whole, or with events while the text is written."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specctl.decoding.session import TextRequest
from specctl.errors import json_fault, too_deep
from specctl.serving.answers import AnswerBody, AnswerText, encoded
from specctl.serving.listening import WIRE
from specctl.serving.middleware import AccessLog, Hosts, Key, ServerMetrics, page_routes
from specctl.serving.request_body import ApiError, ChatBody, CompletionBody, TextBody, api_error_of, body_of, timed_out
from specctl.serving.service import Service
from specctl.serving.text_thread import Ended, Event, Ticket, Wrote

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class Gone(Exception):  # noqa: N818 - not an error: the client has left
    """The client has gone away."""


class RequestWaiter:
    """Waits for a request's text. Unless rounds are streamed, the event loop does no work until the text ends.

    Args:
        receive: the request's ASGI ``receive``; its body has been read.
        seconds: until the request times out.
        rounds: called with rounds that arrive together, and whether the end arrived too.

    Attributes:
        begun: done when a round or the end has arrived.
        ended: a future of the text, which raises any error, such as `Gone`.
    """

    def __init__(
        self, receive: Receive, seconds: float, rounds: Callable[[Sequence[Wrote], bool], None] = lambda *_: None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._rounds = rounds
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[Ended] = loop.create_future()
        self._timer = loop.call_later(seconds, self.receive, [timed_out()])
        self._watching = loop.create_task(self._watch(receive))

    def receive(self, events: Sequence[Event]) -> None:
        """Receive events of the text; events after its end are dropped."""
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
        """Stop waiting."""
        self._timer.cancel()
        self._watching.cancel()
        if not (self.ended.cancel() or self.ended.cancelled()):
            self.ended.exception()  # read it, so that asyncio does not report it

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.receive([Gone()])


class EventStream(Response):
    """Server-sent events: a JSON document each, and ``[DONE]`` at their end.

    Rounds that arrive together form one document. If the connection allows it, the document is written at once without
    waking a task. Rounds that arrive with the end are sent with it.

    Args:
        answer: builds the documents.
        text: turns rounds into pieces.
        ended: called with the finished text.
    """

    def __init__(self, answer: AnswerBody, text: AnswerText, ended: Callable[[Ended], None]) -> None:
        super().__init__()
        self._answer, self._text, self._ended = answer, text, ended
        self._unsent: list[str] = [] if (begins := answer.first()) is None else [encoded(begins)]
        self._write: Callable[[bytes], None] | None = None
        self._more = asyncio.Event()

    def rounds(self, wrote: Sequence[Wrote], ended: bool) -> None:
        """Send the text of new rounds."""
        if (document := self._answer.more(self._text.add(wrote))) is not None:
            self._unsent.append(document)
            if self._write is None:
                self._more.set()
            elif not ended:
                self._write(self._taken())

    def hold(self, waiter: RequestWaiter, held: ExitStack) -> None:
        """Store the waiter of the text, and the context to close after the stream."""
        self._waiter, self._held = waiter, held
        waiter.ended.add_done_callback(lambda _: self._more.set())

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
                log["error"] = api_error_of(error).message
                documents = [api_error_of(error).body]
            self._unsent += [*map(encoded, documents), "[DONE]"]
            await send({"type": "http.response.body", "body": self._taken()})

    async def _until_the_end(self, send: Send) -> Ended:
        if self._write is not None:
            if self._unsent:
                self._write(self._taken())
            return await self._waiter.ended
        while True:
            if self._unsent:
                await send({"type": "http.response.body", "body": self._taken(), "more_body": True})
            elif self._waiter.ended.done():
                return self._waiter.ended.result()
            else:
                self._more.clear()
                await self._more.wait()

    def _taken(self) -> bytes:
        """The events that were not sent yet."""
        unsent, self._unsent = self._unsent, []
        # A lone surrogate in a prompt's echo has no bytes.
        return "".join([f"data: {document}\n\n" for document in unsent]).encode("utf-8", "replace")


async def json_body(request: Request, most: int, seconds: float) -> tuple[Any, int]:
    """Read a JSON body and its size in bytes; raises ApiError if it is not JSON, too large or too slow."""
    # Browsers let any page send a body with a plain type, or none, without a CORS preflight.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        given = f"is {kind[:100]!r}" if kind else "has no content-type"
        raise ApiError(415, f"the body {given}; send application/json")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise ApiError(413, f"the body has more than {most} bytes", code="body_too_large")
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="timeout") from None
    try:
        data = json.loads(b"".join(parts), parse_constant=_no_number)
        if too_deep(data):
            raise RecursionError
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({json_fault(error)})", code="invalid_json") from None
    return data, size


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number that JSON can hold")


LONG = 1 << 16  # Larger bodies, in bytes, are tokenised in a thread so that other requests do not wait


class Endpoints:
    """Answers requests.

    Args:
        service: writes texts.
        log_prompts: whether the access log contains prompts and texts.
    """

    def __init__(self, service: Service, *, log_prompts: bool = False) -> None:
        self.service, self._log_prompts = service, log_prompts
        self.metrics = ServerMetrics(service.thread)
        self._began = int(time.time())

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody)

    async def models(self, request: Request) -> Response:
        one = {"id": self.service.name, "object": "model", "created": self._began, "owned_by": "specctl"}
        one["max_model_len"] = self.service.served.facts.context
        asked = request.path_params.get("name")
        if asked is None:
            return JSONResponse({"object": "list", "data": [one]})
        if asked != self.service.name:
            raise ApiError(404, f"there is no model {asked!r} here", "model", "model_not_found")
        return JSONResponse(one)

    async def offer(self, _: Request) -> Response:
        return JSONResponse(self.service.offer)

    async def health(self, _: Request) -> Response:
        if self.service.thread.closing:
            return JSONResponse({"status": "closing"}, 503)
        return JSONResponse({"status": "ok"})

    async def figures(self, _: Request) -> Response:
        return Response(self.metrics.page(), media_type=self.metrics.MEDIA_TYPE)

    async def _answer(self, request: Request, kind: type[TextBody]) -> Response:
        began = time.monotonic()
        log = request.scope["log"]
        with ExitStack() as stack:
            try:
                data, size = await json_body(request, self.service.limits.body, self.service.limits.body_seconds)
                if size > LONG:
                    body, wanted = await asyncio.to_thread(self._read, kind, data)
                else:
                    body, wanted = self._read(kind, data)
                if self._log_prompts:
                    log["request"] = data
                text = AnswerText(
                    self.service.tokenizer,
                    wanted.prompt,
                    wanted.settings.stop,
                    self.service.eos,
                    logprobs=wanted.settings.logprobs is not None,
                    rounds=body.specctl.rounds,
                )
                answer = self._body(body)

                def ended(found: Ended) -> None:
                    self._ended(found, log, began)

                stream = EventStream(answer, text, ended) if body.stream else None
                left = self.service.limits.seconds - (time.monotonic() - began)
                if stream is not None:
                    waiter = RequestWaiter(request.receive, left, stream.rounds)
                else:
                    waiter = RequestWaiter(request.receive, left)
                stack.callback(waiter.close)
                ticket = Ticket(wanted, waiter.receive, every=stream is not None)
                ticket.grammar = await self.service.compiled(wanted, waiter.ended)
                stack.enter_context(self.service.asked(ticket))
                if stream is not None:
                    await waiter.begun
                    if waiter.ended.done():
                        waiter.ended.result()  # raises an error from before its first round
                    stream.hold(waiter, stack.pop_all())
                    return stream
                found = await waiter.ended
            except Gone:
                log["gone"] = True
                return Response(status_code=499)
            except Exception as error:
                raise api_error_of(error) from error
            ended(found)
            return JSONResponse(answer.whole(found, text.end(found.completion)))

    def _read(self, kind: type[TextBody], data: Any) -> tuple[TextBody, TextRequest]:
        body = body_of(kind, data, self.service.name, self.service.faults)
        return body, self.service.request(body)

    def _body(self, body: TextBody) -> AnswerBody:
        return AnswerBody(
            isinstance(body, ChatBody),
            self.service.name,
            self.service.spellings,
            logprobs=body.likeliest is not None,
            rounds=body.specctl.rounds,
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
        )

    def _ended(self, found: Ended, log: dict[str, Any], began: float) -> None:
        completion = found.completion
        drafted, accepted = found.drafted_and_accepted
        log |= {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.tokens),
            "drafted": drafted,
            "accepted": accepted,
            "finish_reason": completion.finish_reason.value,
        }
        if self._log_prompts:
            log["text"] = completion.text
        self.metrics.ended(found, began)


def application(
    service: Service,
    *,
    key: str | None = None,
    cors: str | None = None,
    hosts: frozenset[str] | None = None,
    log: Callable[[dict[str, Any]], None] | None = None,
    log_prompts: bool = False,
) -> Starlette:
    """The ASGI application.

    Args:
        service: writes texts; started and stopped with the application.
        key: the API key that clients must send; None for no key.
        cors: the origin whose pages may send requests; None for none.
        hosts: host names by which clients may call the server; None for any.
        log: receives a line for each request; None for no access log.
        log_prompts: whether these lines contain prompts and texts.
    """
    endpoints = Endpoints(service, log_prompts=log_prompts)

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.thread.close()

    def error_response(_: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            known = ApiError(
                error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else None
            )
        else:
            known = api_error_of(error)
        headers = {**known.headers, **(getattr(error, "headers", None) or {})}
        return JSONResponse(known.body, known.status, headers)

    middleware = [Middleware(AccessLog, log=log, metrics=endpoints.metrics)]
    middleware.append(Middleware(Hosts, names=hosts, answer_error=error_response))
    if cors is not None:
        middleware.append(Middleware(CORSMiddleware, allow_origins=[cors], allow_methods=["*"], allow_headers=["*"]))
    middleware.append(Middleware(Key, key=key, answer_error=error_response))
    return Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.models),
            Route("/v1/specctl", endpoints.offer),
            Route("/health", endpoints.health),
            Route("/metrics", endpoints.figures),
            *page_routes(),
        ],
        middleware=middleware,
        exception_handlers={ApiError: error_response, HTTPException: error_response},
        lifespan=running,
    )
