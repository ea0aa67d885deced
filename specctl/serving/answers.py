"""Texts and bodies of responses, whole or streamed, in OpenAI's format."""

import json
import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from secrets import token_hex
from typing import Any

from specctl.decoding.text import NO_ENDS, UNFINISHED, TextStream, shown_length, silent_ids
from specctl.models.files.tokenizer import Tokenizer, byte_of, bytes_of_letters
from specctl.records import Completion, ExtraToken, Round, TokenLogprobs
from specctl.serving.text_thread import Ended, Wrote


class Spellings:
    """The text of single tokens in context; results are cached.

    Args:
        tokenizer: the target's.
        ends: ids that end a text. Like special ids, they are not part of it.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Set[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._silent = silent_ids(tokenizer) | ends
        self._known: dict[tuple[int, bool], str] = {}

    def text_of(self, token: int, *, first: bool = False) -> str:
        """A token's text, with U+FFFD for incomplete characters.

        Args:
            token: its id.
            first: whether it begins a text, where SentencePiece drops its space.
        """
        key = token, first
        if key not in self._known:
            alone = self._decode([token])
            if not first and self._anchor is not None:
                before, both = self._decode([self._anchor]), self._decode([self._anchor, token])
                alone = both[len(before) :] if both.startswith(before) else alone
            self._known[key] = alone
        return self._known[key]

    def bytes_of(self, token: int, *, first: bool = False) -> bytes | None:
        """The token's UTF-8 bytes, perhaps part of a character; None for an id that is not part of a text."""
        if token in self._silent:
            return None
        text = self.text_of(token, first=first)
        if UNFINISHED in text:
            name = self._names.get(token, "")
            if (byte := byte_of(name)) is not None:
                return bytes([byte])
            if (found := bytes_of_letters(name)) is not None:
                return found
        return text.encode()

    def name_of(self, token: int, *, first: bool = False, marked: bool = False) -> str:
        """The token's text; bytes that are not a whole character are escaped, as OpenAI does.

        Args:
            token, first: see `text_of`.
            marked: whether escaped bytes begin with ``bytes:``, as in completions.
        """
        found = self.bytes_of(token, first=first)
        if found is None:
            return self.text_of(token, first=first)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" * marked + found.decode(errors="backslashreplace")

    def names_of(self, tokens: Collection[int], *, first: bool = False, marked: bool = False) -> Mapping[int, str]:
        """Unique names of several tokens: a token whose name is taken is named by its id."""
        found: dict[int, str] = {}
        taken: set[str] = set()
        for token in dict.fromkeys(tokens):
            name = self.name_of(token, first=first, marked=marked)
            found[token] = f"token_id:{token}" if name in taken else name
            taken.add(found[token])
        return found

    @cached_property
    def _anchor(self) -> int | None:
        """A token put before others, so that they do not begin the text."""
        found = self._tokenizer.encode("a", add_special_tokens=False)
        return found[-1] if found else None

    @cached_property
    def _names(self) -> Mapping[int, str]:
        return {token: name for name, token in self._tokenizer.get_vocab().items()}

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@dataclass(frozen=True, slots=True)
class Placed:
    """A token at its position in an answer."""

    text: str  # the text it adds; a character of several tokens counts for the last one
    start: int  # characters before it
    first: bool  # whether no earlier token has text, prompt included
    logprob: TokenLogprobs | None  # its log-probability, if it was asked for


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of an answer."""

    text: str  # whole characters, and nothing that may begin a stop string
    logprobs: Sequence[Placed] = ()  # tokens whose text has now been sent, with log-probabilities
    rounds: Sequence[tuple[Round, Sequence[str]]] = ()  # the rounds, each with the text of its tokens


@dataclass(slots=True)
class AnswerText:
    """Turns rounds into pieces; the pieces' texts add up to the completion."""

    tokenizer: Tokenizer  # the target's
    prompt: Sequence[int]  # its ids
    stops: Sequence[str]  # the stop strings
    ends: Set[int] = NO_ENDS  # ids that end the text
    # logprobs, rounds: whether pieces have some
    logprobs: bool = False
    rounds: bool = False
    _text: str = ""
    _shown: int = 0
    _sent: int = 0
    _placed: list[Placed] = field(default_factory=list)
    _silent: Set[int] = NO_ENDS
    _first: bool = False  # of the next token
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer, self.prompt, self.ends)
        if self.logprobs or self.rounds:
            special = silent_ids(self.tokenizer)
            self._silent = special | self.ends
            self._first = all(token in special for token in self.prompt)

    def add(self, wrote: Sequence[Wrote]) -> Piece:
        """The piece that some rounds add."""
        rounds: list[tuple[Round, Sequence[str]]] = []
        if self.logprobs or self.rounds:
            rounds += [(one.round, self._place(one.round, one.known)) for one in wrote]
        else:
            self._text += self._stream.push([token for one in wrote for token in one.tokens])
        before, self._shown = self._shown, shown_length(self._text, self._shown, self.stops)
        return Piece(self._text[before : self._shown], self._passed(), rounds if self.rounds else ())

    def end(self, completion: Completion) -> Piece:
        """The rest of a finished text; all of it if no rounds were added."""
        rounds: list[tuple[Round, Sequence[str]]] = []
        if (self.logprobs or self.rounds) and not self._placed:
            rounds = [(one, self._place(one)) for one in completion.rounds]
        rest = self._placed[self._sent : len(completion.tokens)] if self.logprobs else []
        most = len(completion.text)  # a stop string may end it before the last tokens
        rest = [one if one.start <= most else replace(one, start=most) for one in rest]
        return Piece(completion.text[self._shown :], rest, rounds if self.rounds else ())

    def _place(self, round_: Round, known: int = 0) -> Sequence[str]:
        """Add a round's tokens except the first ``known`` ones; returns each token's text, empty for known ones."""
        count = len(self._placed)
        likely = round_.logprobs or (None,) * len(round_.emitted)
        for token, logprob in list(zip(round_.emitted, likely, strict=True))[known:]:
            text = self._stream.push([token])
            self._placed.append(Placed(text, len(self._text), self._first, logprob))
            self._text += text
            self._first = self._first and token in self._silent
        return [""] * known + [one.text for one in self._placed[count:]]

    def _passed(self) -> Sequence[Placed]:
        if not self.logprobs:
            return ()
        start, count = self._sent, len(self._placed)
        while self._sent < count and self._ends_at(self._sent) <= self._shown:
            self._sent += 1
        return self._placed[start : self._sent]

    def _ends_at(self, number: int) -> int:
        one = self._placed[number]
        return one.start + len(one.text)


