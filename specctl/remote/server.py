"""A server: where it is, which model is asked, and its connection."""

import re
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specctl.errors import SpecctlError, UsageError, pip_install
from specctl.remote.chunks import AnswerError, Chunk, Usage, chunk_of, refusal

if TYPE_CHECKING:
    import httpx

SECONDS = 600.0
"""How long a server may be silent."""
CONNECT_SECONDS = 10.0
_DRAFTED = {
    'specctl_draft_tokens_total{outcome="accepted"}': "accepted",
    'specctl_draft_tokens_total{outcome="rejected"}': "rejected",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
}
"""Counters of drafted tokens: this server's and vLLM's."""
_LINE = re.compile(r"^([^\s{]+)(\{[^}]*\})?\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers.

    Attributes:
        url: where its paths begin, mostly with ``/v1`` at the end.
        key: sent with every request; None for none.
        model: that is asked.
        owner: whose server it says to be; ``specctl`` is ours.
    """

    url: str
    key: str | None
    model: str
    owner: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """What a client of httpx is made with."""
        return _settings(self.url, self.key)

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        """What httpx's ``stream`` takes for a streamed answer to ``body``, a prompt or messages with settings."""
        path = "/chat/completions" if "messages" in body else "/completions"
        more = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        return {"method": "POST", "url": path, "json": {**body, **more}}

    def stream(self, client: "httpx.Client", body: dict[str, Any]) -> Generator[Chunk, None, None]:
        """The pieces of an answer as they come.

        Raises:
            AnswerError: the server gives none, or no whole one.
        """
        with told_of_http(), client.stream(**self.request(body)) as answer:
            if answer.status_code != 200:
                raise refusal(answer.status_code, answer.read())
            ended = Ended()
            for line in answer.iter_lines():
                if (chunk := ended.see(line)) is not None:
                    yield chunk
            ended.check()

    async def stream_async(self, client: "httpx.AsyncClient", body: dict[str, Any]) -> AsyncIterator[Chunk]:
        """As `stream`."""
        with told_of_http():
            async with client.stream(**self.request(body)) as answer:
                if answer.status_code != 200:
                    raise refusal(answer.status_code, await answer.aread())
                ended = Ended()
                async for line in answer.aiter_lines():
                    if (chunk := ended.see(line)) is not None:
                        yield chunk
                ended.check()

    async def drafted(self, client: "httpx.AsyncClient") -> Usage | None:
        """How many tokens it has drafted since it began, as its ``/metrics`` say; None where they do not."""
        import httpx

        parts = urlsplit(self.url)
        where = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}/metrics"
        try:
            answer = await client.get(where)
        except httpx.HTTPError:
            return None
        return drafted_of(answer.text) if answer.status_code == 200 else None


class Ended:
    """Takes the lines of a stream and knows whether it is whole."""

    def __init__(self) -> None:
        self._whole = False

    def see(self, line: str) -> Chunk | None:
        chunk = chunk_of(line)
        self._whole |= line[5:].strip() == "[DONE]" or (chunk is not None and chunk.finish_reason is not None)
        return chunk

    def check(self) -> None:
        """Raise AnswerError where the stream ended before its text."""
        if not self._whole:
            raise AnswerError("broken_stream", "the stream ended in the middle of the text")


@contextmanager
def told_of_http() -> Iterator[None]:
    """Raise errors of httpx as AnswerError."""
    import httpx

    try:
        yield
    except httpx.TimeoutException as error:
        raise AnswerError("timeout", f"the server took too long ({type(error).__name__})") from error
    except (httpx.ConnectError, httpx.UnsupportedProtocol) as error:
        raise AnswerError(
            "unreachable", f"no server answers: {error}", "is it running, and is that its URL?"
        ) from error
    except httpx.HTTPError as error:
        said = str(error) or type(error).__name__
        raise AnswerError("broken_stream", f"the connection ended in the middle of an answer: {said}") from error


def connected(url: str, key: str | None, model: str | None) -> Server:
    """A server whose models are known.

    Args:
        url: as the user gave it; ``/v1`` may be left out.
        key: of the server, if it needs one.
        model: that is asked; None for the only one.

    Raises:
        UsageError: httpx is missing, the URL is none, or the server has several models, or none of this name.
        SpecctlError: the server does not answer.
    """
    if find_spec("httpx") is None:
        raise UsageError("--url needs httpx, which is not installed", pip_install("httpx"))
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fine = False
    if not fine:
        raise UsageError(f"--url {url} is no URL of a server", "e.g. --url http://127.0.0.1:8000/v1")
    base = url.rstrip("/")
    if parts.path in ("", "/"):
        base += "/v1"
    found = _models(base, key)
    names = [str(one["id"]) for one in found]
    if model is None and len(names) != 1:
        raise UsageError(
            f"{base} has {len(names)} models{': ' if names else ''}{', '.join(names[:8])}", "choose with --model"
        )
    if model is not None and model not in names:
        raise UsageError(f"{base} has no model {model!r}, only {', '.join(names[:8])}")
    number = 0 if model is None else names.index(model)
    return Server(base, key, names[number], str(found[number].get("owned_by", "")))


def _models(base: str, key: str | None) -> list[dict[str, Any]]:
    import httpx

    with told_of_http(), httpx.Client(**_settings(base, key)) as client:
        answer = client.get("/models")
    if answer.status_code != 200:
        raise refusal(answer.status_code, answer.content)
    try:
        return [one for one in answer.json()["data"] if one["id"]]
    except (ValueError, TypeError, KeyError):
        raise SpecctlError(
            f"{base}/models is not a list of models", "is that the URL of a server for OpenAI's clients?"
        ) from None


def _settings(base: str, key: str | None) -> dict[str, Any]:
    import httpx

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(SECONDS, connect=CONNECT_SECONDS)
    return {"base_url": base, "headers": headers, "timeout": timeout, "limits": limits}


def drafted_of(page: str) -> Usage | None:
    """The counters of drafted tokens on a page for Prometheus; None where it has none."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        name, labels, value = match.groups()
        counted = _DRAFTED.get(f"{name}{labels}") or _DRAFTED.get(name)
        if counted is not None:
            found[counted] = found.get(counted, 0.0) + float(value)
    if "accepted" not in found:
        return None
    rejected = found.get("rejected", found.get("drafted", found["accepted"]) - found["accepted"])
    return Usage(accepted=round(found["accepted"]), rejected=round(rejected))
