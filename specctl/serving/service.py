"""Turns bodies into requests for texts, and passes the engine thread's events to the endpoints."""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from specctl.decoding.prompt_format import PromptFormat
from specctl.decoding.session import TextRequest
from specctl.errors import RecordError
from specctl.models.files.tokenizer import light
from specctl.models.running.grammars.grammar import Compiled, grammars_of, source_of
from specctl.profile.schema import SamplingTable, with_one_grammar
from specctl.record_settings import NAMES
from specctl.serving.answers import Spellings
from specctl.serving.request_body import ApiError, ChatBody, CompletionBody, TextBody
from specctl.serving.served import Served
from specctl.serving.text_thread import CLOSING, ClosedError, Event, Reports, TextThread, Ticket, Wrote

LOOK_SECONDS = 0.02  # Seconds between checks whether the models' thread has ended
GATHERED_SECONDS = 0.016
"""How long rounds after the first may wait to be reported: one frame of a screen. A round may take a millisecond, and
reporting it half as long.
"""
SETTINGS = [name for name in NAMES if name in SamplingTable.model_fields]
"""Keys of the sampling table with the same name in a body."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request."""

    body: int = 4 << 20  # bytes of a request's body
    tokens: int | None = None  # new tokens; None for as many as the context holds
    waiting: int = 256  # requests that may wait
    seconds: float = 600.0  # seconds until a request ends, waiting included
    body_seconds: float = 30.0  # seconds until its body has arrived


