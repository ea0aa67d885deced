"""How fast a server answers: streamed requests, so many of them at once, from one process."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specctl.benchmark.asked import Asked, Level
from specctl.prompts.suites import Suite
from specctl.record_settings import own_settings
from specctl.remote.api_settings import api_settings
from specctl.remote.chunks import AnswerError, Usage
from specctl.remote.server import Server

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The requests of one record: its turns one after the other, or only one.

    Attributes:
        prompt, category: of the record.
        turns: what the user says; empty where ``messages`` are all.
        messages: of a chat before the turns.
        chat: whether it goes through the server's chat template.
        settings: in the interface's words.
    """

    prompt: str
    category: str
    turns: tuple[str, ...]
    messages: tuple[dict[str, Any], ...]
    chat: bool
    settings: dict[str, Any]

    def body(self, answers: Sequence[str]) -> dict[str, Any]:
        """The request of the turn behind these answers."""
        said = [text for pair in zip(self.turns, [*answers, ""], strict=False) for text in pair]
        if self.chat:
            roles = ("user", "assistant")
            turns = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
            return {**self.settings, "messages": [*self.messages, *turns[: 2 * len(answers) + 1]]}
        text = said[0] if len(self.turns) == 1 else "\n".join(said[: 2 * len(answers) + 1]) + "\n"
        return {**self.settings, "prompt": text}


def dialogues(suite: Suite, settings: dict[str, Any], chat: bool | None) -> list[Dialogue]:
    """The requests of a suite.

    Args:
        suite: the records.
        settings: keys of the sampling table, for records that do not have their own.
        chat: whether prompts and turns go through the server's chat template; None: turns do.

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
    """Asks a server.

    Args:
        server: that answers.
        work: all requests of a level.
        heard: told of each that has ended; not of those that warm up.

    Attributes:
        levels: by concurrency, the one that runs last.
    """

    def __init__(self, server: Server, work: Sequence[Dialogue], heard: Callable[[Asked], None]) -> None:
        self._server, self._work, self._heard = server, work, heard
        self.levels: list[Level] = []

    def run(self, concurrency: int, warm_up: int) -> None:
        """Ask all, so many at once, after some that are not counted.

        Raises:
            AnswerError: one that warms up got no answer.
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

            def hear(asked: Asked) -> None:
                level.asked.append(asked)
                level.seconds = perf_counter() - began
                self._heard(asked)

            await self._ask_all(client, self._work, concurrency, hear)
            after = await self._server.drafted(client)
            level.drafted = _between(before, after)

    async def _ask_all(
        self, client: "httpx.AsyncClient", work: Sequence[Dialogue], concurrency: int, hear: Callable[[Asked], None]
    ) -> None:
        left = iter(work)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(work))):
                    group.create_task(self._ask_some(client, left, concurrency, hear))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _ask_some(
        self, client: "httpx.AsyncClient", left: Iterator[Dialogue], concurrency: int, hear: Callable[[Asked], None]
    ) -> None:
        for one in left:
            answers: list[str] = []
            for turn in range(max(1, len(one.turns))):
                asked = await self._ask(client, one, answers, concurrency, turn)
                hear(asked)
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
