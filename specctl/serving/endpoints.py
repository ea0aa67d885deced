"""What answers each path."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from specctl.models.running.rules.grammar import source_of
from specctl.nesting import too_deep
from specctl.records import Completion
from specctl.serving.answer_body import AnswerBody
from specctl.serving.answer_text import AnswerText, drafted_and_accepted
from specctl.serving.api_errors import ApiError, told
from specctl.serving.event_stream import EventStream, disconnected
from specctl.serving.http_manners import AccessLog, Hosts, Key
from specctl.serving.order import Event, Order, Wrote
from specctl.serving.page_files import page_routes
from specctl.serving.request_body import ChatBody, CompletionBody, TextBody, body_of
from specctl.serving.server_metrics import ServerMetrics
from specctl.serving.service import Service

Found = TypeVar("Found")
LONG = 1 << 16
"""Bytes of a body that takes long enough to tokenise that others are not to wait for it."""


class Gone(Exception):  # noqa: N818 - no error: nobody hears of it
    """The client has gone away."""


class Endpoints:
    """Answers requests.

    Args:
        service: writes texts.
        log_prompts: whether the access log has prompts and texts.
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
        one["max_model_len"] = self.service.pair.context
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
        async with AsyncExitStack() as stack:
            try:
                data, size = await json_body(request, self.service.limits.body, self.service.limits.body_seconds)
                body = body_of(kind, data)
                if size > LONG:
                    order = await asyncio.to_thread(self.service.order, body)
                else:
                    order = self.service.order(body)
                if source_of(order.settings) is not None:
                    await asyncio.to_thread(self.service.compile_grammar, order)
                if self._log_prompts:
                    log["request"] = data
                heard = await stack.enter_async_context(self.service.heard(order, every=bool(body.stream)))
                text = AnswerText(
                    self.service.pair.tokenizer, order.prompt, order.settings.stop, order.settings.logprobs is not None
                )
                answer = self._body(body, order)
                spent = time.monotonic() - began
                hearing = Hearing(heard, asyncio.get_running_loop().time() + self.service.limits.seconds - spent)
                stack.callback(hearing.close)
                if body.stream:
                    first = await wanted(request, hearing.next())
                    events = self._stream(answer, text, hearing, first, log, began)
                    return EventStream(events, stack.pop_all())
                completion = await wanted(request, hearing.completion(lambda: self.metrics.first(began)))
            except Exception as error:
                if isinstance(error, Gone):
                    log["gone"] = True
                    return Response(status_code=499)
                raise told(error) from error
            self._ended(completion, log, began)
            return JSONResponse(answer.whole(completion, text.end(completion)))

    def _body(self, body: TextBody, order: Order) -> AnswerBody:
        return AnswerBody(
            isinstance(body, ChatBody),
            self.service.name,
            len(order.prompt),
            self.service.spellings,
            logprobs=body.likeliest is not None,
            rounds=body.specctl.rounds,
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
        )

    async def _stream(
        self, answer: AnswerBody, text: AnswerText, hearing: "Hearing", event: Event, log: dict[str, Any], began: float
    ) -> AsyncIterator[dict[str, Any]]:
        self.metrics.first(began)
        if (begins := answer.first()) is not None:
            yield begins
        try:
            while not isinstance(event, Completion):
                assert isinstance(event, Wrote)
                if (chunk := answer.more(text.add(event), event.round)) is not None:
                    yield chunk
                event = await hearing.next()
        except Exception as error:
            log["error"] = told(error).message
            yield told(error).body
            return
        for chunk in answer.last(event, text.end(event)):
            yield chunk
        self._ended(event, log, began)

    def _ended(self, completion: Completion, log: dict[str, Any], began: float) -> None:
        drafted, accepted = drafted_and_accepted(completion.rounds)
        log |= {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.tokens),
            "drafted": drafted,
            "accepted": accepted,
            "finish_reason": completion.finish_reason.value,
        }
        if self._log_prompts:
            log["text"] = completion.text
        self.metrics.ended(completion, began)


class Hearing:
    """Takes what is heard of an order, until a time.

    Args:
        queue: of events.
        until: of the event loop's clock.
    """

    def __init__(self, queue: "asyncio.Queue[Event]", until: float) -> None:
        self._queue = queue
        late = ApiError(504, "the text took too long", code="timeout", kind="server_error")
        # One timer for the request: one for each event would cost more than what is sent.
        self._timer = asyncio.get_running_loop().call_at(until, queue.put_nowait, late)

    async def next(self) -> Event:
        """The next event; raises what went wrong."""
        event = await self._queue.get()
        if isinstance(event, Exception):
            raise event
        return event

    def close(self) -> None:
        """Nothing more is taken."""
        self._timer.cancel()

    async def completion(self, begun: Callable[[], None]) -> Completion:
        """The text when it has ended; ``begun`` is called with its first round."""
        event = await self.next()
        begun()
        while not isinstance(event, Completion):
            event = await self.next()
        return event


async def wanted(request: Request, work: Awaitable[Found]) -> Found:
    """What some work gives, as long as the client is there; raises Gone."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()


async def json_body(request: Request, most: int, seconds: float) -> tuple[Any, int]:
    """The JSON of a body and its size in bytes; raises ApiError if it is none, too large or too slow."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body is {kind[:100]!r}; send application/json")
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
        what = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", str(error))
        raise ApiError(400, f"the body is not JSON ({what})", code="invalid_json") from None
    return data, size


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number that JSON can hold")


def application(
    service: Service,
    *,
    key: str | None = None,
    cors: str | None = None,
    hosts: frozenset[str] | None = None,
    log: Callable[[dict[str, Any]], None] | None = None,
    log_prompts: bool = False,
) -> Starlette:
    """The application.

    Args:
        service: writes texts; it begins and ends with the application.
        key: that a client must have; None to ask for none.
        cors: the origin whose pages may ask; None for none.
        hosts: names by which clients may call the server; None for any.
        log: takes the line of each request; None for no access log.
        log_prompts: whether lines have prompts and texts.
    """
    endpoints = Endpoints(service, log_prompts=log_prompts)

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.thread.close()

    def told_to_client(_: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            known = ApiError(
                error.status_code, str(error.detail), code="not_found" if error.status_code == 404 else None
            )
        else:
            known = told(error)
        headers = {**known.headers, **(getattr(error, "headers", None) or {})}
        return JSONResponse(known.body, known.status, headers)

    middleware = [Middleware(AccessLog, log=log, metrics=endpoints.metrics)]
    middleware.append(Middleware(Hosts, names=hosts, told=told_to_client))
    if cors is not None:
        middleware.append(Middleware(CORSMiddleware, allow_origins=[cors], allow_methods=["*"], allow_headers=["*"]))
    middleware.append(Middleware(Key, key=key, told=told_to_client))
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
        exception_handlers={ApiError: told_to_client, HTTPException: told_to_client},
        lifespan=running,
    )
