"""The bodies of answers, whole and in pieces, as OpenAI's clients read them."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from secrets import token_hex
from typing import Any

from specctl.serving.answer_text import Piece, chat_logprobs, text_logprobs, told_round, usage
from specctl.serving.spellings import Spellings
from specctl.serving.text_thread import Ended

encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: a stream has many events
_IDS, _NUMBERS = token_hex(12), count(1)


@dataclass(slots=True)
class AnswerBody:
    """Makes the documents of one answer.

    Attributes:
        chat: whether it answers a chat.
        model: as it is served.
        spellings: of tokens.
        logprobs, rounds: whether documents have them.
        with_usage: whether a stream ends with token counts.
    """

    chat: bool
    model: str
    spellings: Spellings
    logprobs: bool = False
    rounds: bool = False
    with_usage: bool = False
    id: str = field(default_factory=lambda: f"{_IDS}{next(_NUMBERS):08x}")
    _created: int = field(default_factory=lambda: int(time.time()))
    _around: tuple[str, str] | None = None  # a piece's text, in documents that have nothing else of their own

    def whole(self, ended: Ended, piece: Piece) -> dict[str, Any]:
        """The document of a text that has ended; ``piece`` is all of it."""
        completion = ended.completion
        choice = self._choice(completion.finish_reason.value)
        if self.chat:
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self._logprobs(piece)
        body = self._document("chat.completion" if self.chat else "text_completion", [choice])
        if self.rounds:
            body["specctl"] = {"rounds": [told_round(*one) for one in piece.rounds]}
        return {**body, "usage": usage(ended)}

    def first(self) -> dict[str, Any] | None:
        """What a stream begins with, if with anything."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.chat else None

    def more(self, piece: Piece) -> str | None:
        """A piece of a stream, as JSON; None where there is nothing to tell."""
        if not (piece.text or piece.logprobs or self.rounds):
            return None
        if not (self.logprobs or self.rounds):
            if self._around is None:
                mark = encoded(f"text of {self.id}")
                before, _, after = encoded(self._piece(Piece(f"text of {self.id}"), None)).partition(mark)
                self._around = before, after
            return self._around[0] + encoded(piece.text) + self._around[1]
        chunk = self._piece(piece, None)
        if self.rounds:
            chunk["specctl"] = {"rounds": [told_round(*one) for one in piece.rounds]}
        return encoded(chunk)

    def last(self, ended: Ended, piece: Piece) -> list[dict[str, Any]]:
        """What a stream ends with."""
        found = [self._piece(piece, None)] if piece.text or piece.logprobs else []
        found.append(self._piece(Piece(""), ended.completion.finish_reason.value))
        if self.with_usage:
            name = "chat.completion.chunk" if self.chat else "text_completion"
            found.append({**self._document(name, []), "usage": usage(ended)})
        return found

    def _piece(self, piece: Piece, ended: str | None) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text or piece.logprobs else {}
        return self._chunk(delta, ended, piece)

    def _chunk(self, delta: dict[str, str], ended: str | None, piece: Piece | None = None) -> dict[str, Any]:
        choice = self._choice(ended)
        if self.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        choice["logprobs"] = self._logprobs(piece) if piece is not None and piece.logprobs else None
        body = self._document("chat.completion.chunk" if self.chat else "text_completion", [choice])
        return {**body, "usage": None} if self.with_usage else body

    def _choice(self, ended: str | None) -> dict[str, Any]:
        return {"index": 0, "finish_reason": ended}

    def _logprobs(self, piece: Piece) -> Any:
        if not self.logprobs:
            return None
        if self.chat:
            return chat_logprobs(piece.logprobs, self.spellings)
        return text_logprobs(piece.logprobs, self.spellings)

    def _document(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self._created,
            "model": self.model,
            "choices": choices,
        }
