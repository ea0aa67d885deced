"""The text of an answer as it grows, with what belongs to each piece."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from specctl.decoding.text import NO_ENDS, TextStream, shown_length, silent_ids
from specctl.models.files.tokenizer import Tokenizer
from specctl.records import Completion, ExtraToken, Round, TokenLogprobs
from specctl.serving.spellings import Spellings
from specctl.serving.text_thread import Ended, Wrote


@dataclass(frozen=True, slots=True)
class Placed:
    """A token where it stands in an answer.

    Attributes:
        text: what it adds, whole characters: of several tokens that are one character, the last one adds it.
        start: characters before it.
        first: whether nothing that has text stands before it, prompt included.
        told: its log-probability, if it was asked for.
    """

    text: str
    start: int
    first: bool
    told: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of an answer.

    Attributes:
        text: whole characters, and nothing that may begin a stop string.
        logprobs: tokens whose text is told by now, with log-probabilities.
        rounds: each with what its tokens add.
    """

    text: str
    logprobs: Sequence[Placed] = ()
    rounds: Sequence[tuple[Round, Sequence[str]]] = ()


@dataclass(slots=True)
class AnswerText:
    """Takes rounds and gives pieces, whose texts are together the completion's.

    Attributes:
        tokenizer: the target's.
        prompt: its ids.
        stops: the stop strings.
        ends: ids that end the text.
        logprobs, rounds: whether pieces have some.
    """

    tokenizer: Tokenizer
    prompt: Sequence[int]
    stops: Sequence[str]
    ends: Set[int] = NO_ENDS
    logprobs: bool = False
    rounds: bool = False
    _text: str = ""
    _shown: int = 0
    _told: int = 0
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

    def add(self, heard: Sequence[Wrote]) -> Piece:
        """What rounds add."""
        rounds: list[tuple[Round, Sequence[str]]] = []
        if self.logprobs or self.rounds:
            rounds += [(wrote.round, self._place(wrote.round, wrote.known)) for wrote in heard]
        else:
            self._text += self._stream.push([token for wrote in heard for token in wrote.tokens])
        before, self._shown = self._shown, shown_length(self._text, self._shown, self.stops)
        return Piece(self._text[before : self._shown], self._passed(), rounds if self.rounds else ())

    def end(self, completion: Completion) -> Piece:
        """What is left of a text that has ended; all of it where no rounds were heard."""
        rounds: list[tuple[Round, Sequence[str]]] = []
        if (self.logprobs or self.rounds) and not self._placed:
            rounds = [(one, self._place(one)) for one in completion.rounds]
        rest = self._placed[self._told : len(completion.tokens)] if self.logprobs else []
        most = len(completion.text)  # a stop string may end it before the last tokens
        rest = [one if one.start <= most else replace(one, start=most) for one in rest]
        return Piece(completion.text[self._shown :], rest, rounds if self.rounds else ())

    def _place(self, round_: Round, known: int = 0) -> Sequence[str]:
        """Take a round's tokens, but for the first ones that are known; what all of them add, nothing where known."""
        count = len(self._placed)
        likely = round_.logprobs or (None,) * len(round_.emitted)
        for token, told in list(zip(round_.emitted, likely, strict=True))[known:]:
            text = self._stream.push([token])
            self._placed.append(Placed(text, len(self._text), self._first, told))
            self._text += text
            self._first = self._first and token in self._silent
        return [""] * known + [one.text for one in self._placed[count:]]

    def _passed(self) -> Sequence[Placed]:
        if not self.logprobs:
            return ()
        start, count = self._told, len(self._placed)
        while self._told < count and self._ends_at(self._told) <= self._shown:
            self._told += 1
        return self._placed[start : self._told]

    def _ends_at(self, number: int) -> int:
        one = self._placed[number]
        return one.start + len(one.text)


def usage(ended: Ended) -> dict[str, Any]:
    """Token counts, with how many of the prompt were in the caches, and of the drafted ones accepted."""
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


def told_round(round_: Round, texts: Sequence[str]) -> dict[str, Any]:
    """A round as JSON: each token that it wrote with what it adds to the text, and where it comes from."""
    tokens = [(token, "accepted") for token in round_.kept_tokens]
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
    """Log-probabilities as chats have them."""
    content = []
    for one in some:
        assert one.told is not None
        every = [(one.told.id, one.told.logprob), *one.told.top]
        names = spellings.names_of([token for token, _ in every], first=one.first)
        spelled = [(token, spellings.bytes_of(token, first=one.first)) for token, _ in every]
        own, *top = [
            {"token": names[token], "logprob": logprob, "bytes": None if found is None else [*found]}
            for (_, logprob), (token, found) in zip(every, spelled, strict=True)
        ]
        content.append({**own, "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(some: Sequence[Placed], spellings: Spellings) -> Mapping[str, Any]:
    """Log-probabilities as completions have them, whose likeliest tokens are an object by their names."""
    told = [(one, one.told) for one in some if one.told is not None]
    names = [
        spellings.names_of([likely.id, *(token for token, _ in likely.top)], first=one.first, marked=True)
        for one, likely in told
    ]
    return {
        "tokens": [each[likely.id] for each, (_, likely) in zip(names, told, strict=True)],
        "token_logprobs": [likely.logprob for _, likely in told],
        "top_logprobs": [
            {each[token]: value for token, value in likely.top} for each, (_, likely) in zip(names, told, strict=True)
        ],
        "text_offset": [one.start for one, _ in told],
    }
