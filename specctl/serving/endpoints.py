"""What answers each path."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from specctl.decoding.session import TextRequest
from specctl.serving.answer_body import AnswerBody
from specctl.serving.answer_text import AnswerText
from specctl.serving.api_errors import ApiError, told
from specctl.serving.event_stream import EventStream
from specctl.serving.hearing import Gone, RequestWaiter
from specctl.serving.http_manners import AccessLog, Hosts, Key
from specctl.serving.json_body import json_body
from specctl.serving.page_files import page_routes
from specctl.serving.request_body import ChatBody, CompletionBody, TextBody, body_of
from specctl.serving.server_metrics import ServerMetrics
from specctl.serving.service import Service
from specctl.serving.text_thread import Ended, Ticket

LONG = 1 << 16
"""Bytes of a body that takes long enough to tokenise that others are not to wait for it."""


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
                    self.service.pair.eos,
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
                ticket = Ticket(wanted, waiter.hear, every=stream is not None)
                ticket.grammar = await self.service.compiled(wanted, waiter.ended)
                stack.enter_context(self.service.asked(ticket))
                if stream is not None:
                    await waiter.begun
                    if waiter.ended.done():
                        waiter.ended.result()  # raises what became of it before it had begun
                    stream.hold(waiter, stack.pop_all())
                    return stream
                found = await waiter.ended
            except Gone:
                log["gone"] = True
                return Response(status_code=499)
            except Exception as error:
                raise told(error) from error
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
