"""The bodies of requests, as OpenAI's clients send them."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specctl.profile.base_tables import MOST_LOGPROBS, Bias, Penalty, Repetition
from specctl.profile.wording import did_you_mean
from specctl.serving.api_errors import ApiError

NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "prediction": (),
    "audio": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
}
"""Parameters of OpenAI's that are not supported, each with the values besides null that ask for nothing."""
IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Those that say who asks, which changes no text."""


class Body(BaseModel):
    """A JSON object: unknown keys are mistakes, values are never converted to another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream has besides text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Extras(Body):
    """What is specctl's own: in place of the profile's policy and draft, and whether rounds are wanted."""

    policy: str | None = None
    draft: bool = True
    rounds: bool = False


class NamedSchema(Body):
    """A JSON schema as OpenAI's clients send it; every one is held to, ``strict`` or not."""

    name: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text is to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @property
    def asked(self) -> dict[str, Any] | None:
        """The schema that the text must fit; None for any text."""
        if self.type == "text":
            return None
        named = self.json_schema.schema_ if self.type == "json_schema" and self.json_schema is not None else None
        return {"type": "object"} if named is None else named


Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class TextBody(Body):
    """What both kinds of requests have; what is left out or null is the profile's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    specctl: Extras = Extras()

    @property
    def limit(self) -> tuple[str, int | None]:
        """The parameter that limits new tokens, and to how many."""
        return "max_tokens", self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest ids are told at each token; None without log-probabilities."""
        raise NotImplementedError


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionBody(TextBody):
    """Of ``/v1/completions``."""

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class MessageBody(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None

    @property
    def message(self) -> dict[str, str]:
        """With its content as one text."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatBody(TextBody):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().limit
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


PARTS = (
    ("specctl", Extras),
    ("stream_options", StreamOptions),
    ("messages", MessageBody),
    ("response_format", ResponseFormat),
)
"""Parameters that are objects, or lists of them."""


def body_of(kind: type[TextBody], data: Any) -> TextBody:
    """A checked body; raises ApiError that names the first parameter that is wrong."""
    if not isinstance(data, Mapping):
        raise ApiError(400, "the body is JSON, but not an object")
    given = {key: value for key, value in data.items() if key not in IGNORED}
    for key in NOTHING.keys() & given.keys():
        value = given.pop(key)
        if value is not None and not any(type(value) is type(none) and value == none for none in NOTHING[key]):
            raise ApiError(400, _unsupported(key), key, "unsupported_parameter")
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise _mistake(error, kind) from None
    _require_agreement(body)
    return body


def _unsupported(key: str) -> str:
    only = NOTHING[key]
    if not only or isinstance(only[0], list):
        return f"{key} is not supported; leave it out"
    return f"{key} can only be {json.dumps(only[0])} here; leave it out"


def _require_agreement(body: TextBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is for streams; set stream, or leave it out", "stream_options")
    form = body.response_format
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        what = "response_format has json_schema, and needs it, where its type is json_schema"
        raise ApiError(400, what, "response_format")
    if isinstance(body, ChatBody):
        both = body.max_tokens, body.max_completion_tokens
        if None not in both and both[0] != both[1]:
            what = "max_tokens and max_completion_tokens are the same setting; give one of them"
            raise ApiError(400, what, "max_completion_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs; set it to true, or leave this out", "top_logprobs")
    if not body.specctl.draft and body.specctl.policy is not None:
        raise ApiError(400, "a policy stops drafts, and specctl.draft is false; leave one out", "specctl.policy")


def _mistake(error: ValidationError, kind: type[TextBody]) -> ApiError:
    detail = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = [str(part) for part in detail["loc"]]
    # Of a value that may have several types, the branch's name follows the parameter's.
    key = ".".join(place[:2] if place[0] in ("specctl", "stream_options") else place[:1])
    if detail["type"] == "extra_forbidden":
        known: type[Body] = kind
        if len(place) > 1:
            known = next((one for name, one in PARTS if name == place[0]), MessageBody)
        key = ".".join(place)
        return ApiError(
            400, f"{key}: unknown parameter{did_you_mean(place[-1], known.model_fields)}", key, "unknown_parameter"
        )
    if detail["type"] == "missing" and len(place) == 1:
        return ApiError(400, f"{key} is missing", key, "missing_parameter")
    what = detail["msg"].replace("Input should be", "must be")
    return ApiError(400, f"{'.'.join(place)}: {what}", key, "invalid_value")