def usage(ended: Ended) -> dict[str, Any]:
    """Token counts, including the cached prompt tokens and the accepted draft tokens."""
    prompt, tokens = ended.completion.prompt_tokens, len(ended.completion.tokens)
    drafted, accepted = ended.drafted_and_accepted
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": ended.kept},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def round_json(round_: Round, texts: Sequence[str]) -> dict[str, Any]:
    """A round as JSON: each new token with its text and its source."""
    tokens = [(token, "accepted") for token in round_.accepted_tokens]
    if round_.extra is not None:
        tokens.append((round_.extra, "corrected" if round_.extra_kind is ExtraToken.CORRECTION else "bonus"))
    return {
        "drafted": round_.drafted,
        "accepted": round_.accepted,
        "stop": None if round_.stop is None else round_.stop.value,
        "draft_ms": round(round_.draft_seconds * 1e3, 3),
        "verify_ms": round(round_.verify_seconds * 1e3, 3),
        "tokens": [
            {"id": token, "token": text, "origin": origin} for (token, origin), text in zip(tokens, texts, strict=True)
        ],
    }


def chat_logprobs(some: Sequence[Placed], spellings: Spellings) -> dict[str, Any]:
    """Log-probabilities in the format of chats."""
    content = []
    for one in some:
        assert one.logprob is not None
        every = [(one.logprob.id, one.logprob.logprob), *one.logprob.top]
        names = spellings.names_of([token for token, _ in every], first=one.first)
        spelled = [(token, spellings.bytes_of(token, first=one.first)) for token, _ in every]
        own, *top = [
            {"token": names[token], "logprob": logprob, "bytes": None if found is None else [*found]}
            for (_, logprob), (token, found) in zip(every, spelled, strict=True)
        ]
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(some: Sequence[Placed], spellings: Spellings) -> Mapping[str, Any]:
    """Log-probabilities in the format of completions, with the likeliest tokens as an object by name."""
    known = [(one, one.logprob) for one in some if one.logprob is not None]
    names = [
        spellings.names_of([likely.id, *(token for token, _ in likely.top)], first=one.first, marked=True)
        for one, likely in known
    ]
    return {
        "tokens": [each[likely.id] for each, (_, likely) in zip(names, known, strict=True)],
        "token_logprobs": [likely.logprob for _, likely in known],
        "top_logprobs": [
            {each[token]: value for token, value in likely.top} for each, (_, likely) in zip(names, known, strict=True)
        ],
        "text_offset": [one.start for one, _ in known],
    }


encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: a stream has many events
_IDS, _NUMBERS = token_hex(12), count(1)


@dataclass(slots=True)
class AnswerBody:
    """Builds the JSON documents of one answer."""

    chat: bool  # whether it answers a chat
    model: str  # the served model's name
    spellings: Spellings  # of tokens
    # logprobs, rounds: whether documents have them
    logprobs: bool = False
    rounds: bool = False
    with_usage: bool = False  # whether a stream ends with token counts
    id: str = field(default_factory=lambda: f"{_IDS}{next(_NUMBERS):08x}")
    _created: int = field(default_factory=lambda: int(time.time()))
    _around: tuple[str, str] | None = None  # the template of documents that differ in a piece's text alone

    def whole(self, ended: Ended, piece: Piece) -> dict[str, Any]:
        """The document of a finished text; ``piece`` is the whole text."""
        completion = ended.completion
        choice = self._choice(completion.finish_reason.value)
        if self.chat:
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self._logprobs(piece)
        body = self._document("chat.completion" if self.chat else "text_completion", [choice])
        if self.rounds:
            body["specctl"] = {"rounds": [round_json(*one) for one in piece.rounds]}
        return {**body, "usage": usage(ended)}

    def first(self) -> dict[str, Any] | None:
        """The first documents of a stream, if any."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.chat else None

    def more(self, piece: Piece) -> str | None:
        """A piece of a stream as JSON; None if there is nothing to send."""
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
            chunk["specctl"] = {"rounds": [round_json(*one) for one in piece.rounds]}
        return encoded(chunk)

    def last(self, ended: Ended, piece: Piece) -> list[dict[str, Any]]:
        """The last documents of a stream."""
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
