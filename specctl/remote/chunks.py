"""What a server says: pieces of a streamed answer, and errors."""

import json
from dataclasses import dataclass
from typing import Any

from specctl.errors import SpecctlError

SHOWN = 300
"""Characters of a server's own words that a message shows."""


class AnswerError(SpecctlError):
    """A request that got no whole answer.

    Args:
        kind: a stable identifier for programs, such as ``http_500``, ``unreachable``, ``broken_stream`` or ``timeout``.
        message: what happened.
        hint: how to mend it.
    """

    def __init__(self, kind: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; None where the server does not tell.

    Attributes:
        prompt, completion: tokens.
        accepted, rejected: drafted tokens.
    """

    prompt: int | None = None
    completion: int | None = None
    accepted: int | None = None
    rejected: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a streamed answer.

    Attributes:
        text: that it adds; empty where it tells something else.
        finish_reason: on the piece that ends the text.
        usage: on the piece that has it.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


def chunk_of(line: str) -> Chunk | None:
    """The piece that a line of a stream holds; None for a line without one.

    Raises:
        AnswerError: it tells of an error, or is no JSON.
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
    """What an error document says."""
    error = document.get("error", document) if isinstance(document, dict) else document
    said = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(said).split())[:SHOWN]


def refusal(status: int, body: bytes) -> AnswerError:
    """The error of an answer whose status is none of success."""
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
