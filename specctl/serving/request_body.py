"""Request bodies in OpenAI's format, and error responses."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from specctl.errors import ProfileError, RecordError, SpecctlError, UsageError
from specctl.messages import Message, read_messages
from specctl.profile.schema import MOST_LOGPROBS, Bias, Penalty, Repetition
from specctl.profile.wording import did_you_mean
from specctl.record_settings import FOREIGN, NAMES, TOOLS, asks_for_nothing, switched_off
from specctl.serving.text_thread import BusyError, ClosedError

RETRY_SECONDS = 1  # Seconds after which a client is asked to retry when the queue is full
_OURS = frozenset({"failed_pass", "out_of_memory", "not_a_number", "worker_died"})
"""Kinds of `RecordError` that are the server's fault."""
_NO_TEXT = frozenset({"grammar_failed", "unfit_text"})
"""Kinds of a text that could not follow its grammar. Not a 500, after which clients would retry automatically."""


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: the problem and its solution.
        param: the parameter that is wrong, if one is.
        code: a stable identifier for programs, if there is one.
        kind: OpenAI's ``type``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.kind = status, message, param, code, kind

    @property
    def body(self) -> dict[str, Any]:
        """The JSON document."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def api_error_of(error: Exception) -> ApiError:
    """The response to an error while a text was written."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BusyError):
        return ApiError(429, f"{error.message}; try again later", code="too_many_requests", kind="rate_limit_error")
    if isinstance(error, ClosedError):
        return ApiError(503, error.message, code="unavailable", kind="server_error")
    if isinstance(error, RecordError):
        if error.kind in _OURS:
            status = 503 if error.kind in ("out_of_memory", "worker_died") else 500
            return ApiError(status, error.message, code=error.kind, kind="server_error")
        if error.kind in ("invalid_grammar", "no_grammars"):
            return ApiError(400, error.message, "response_format", error.kind)
        if error.kind in _NO_TEXT:
            return ApiError(422, error.message, "response_format", error.kind)
        code = "context_length_exceeded" if error.kind == "prompt_too_long" else error.kind
        return ApiError(400, error.message, "prompt", code)
    if isinstance(error, ProfileError | UsageError):
        return ApiError(400, error.full_message, "specctl.policy", "invalid_policy")
    message = (
        error.full_message if isinstance(error, SpecctlError) else f"{type(error).__name__} while the text was written"
    )
    return ApiError(500, message, kind="server_error")


def timed_out() -> ApiError:
    """The response if a text has not ended in time."""
    return ApiError(504, "the text took too long", code="timeout", kind="server_error")


IGNORED = frozenset({
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
})  # fmt: skip
"""Parameters about the client or the cache, which change no text."""


class Body(BaseModel):
    """A JSON object: unknown keys are errors, values are never converted to another type, null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None}


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class Extras(Body):
    """specctl's own parameters: policy and draft in place of the profile's, and whether to report rounds."""

    policy: str | None = None
    draft: bool = True
    rounds: bool = False


class NamedSchema(Body):
    """A JSON schema in OpenAI's format; it is always enforced, ``strict`` or not."""

    name: str
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @property
    def asked(self) -> dict[str, Any] | bool | None:
        """The schema that the text must match; None for any text."""
        if self.type == "text":
            return None
        named = self.json_schema.schema_ if self.type == "json_schema" and self.json_schema is not None else None
        return {"type": "object"} if named is None else named


Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class TextBody(Body):
    """Parameters of both kinds of requests; the profile's values replace absent or null ones."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    epsilon_cutoff: Annotated[float, Field(ge=0, lt=1)] | None = None
    eta_cutoff: Annotated[float, Field(ge=0, lt=1)] | None = None
    top_h: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    encoder_repetition_penalty: Repetition | None = None
    encoder_no_repeat_ngram_size: Annotated[int, Field(ge=0)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    specctl: Extras = Extras()
    _order: Mapping[str, int] = PrivateAttr(default_factory=dict)

    def first(self, faults: Iterable[ApiError]) -> ApiError | None:
        """The error about the parameter that comes first in the body; None without errors."""
        return _first(faults, self._order)

    @property
    def limit(self) -> tuple[str, int | None]:
        """The parameter that limits new tokens, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """The number of likeliest ids to report at each token; None without log-probabilities."""
        raise NotImplementedError


Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class CompletionBody(TextBody):
    """The body of ``/v1/completions``."""

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


def _messages(value: Any) -> Any:
    try:
        return read_messages(value)
    except RecordError as error:
        raise PydanticCustomError("messages", "{what}", {"what": error.message}) from None


class ChatBody(TextBody):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[Sequence[Message], BeforeValidator(_messages)]
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


PARTS: Mapping[str, type[Body]] = {
    "specctl": Extras,
    "stream_options": StreamOptions,
    "response_format": ResponseFormat,
}
"""Parameters that are objects."""
OWN_NAMES = {"max_new_tokens": "max_tokens", "json_schema": "response_format"}
"""Request parameters with another name in a profile's sampling table."""
CHOICES = {
    "prompt": "a text, token ids, or a list with one of these",
    "stop": "a text of 1 to 1000 characters, or at most 16 of them",
}
"""The allowed values of parameters with several types."""


SOME = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
"""Stands in for a missing or wrong prompt while the rest of a body is checked."""
NEEDS = {"stream_options": "stream", "top_logprobs": "logprobs"}
"""Parameters that need another one; their errors are omitted if the other one is wrong."""
MUSTS = {
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
}
"""Messages about values by pydantic's error type, in JSON's terms."""


