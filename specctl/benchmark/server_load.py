"""Load test of a running server: requests at several concurrencies, their latencies, and tables of both."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specctl.benchmark.report import latency_table
from specctl.benchmark.summaries import Latency, latency
from specctl.files import Content, LineFormat
from specctl.printable import counted
from specctl.prompts.suites import Suite
from specctl.record_settings import own_settings
from specctl.remote import AnswerError, Server, Usage, api_settings
from specctl.reporting.table import DEFINITIONS, Columns, Table

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHeader:
    """The first line of a file of requests."""

    created: str  # when the run began, in ISO 8601
    # url, model: of the server
    url: str
    model: str
    concurrency: list[int]  # of the levels
    suite: dict[str, Any]  # name, sha256 of the prompts and their number
    settings: dict[str, Any]  # sent with each request, unless its record says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that has ended; times in milliseconds from when it was sent."""

    concurrency: int  # number of concurrent requests
    # prompt, category: of the record
    prompt: str
    category: str
    turn: int = 0  # of the record, from 0
    text: str = ""  # that came
    tokens: int = 0  # of the text, as the server reports, else the number of pieces
    counted: bool = False  # whether pieces were counted, because the server does not report tokens
    finish_reason: str | None = None  # why the text ended
    arrivals_ms: tuple[float, ...] = ()  # when pieces with text came
    end_ms: float = 0.0  # when it ended
    # prompt_tokens, accepted, rejected: as the server reports; None where it does not
    prompt_tokens: int | None = None
    accepted: int | None = None
    rejected: int | None = None
    error: str | None = None  # the kind of failure; None for a whole answer
    message: str = ""  # the error message

    @property
    def first_token_ms(self) -> float:
        return self.arrivals_ms[0] if self.arrivals_ms else self.end_ms

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first piece; None for a single token or piece."""
        several = self.tokens > 1 and len(self.arrivals_ms) > 1
        return (self.arrivals_ms[-1] - self.arrivals_ms[0]) / (self.tokens - 1) if several else None

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in pairwise(self.arrivals_ms))


LOAD = LineFormat(Content.LOAD, LoadHeader, {"request": Asked})  # A file of requests


@dataclass(slots=True)
class Level:
    """The requests at one concurrency."""

    concurrency: int  # requests at once
    asked: list[Asked] = field(default_factory=list)  # those that have ended
    seconds: float = 0.0  # wall time of all of them
    drafted: Usage | None = None  # tokens drafted in this time, by the server's metrics

    @property
    def answered(self) -> list[Asked]:
        return [one for one in self.asked if one.error is None]

    @property
    def failures(self) -> dict[str, int]:
        """The number of failed requests, by kind."""
        kinds = [one.error for one in self.asked if one.error is not None]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.answered)

    @property
    def counted(self) -> bool:
        """Whether stream pieces were counted in place of tokens."""
        return any(one.counted for one in self.answered)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def requests_per_second(self) -> float:
        return len(self.answered) / self.seconds if self.seconds else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """The share of drafted tokens, by the answers, else by the server's metrics; None if unknown."""
        told = [(one.accepted, one.rejected or 0) for one in self.answered if one.accepted is not None]
        if not told and self.drafted is not None and self.drafted.accepted is not None:
            told = [(self.drafted.accepted, self.drafted.rejected or 0)]
        accepted, rejected = sum(one for one, _ in told), sum(one for _, one in told)
        return accepted / (accepted + rejected) if accepted + rejected else None

    @property
    def latency(self) -> Latency:
        return latency(self.answered)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The requests of one record: its turns one after the other, or only one."""

    # prompt, category: of the record
    prompt: str
    category: str
    turns: tuple[str, ...]  # what the user says; empty where ``messages`` are all
    messages: tuple[dict[str, Any], ...]  # of a chat before the turns
    chat: bool  # whether the server applies its chat template
    settings: dict[str, Any]  # with the field names of the API

    def body(self, answers: Sequence[str]) -> dict[str, Any]:
        """The request of the turn after these answers."""
        said = [text for pair in zip(self.turns, [*answers, ""], strict=False) for text in pair]
        if self.chat:
            roles = ("user", "assistant")
            turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
            return {**self.settings, "messages": [*self.messages, *turns[: 2 * len(answers) + 1]]}
        text = said[0] if len(self.turns) == 1 else "\n".join(said[: 2 * len(answers) + 1]) + "\n"
        return {**self.settings, "prompt": text}


def dialogues(suite: Suite, settings: dict[str, Any], chat: bool | None) -> list[Dialogue]:
    """The requests of a suite; ``chat`` says whether prompts go through the chat template. With None only turns do.

    Raises:
        UsageError: a record has a setting that no request can have.
    """
    found = []
    for one in suite.prompts:
        data = one.data
        own = {key: value for key, (_, value) in own_settings(data).items()}
        through = "messages" in data or (chat if chat is not None else "turns" in data)
        turns = tuple(data.get("turns") or ([data["prompt"]] if "prompt" in data else []))
        merged = api_settings({**settings, **own}, chat=through)
        found.append(Dialogue(one.id, one.category, turns, tuple(data.get("messages", ())), through, merged))
    return found


class ServerLoad:
    """Sends the requests of a load test to a server.

    Attributes:
        levels: by concurrency, the one that runs last.
    """

    def __init__(self, server: Server, work: Sequence[Dialogue], on_end: Callable[[Asked], None]) -> None:
        self._server, self._work, self._on_end = server, work, on_end
        self.levels: list[Level] = []

    def run(self, concurrency: int, warm_up: int) -> None:
        """Send all requests, ``concurrency`` at once, after some warm-up requests.

        Raises:
            AnswerError: a warm-up request failed.
        """
        asyncio.run(self._level(concurrency, warm_up))

    async def _level(self, concurrency: int, warm_up: int) -> None:
        import httpx

        async with httpx.AsyncClient(**self._server.settings) as client:
            first = [self._work[number % len(self._work)] for number in range(warm_up)]
            await self._ask_all(client, first, concurrency, _require)
            level = Level(concurrency)
            self.levels.append(level)
            before = await self._server.drafted(client)
            began = perf_counter()

            def count(asked: Asked) -> None:
                level.asked.append(asked)
                level.seconds = perf_counter() - began
                self._on_end(asked)

            await self._ask_all(client, self._work, concurrency, count)
            after = await self._server.drafted(client)
            level.drafted = _between(before, after)

    async def _ask_all(
        self, client: "httpx.AsyncClient", work: Sequence[Dialogue], concurrency: int, count: Callable[[Asked], None]
    ) -> None:
        left = iter(work)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(work))):
                    group.create_task(self._ask_some(client, left, concurrency, count))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _ask_some(
        self, client: "httpx.AsyncClient", left: Iterator[Dialogue], concurrency: int, count: Callable[[Asked], None]
    ) -> None:
        for one in left:
            answers: list[str] = []
            for turn in range(max(1, len(one.turns))):
                asked = await self._ask(client, one, answers, concurrency, turn)
                count(asked)
                if asked.error is not None:
                    break
                answers.append(asked.text)

    async def _ask(
        self, client: "httpx.AsyncClient", one: Dialogue, answers: list[str], concurrency: int, turn: int
    ) -> Asked:
        texts: list[str] = []
        arrivals: list[float] = []
        usage, reason = Usage(), None
        error: AnswerError | None = None
        body = one.body(answers)
        began = perf_counter()
        try:
            async for chunk in self._server.stream_async(client, body):
                if chunk.text:
                    arrivals.append((perf_counter() - began) * 1e3)
                    texts.append(chunk.text)
                reason = chunk.finish_reason or reason
                usage = chunk.usage or usage
        except AnswerError as found:
            error = found
        return Asked(
            concurrency=concurrency,
            prompt=one.prompt,
            category=one.category,
            turn=turn,
            text="".join(texts),
            tokens=len(texts) if usage.completion is None else usage.completion,
            counted=usage.completion is None,
            finish_reason=reason,
            arrivals_ms=tuple(round(at, 3) for at in arrivals),
            end_ms=round((perf_counter() - began) * 1e3, 3),
            prompt_tokens=usage.prompt,
            accepted=usage.accepted,
            rejected=usage.rejected,
            error=None if error is None else error.kind,
            message="" if error is None else error.message,
        )


def _require(asked: Asked) -> None:
    if asked.error is not None:
        raise AnswerError(asked.error, f"{asked.message} (prompt {asked.prompt})")


def _between(before: Usage | None, after: Usage | None) -> Usage | None:
    if before is None or after is None:
        return None
    counts = (before.accepted or 0, after.accepted or 0), (before.rejected or 0, after.rejected or 0)
    accepted, rejected = (later - earlier for earlier, later in counts)
    return Usage(accepted=accepted, rejected=rejected)


def load_tables(header: LoadHeader, levels: Sequence[Level], missing: int) -> list[Table]:
    """Speed and latency by concurrency; ``missing`` is the number of requests that an interrupt prevented."""
    columns: Columns[Level] = {
        "concurrency": lambda one: one.concurrency,
        "requests": lambda one: len(one.answered),
        "failed": lambda one: len(one.asked) - len(one.answered),
        "requests/s": lambda one: one.requests_per_second,
        "tokens/s": lambda one: one.tokens_per_second,
        "acceptance rate": lambda one: one.acceptance_rate,
    }
    note = f"{header.model} at {header.url}. {DEFINITIONS}"
    if any(level.counted for level in levels):
        note += " The server does not count tokens: pieces of its streams were counted."
    if missing:
        note += f" Interrupted: {counted(missing, 'request')} without a whole answer."
    failures = [
        f"{count} at concurrency {level.concurrency}: {next(one.message for one in level.asked if one.error == kind)}"
        for level in levels
        for kind, count in level.failures.items()
    ]
    found = [
        Table.of("Speed", columns, levels, note=note),
        latency_table("concurrency", {str(level.concurrency): level.latency for level in levels}),
    ]
    if failures:
        found.append(Table("Failed requests", (), (), note="\n".join(failures), alarm=True))
    return found


def load_json(header: LoadHeader, levels: Sequence[Level], missing: int) -> dict[str, Any]:
    """The numbers of `load_tables` as one document."""
    return {**asdict(header), "missing": missing, "levels": [_level(level) for level in levels]}


def _level(level: Level) -> dict[str, Any]:
    latency = level.latency
    shown = {key: getattr(latency, key) for key in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")}
    return {
        "concurrency": level.concurrency,
        "requests": len(level.answered),
        "failed": level.failures,
        "seconds": level.seconds,
        "tokens": level.tokens,
        "tokens_counted_by": "pieces" if level.counted else "server",
        "requests_per_second": level.requests_per_second,
        "tokens_per_second": level.tokens_per_second,
        "acceptance_rate": level.acceptance_rate,
        **{key: value and value._asdict() for key, value in shown.items()},
    }