class Service:
    """Answers requests.

    Args:
        served: writes the texts.
        limits: limits of each request.

    Attributes:
        thread: runs the engine.
        failed: called once if the models fail.
        offer: a JSON document with the parameters beyond OpenAI's.
    """

    def __init__(self, served: Served, limits: Limits | None = None) -> None:
        self.served, self.limits, self.offer = served, limits or Limits(), served.facts.offer
        self.name: str = self.offer["model"]
        self.tokenizer, self.eos = light(served.tokenizer), served.facts.eos
        self.spellings = Spellings(self.tokenizer, self.eos)
        self.failed: Callable[[], None] = lambda: None
        self.thread = TextThread(served.engine, served.texts, self.limits.waiting, self._report, served.affinity)
        self._texts = PromptFormat(self.tokenizer, chat=False)
        self._chats = PromptFormat(self.tokenizer, chat=True, system=served.profile.prompt.system)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Future[None]  # done when no more texts are begun
        self._news = deque[tuple[Ticket, Event]]()
        self._looks = False  # whether the event loop will look for events
        self._reported_at = self._apart = 0.0  # the time of the last event, and the interval between the last two
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the engine's thread; call it in the event loop that answers requests."""
        self._loop = asyncio.get_running_loop()
        self._closing = self._loop.create_future()
        self.thread.start()

    async def drain(self) -> None:
        """Take no more requests, and wait until running texts are finished."""
        self.thread.close()
        if not self._closing.done():
            self._closing.set_result(None)
        # Polls instead of waiting in a thread, for which the event loop would wait after a second signal.
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.seconds):
                while self.thread.alive:
                    await asyncio.sleep(LOOK_SECONDS)

    @contextmanager
    def asked(self, ticket: Ticket) -> Iterator[None]:
        """Take a request; at the block's end its text is cancelled if unfinished.

        Raises:
            BusyError, ClosedError: it is not taken.
        """
        self.thread.submit(ticket)
        try:
            yield
        finally:
            self.thread.cancel(ticket)

    def request(self, body: TextBody) -> TextRequest:
        """Turn a body into a request for a text; raises ApiError if it cannot be fulfilled."""
        prompt, faults = self._read(body)
        if (fault := body.first(faults)) is not None:
            raise fault
        extras = body.specctl
        return TextRequest(tuple(prompt), self._settings(body), policy=extras.policy, draft=extras.draft)

    def faults(self, body: TextBody) -> list[ApiError]:
        """The errors with which `request` would reject a body."""
        return self._read(body)[1]

    def _read(self, body: TextBody) -> tuple[list[int], list[ApiError]]:
        """A body's prompt, and the errors of its other parameters."""
        faults = list(self._beyond(body))
        prompt: list[int] = []
        try:
            prompt = self._prompt(body)
            self.served.room(prompt)
        except ApiError as error:
            faults.append(error)
        except RecordError as error:
            code = "context_length_exceeded" if error.kind == "prompt_too_long" else error.kind
            param = "messages" if isinstance(body, ChatBody) else "prompt"
            faults.append(ApiError(400, error.message, param, code))
        return prompt, faults

    async def compiled(self, request: TextRequest, ended: asyncio.Future[Any]) -> Compiled | None:
        """Compile a request's grammar in advance, so that other texts do not wait for it.

        None without a grammar, and with replicas: here the grammar is only validated, each replica compiles its own.

        Args:
            request: the request to take.
            ended: done when the client has left or its time is up, which stops the compilation.

        Raises:
            RecordError: it cannot be compiled.
            ClosedError: no more texts are written.
            Exception: raised by `ended`.
        """
        if (source := source_of(request.settings)) is None:
            return None
        grammars = await asyncio.to_thread(grammars_of, self.served.tokenizer, self.eos)
        compiling = asyncio.wrap_future(grammars.compiling(source, here=self.served.workers is None))
        try:
            await asyncio.wait({compiling, ended, self._closing}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
            if not compiling.done():
                raise ClosedError(CLOSING)
            return compiling.result()
        finally:
            if not (compiling.cancel() or compiling.cancelled()):
                compiling.exception()  # read it, so that asyncio does not report it

    def _prompt(self, body: TextBody) -> list[int]:
        if isinstance(body, ChatBody):
            return self._chats.messages(body.messages)
        assert isinstance(body, CompletionBody)
        prompt: Any = body.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise ApiError(400, f"prompt has {len(prompt)} texts; send a request for each", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._texts.prompt(prompt)
        return list(prompt)

    def _beyond(self, body: TextBody) -> Iterator[ApiError]:
        """Errors about settings beyond this server's or its models' limits."""
        name, limit = body.limit
        most = self.limits.tokens
        if limit is not None and most is not None and limit > most:
            yield ApiError(400, f"{name} is {limit}, and this server writes {most} tokens at most", name)
        for key in body.logit_bias or ():
            if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < self.served.facts.vocabulary):
                yield ApiError(400, f"logit_bias: {key[:20]!r} is not the id of a token", "logit_bias")

    def _settings(self, body: TextBody) -> SamplingTable:
        _, limit = body.limit
        most = self.limits.tokens
        given = {key: getattr(body, key) for key in SETTINGS if hasattr(body, key)}
        given |= {"max_new_tokens": limit, "logprobs": body.likeliest}
        if body.response_format is not None and (schema := body.response_format.asked) is not None:
            given |= {"json_schema": schema}
        given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
        # Two clients with the same request get different texts.
        given["seed"] = secrets.randbits(63) if body.seed is None else body.seed % (1 << 63)
        update = with_one_grammar({key: value for key, value in given.items() if value is not None})
        own = self.served.profile.sampling.model_copy(update=update)
        return own if most is None else own.model_copy(update={"max_new_tokens": min(own.max_new_tokens, most)})

    def _report(self, reports: Reports) -> None:
        """Receive events in the engine's thread: a text's first round and its end are passed on at once, other rounds
        later.
        """
        now = monotonic()
        self._apart, self._reported_at = now - self._reported_at, now
        self._news.extend(reports)
        waits = self._looks and all(
            isinstance(event, Wrote) and ticket.reported > len(event.tokens) for ticket, event in reports
        )
        if not waits and self._loop is not None and not self._loop.is_closed():
            self._looks = True
            self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        """Pass on new events. While events are frequent, poll instead of waiting for the thread's call."""
        if self._next is not None:
            self._next.cancel()
        self._looks = False  # before the events are taken, so that no event is missed
        if self._hand_out() and self._apart < GATHERED_SECONDS:
            self._looks = True
            self._next = asyncio.get_running_loop().call_later(GATHERED_SECONDS, self._look)

    def _hand_out(self) -> bool:
        if not self._news:
            return False
        events: dict[Ticket, list[Event]] = {}
        while self._news:
            ticket, event = self._news.popleft()
            events.setdefault(ticket, []).append(event)
        for ticket, found in events.items():
            ticket.receive(found)
        if self.thread.died is not None:
            self.failed()
        return True
