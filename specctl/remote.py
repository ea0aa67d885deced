"""A client of servers that speak OpenAI's interface: requests, streamed answers, and errors."""

import json
import re
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specctl.errors import SpecctlError, UsageError, pip_install

if TYPE_CHECKING:
    import httpx

SHOWN = 300  # The most characters of a server's text that a message shows


class AnswerError(SpecctlError):
    """A request that got no whole answer.

    Args:
        kind: a stable identifier for programs, such as ``http_500``, ``unreachable``, ``broken_stream`` or ``timeout``.
        message: what happened.
        hint: how to fix it.
    """

    def __init__(self, kind: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; None where the server does not report them."""

    # prompt, completion: tokens
    prompt: int | None = None
    completion: int | None = None
    # accepted, rejected: drafted tokens
    accepted: int | None = None
    rejected: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a streamed answer."""

    text: str = ""  # that it adds; empty where it carries something else
    finish_reason: str | None = None  # of the piece that ends the text
    usage: Usage | None = None  # of the piece that reports it


def chunk_of(line: str) -> Chunk | None:
    """The piece that a line of a stream holds; None for a line without one.

    Raises:
        AnswerError: it reports an error, or is not valid JSON.
    """
    if not line.startswith("data:"):
        return None
    data = line[5:].strip()
    if data == "[DONE]":
        return None
    try:
        document = json.loads(data)
        if "error" in document:
            raise AnswerError("error", f"the server ended the text: {words_of(document)}")
        choice: dict[str, Any] = next(iter(document.get("choices") or ()), {})
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        return Chunk(str(text), choice.get("finish_reason"), _usage(document))
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise AnswerError(
            "broken_stream", f"the stream holds something that is not a piece of a text: {data[:SHOWN]!r}"
        ) from None


def _usage(document: dict[str, Any]) -> Usage | None:
    usage, timings = document.get("usage"), document.get("timings")
    if not usage and not timings:
        return None
    usage = usage or {}
    details = usage.get("completion_tokens_details") or {}
    accepted, rejected = details.get("accepted_prediction_tokens"), details.get("rejected_prediction_tokens")
    if timings and accepted is None and "draft_n" in timings:  # llama.cpp's
        accepted = timings.get("draft_n_accepted", 0)
        rejected = timings["draft_n"] - accepted
    return Usage(usage.get("prompt_tokens"), usage.get("completion_tokens"), accepted, rejected)


def words_of(document: Any) -> str:
    """The message of an error document."""
    error = document.get("error", document) if isinstance(document, dict) else document
    said = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(said).split())[:SHOWN]


def refusal(status: int, body: bytes) -> AnswerError:
    """The error for an answer with a status other than success."""
    try:
        said = words_of(json.loads(body))
    except ValueError:
        said = " ".join(body.decode("utf-8", "replace").split())[:SHOWN]
    hints = {
        401: "give its key with --api-key, or in SPECCTL_API_KEY",
        404: "is that the server's address, with /v1 where its paths begin so, and one of its models?",
        429: "ask less at once, or let more wait",
    }
    return AnswerError(f"http_{status}", f"the server answers {status}: {said}".rstrip(": "), hints.get(status, ""))


SECONDS = 600.0  # How long a server may be silent
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
    """A server that answers."""

    url: str  # where its paths begin, mostly with ``/v1`` at the end
    key: str | None  # sent with every request, if there is one
    model: str  # that answers
    owner: str = ""  # the owner of its models; ``specctl`` for our own servers

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of a client of httpx."""
        return _settings(self.url, self.key)

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        """The arguments of httpx's ``stream`` for a streamed answer to a prompt or messages with settings."""
        path = "/chat/completions" if "messages" in body else "/completions"
        more = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        return {"method": "POST", "url": path, "json": {**body, **more}}

    def stream(self, client: "httpx.Client", body: dict[str, Any]) -> Generator[Chunk, None, None]:
        """The pieces of an answer as they arrive.

        Raises:
            AnswerError: the server sends no answer, or an incomplete one.
        """
        with http_errors(), client.stream(**self.request(body)) as answer:
            if answer.status_code != 200:
                raise refusal(answer.status_code, answer.read())
            stream = StreamReader()
            for line in answer.iter_lines():
                if (chunk := stream.read(line)) is not None:
                    yield chunk
            stream.check()

    async def stream_async(self, client: "httpx.AsyncClient", body: dict[str, Any]) -> AsyncIterator[Chunk]:
        """As `stream`."""
        with http_errors():
            async with client.stream(**self.request(body)) as answer:
                if answer.status_code != 200:
                    raise refusal(answer.status_code, await answer.aread())
                stream = StreamReader()
                async for line in answer.aiter_lines():
                    if (chunk := stream.read(line)) is not None:
                        yield chunk
                stream.check()

    async def drafted(self, client: "httpx.AsyncClient") -> Usage | None:
        """The number of tokens it has drafted since it started, from its ``/metrics``; None where they lack it."""
        import httpx

        parts = urlsplit(self.url)
        where = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}/metrics"
        try:
            answer = await client.get(where)
        except httpx.HTTPError:
            return None
        return drafted_of(answer.text) if answer.status_code == 200 else None


class StreamReader:
    """Reads the lines of a stream and checks that it is complete."""

    def __init__(self) -> None:
        self._whole = False

    def read(self, line: str) -> Chunk | None:
        """The piece in a line, if there is one."""
        chunk = chunk_of(line)
        self._whole |= line[5:].strip() == "[DONE]" or (chunk is not None and chunk.finish_reason is not None)
        return chunk

    def check(self) -> None:
        """Raise AnswerError where the stream ended before its text."""
        if not self._whole:
            raise AnswerError("broken_stream", "the stream ended in the middle of the text")


@contextmanager
def http_errors() -> Iterator[None]:
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
    """Connect to a server and choose its model.

    Args:
        url: from the user; ``/v1`` may be left out.
        key: of the server, if it needs one.
        model: that shall answer; None for the only one.

    Raises:
        UsageError: httpx is missing, the URL is invalid, or the server has several models or none of this name.
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
        raise UsageError(f"--url {url} is not the URL of a server", "e.g. --url http://127.0.0.1:8000/v1")
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

    with http_errors(), httpx.Client(**_settings(base, key)) as client:
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
    """The counters of drafted tokens on a Prometheus page; None where it has none."""
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


API_NAMES = {"max_new_tokens": "max_tokens"}  # Keys of the sampling table that have another name in the interface


def api_settings(settings: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """Settings of the sampling table by the names of OpenAI's interface.

    Raises:
        UsageError: the interface does not have one of them.
    """
    found = {API_NAMES.get(key, key): value for key, value in settings.items() if value is not None}
    for key in ("regex", "grammar"):
        if key in found:
            raise UsageError(f"{key} is not a setting of OpenAI's interface", "leave it out")
    if "json_schema" in found:
        schema = {"name": "answer", "schema": found.pop("json_schema")}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    if chat and "logprobs" in found:
        found |= {"top_logprobs": found["logprobs"], "logprobs": True}
    return found