def body_of(
    kind: type[TextBody], data: Any, model: str, more: Callable[[TextBody], Iterable[ApiError]] = lambda _: ()
) -> TextBody:
    """Check a body.

    Args:
        kind: of the request.
        data: its body, from JSON.
        model: the served model's name.
        more: finds further errors in a body with the right types; called only if there is an error already.

    Raises:
        ApiError: about the parameter that comes first in the body; missing ones come last.
    """
    if not isinstance(data, Mapping):
        raise ApiError(400, "the body is JSON, but not an object")
    order = {key: place for place, key in enumerate(data)}
    faults: list[ApiError] = []
    given: dict[str, Any] = {}
    for key, value in data.items():
        known = key in kind.model_fields
        if key in IGNORED or asks_for_nothing(key, value) or (known and _empty(key, value, data)):
            continue
        if not known and (key in FOREIGN or key in NAMES):
            faults.append(ApiError(400, _unsupported(key, kind), key, "unsupported_parameter"))
        else:
            given[key] = switched_off(key, value)
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        details: dict[str, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False, include_input=False, include_context=False):
            details.setdefault(str(detail["loc"][0]), []).append(detail)
        faults += [_mistake(several, kind, given) for several in details.values()]
        rest = {key: value for key, value in given.items() if key not in details}
        body = kind.model_validate({key: SOME[key] for key in SOME if key in kind.model_fields} | rest)
        body._order = order
        faults += (one for one in _disagreements(body) if NEEDS.get(one.param or "") not in details)
    else:
        body._order = order
        faults += _disagreements(body)
    asked = given.get("model")
    if isinstance(asked, str) and asked != model:
        what = f"there is no model {asked!r} here, only {model!r}"
        faults.append(ApiError(404, what, "model", "model_not_found"))
    if faults:
        faults += more(body)
    if (fault := _first(faults, order)) is not None:
        raise fault
    return body


def _empty(key: str, value: Any, data: Mapping[str, Any]) -> bool:
    """Whether a known parameter's value has no effect and is not of the parameter's type."""
    if key == "stream_options":
        return not data.get("stream") and isinstance(value, Mapping) and not any(value.values())
    if key == "top_logprobs":
        return type(value) is int and not value and not data.get("logprobs")
    return key == "logprobs" and value is False


def _first(faults: Iterable[ApiError], order: Mapping[str, int]) -> ApiError | None:
    return min(faults, key=lambda fault: order.get((fault.param or "").partition(".")[0], len(order)), default=None)


def _unsupported(key: str, kind: type[TextBody]) -> str:
    if key in TOOLS:
        return f"{key}: tools are not supported; leave it out"
    own = NAMES.get(key, "")
    if (own := OWN_NAMES.get(own, own)) in kind.model_fields:
        return f"{key} is not read in requests; give {own}"
    only = FOREIGN.get(key, ())
    if not only or not only[0] or isinstance(only[0], list | dict):
        return f"{key} is not supported; leave it out"
    return f"{key} can only be {json.dumps(only[0])} here; leave it out"


def _disagreements(body: TextBody) -> Iterator[ApiError]:
    if body.stream_options is not None and not body.stream:
        yield ApiError(400, "stream_options is for streams; set stream, or leave it out", "stream_options")
    form = body.response_format
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        what = "response_format has json_schema, and needs it, where its type is json_schema"
        yield ApiError(400, what, "response_format")
    if isinstance(body, ChatBody):
        both = body.max_tokens, body.max_completion_tokens
        if None not in both and both[0] != both[1]:
            what = "max_tokens and max_completion_tokens are the same setting; give one of them"
            yield ApiError(400, what, "max_completion_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            yield ApiError(400, "top_logprobs needs logprobs; set it to true, or leave this out", "top_logprobs")
    if not body.specctl.draft and body.specctl.policy is not None:
        yield ApiError(400, "a policy stops drafts, and specctl.draft is false; leave one out", "specctl.policy")


def _mistake(details: Sequence[ErrorDetails], kind: type[TextBody], given: Mapping[str, Any]) -> ApiError:
    """The error about one parameter; pydantic lists an error for each type that it may have."""
    detail = details[0]
    place = _place(detail, given)
    # Parameters within small objects are reported by their own name.
    key = ".".join(place[:2] if place[0] in ("specctl", "stream_options") else place[:1])
    if detail["type"] == "extra_forbidden":
        key = ".".join(place)
        known = kind if len(place) == 1 else PARTS[place[0]] if len(place) == 2 else NamedSchema
        fields = [field.alias or name for name, field in known.model_fields.items()]
        return ApiError(400, f"{key}: unknown parameter{did_you_mean(place[-1], fields)}", key, "unknown_parameter")
    if detail["type"] == "missing":
        return ApiError(400, f"{'.'.join(place)} is missing", key, "missing_parameter")
    if detail["type"] == "messages":
        return ApiError(400, detail["msg"], key, "invalid_value")
    if place[0] in CHOICES:
        return ApiError(400, f"{place[0]} must be {CHOICES[place[0]]}", key, "invalid_value")
    what = MUSTS.get(detail["type"], detail["msg"].replace("Input should be", "must be").replace("False", "false"))
    return ApiError(400, f"{'.'.join(place)}: {what}", key, "invalid_value")


def _place(detail: ErrorDetails, given: Mapping[str, Any]) -> list[str]:
    """The path of keys to an error, without the types that pydantic tried."""
    found: list[str] = []
    value: Any = given
    for number, part in enumerate(detail["loc"], start=1):
        absent = detail["type"] == "missing" and number == len(detail["loc"])
        inside = part in value if isinstance(value, Mapping) else isinstance(value, list) and isinstance(part, int)
        if inside or absent:
            found.append(str(part))
            value = None if absent else value[part]
    return found
