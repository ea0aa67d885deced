"""Turns bodies into requests for texts, and passes what the engine's thread reports to the endpoints."""

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

LOOK_SECONDS = 0.02  # Between looks whether the models' thread has ended
GATHERED_SECONDS = 0.016
"""How long rounds after the first may wait, a frame of a screen: a round may take a millisecond, and reporting it half
as long."""
SETTINGS = [name for name in NAMES if name in SamplingTable.model_fields]
"""Of the sampling table that a body may have under the same name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    body: int = 4 << 20  # bytes of a request's body
    tokens: int | None = None  # new tokens; None for what the context holds
    waiting: int = 256  # requests that may wait
    seconds: float = 600.0  # until a request ends, waiting included
    body_seconds: float = 30.0  # until its body is there


class Service:
    """Answers requests.

    Args:
        served: writes the texts.
        limits: of requests.

    Attributes:
        thread: writes.
        failed: called once if the models fail.
        offer: a JSON document about what may be asked besides OpenAI's parameters.
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
        self._looks = False  # whether a look of the event loop is due
        self._reported_at = self._apart = 0.0  # when something happened last, and the time between the last two
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to write; in the event loop in which requests are answered."""
        self._loop = asyncio.get_running_loop()
        self._closing = self._loop.create_future()
        self.thread.start()

    async def drain(self) -> None:
        """Take no more requests, and wait until the texts that are being written are."""
        self.thread.close()
        if not self._closing.done():
            self._closing.set_result(None)
        # No thread waits: the event loop would wait for that thread when a second signal ends it.
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.seconds):
                while self.thread.alive:
                    await asyncio.sleep(LOOK_SECONDS)

    @contextmanager
    def asked(self, ticket: Ticket) -> Iterator[None]:
        """A request that is taken; after the block its text is not wanted any more.

        Raises:
            BusyError, ClosedError: it is not taken.
        """
        self.thread.submit(ticket)
        try:
            yield
        finally:
            self.thread.cancel(ticket)

    def request(self, body: TextBody) -> TextRequest:
        """What a request asks for.

        Raises:
            ApiError: it asks for what cannot be.
        """
        prompt, faults = self._read(body)
        if (fault := body.first(faults)) is not None:
            raise fault
        extras = body.specctl
        return TextRequest(tuple(prompt), self._settings(body), policy=extras.policy, draft=extras.draft)

    def faults(self, body: TextBody) -> list[ApiError]:
        """Why `request` would not take a body."""
        return self._read(body)[1]

    def _read(self, body: TextBody) -> tuple[list[int], list[ApiError]]:
        """The prompt of a body, and what it asks that cannot be."""
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
        """The grammar of a request, compiled before its turn, in which all other texts would wait for it.

        None without one, and where replicas write: they compile what is only tried here, each for its own texts.

        Args:
            request: that is to be taken.
            ended: done when the client has left or its time is up, which ends the compiling.

        Raises:
            RecordError: it cannot be compiled.
            ClosedError: no more texts are written.
            Exception: what `ended` raises.
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
        """Settings that this server or its models do not have."""
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
        """Called in the engine's thread: rounds wait for the next look; a text's first one and its end do not."""
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
        """Hand out what has happened; while that is often, look again soon instead of being called by the thread."""
        if self._next is not None:
            self._next.cancel()
        self._looks = False  # before the events are taken, so that none is left without a look
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
