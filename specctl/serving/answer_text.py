"""The text of an answer as it grows, with what belongs to each piece."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specctl.decoding.text import TextStream, shown_length
from specctl.models.files.tokenizer import Tokenizer
from specctl.records import Completion, ExtraToken, Round, TokenLogprobs
from specctl.serving.order import Ended, Wrote

UNFINISHED = "\ufffd"


class Spellings:
    """What single tokens spell, kept for the next time.

    Args:
        tokenizer: the target's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        if token not in self._known:
            text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self._known[token] = str(text)
        return self._known[token]

    def bytes_of(self, token: int) -> list[int] | None:
        """Its bytes in UTF-8; None where it is a part of a character."""
        text = self.of(token)
        return None if UNFINISHED in text else [*text.encode()]


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of an answer.

    Attributes:
        text: whole characters, and nothing that may begin a stop string.
        logprobs: of tokens whose text is told by now.
    """

    text: str
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(slots=True)
class AnswerText:
    """Takes rounds and gives pieces, whose texts are together the completion's.

    Attributes:
        tokenizer: the target's.
        prompt: its ids.
        stops: the stop strings.
        logprobs: whether pieces have some.
    """

    tokenizer: Tokenizer
    prompt: Sequence[int]
    stops: Sequence[str]
    logprobs: bool = False
    _text: str = ""
    _shown: int = 0
    _told: int = 0
    _waiting: list[tuple[int, TokenLogprobs]] = field(default_factory=list)  # each with where its text ends
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer, self.prompt)

    def add(self, heard: Sequence[Wrote]) -> Piece:
        """What rounds add."""
        if self.logprobs:
            for wrote in heard:
                for token, told in zip(wrote.tokens, (wrote.round.logprobs or ())[wrote.known :], strict=True):
                    self._text += self._stream.push([token])
                    self._waiting.append((len(self._text), told))
        else:
            self._text += self._stream.push([token for wrote in heard for token in wrote.tokens])
        before, self._shown = self._shown, shown_length(self._text, self._shown, self.stops)
        return Piece(self._text[before : self._shown], self._passed() if self.logprobs else ())

    def end(self, completion: Completion) -> Piece:
        """What is left of a text that has ended."""
        rest = completion.logprobs[self._told :] if self.logprobs else ()
        return Piece(completion.text[self._shown :], rest)

    def _passed(self) -> list[TokenLogprobs]:
        found = []
        while self._waiting and self._waiting[0][0] <= self._shown:
            found.append(self._waiting.pop(0)[1])
        self._told += len(found)
        return found


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


def told_round(round_: Round, spellings: Spellings) -> dict[str, Any]:
    """A round as JSON: each token that it wrote, and where it comes from."""
    tokens = [(token, "accepted") for token in round_.kept_tokens]
    if round_.extra is not None:
        tokens.append((round_.extra, "corrected" if round_.extra_kind is ExtraToken.CORRECTION else "bonus"))
    return {
        "drafted": round_.drafted,
        "accepted": round_.accepted,
        "stop": None if round_.stop is None else round_.stop.value,
        "draft_ms": round(round_.draft_seconds * 1e3, 3),
        "verify_ms": round(round_.verify_seconds * 1e3, 3),
        "tokens": [{"id": token, "token": spellings.of(token), "origin": origin} for token, origin in tokens],
    }


def chat_logprobs(some: Sequence[TokenLogprobs], spellings: Spellings) -> dict[str, Any]:
    """Log-probabilities as chats have them."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spellings.of(token), "logprob": logprob, "bytes": spellings.bytes_of(token)}

    content = [{**told(one.id, one.logprob), "top_logprobs": [told(*each) for each in one.top]} for one in some]
    return {"content": content, "refusal": None}


def text_logprobs(some: Sequence[TokenLogprobs], spellings: Spellings, offset: int) -> Mapping[str, Any]:
    """Log-probabilities as completions have them; ``offset`` is where the first token's text begins."""
    tokens = [spellings.of(one.id) for one in some]
    offsets = [offset + sum(map(len, tokens[:number])) for number in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [one.logprob for one in some],
        "top_logprobs": [{spellings.of(token): value for token, value in one.top} for one in some],
        "text_offset": offsets,
    }
