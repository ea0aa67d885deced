"""Messages of a chat, in records, requests and Python programs."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from specctl.errors import RecordError

Message = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
NEEDED = "each needs a role and content"
_TYPES = ("text", "message")  # Values of a message's own `type`, which some clients send and which are ignored


def says_nothing(value: Any) -> bool:
    """Whether a field with this value is ignored: null, false, or an empty text, list or object."""
    return value is None or value is False or value in ("", [], {})


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Messages for templates: each with a `role`, a `content` of one text, and its other fields that have a value.

    Raises:
        RecordError: these are not messages; it names the place.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise _fault("messages must be a list of one or more objects; " + NEEDED)
    return [_read(f"messages.{number}", message) for number, message in enumerate(value)]


def _read(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _fault(f"{place} must be an object; messages: {NEEDED}")
    role = message.get("role")
    if role not in ROLES:
        what = f"there is no role {json.dumps(role, default=str)}" if "role" in message else "there is no role"
        raise _fault(f"{place}.role: {what}; roles are {', '.join(ROLES)}")
    found = {"role": role, "content": _text(f"{place}.content", message, role)}
    for key, field in message.items():
        if key in found or says_nothing(field) or (key == "type" and field in _TYPES):
            continue
        found[key] = _calls(f"{place}.{key}", field) if key == "tool_calls" else field
    return found


def _text(place: str, message: Message, role: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if role == "assistant" and says_nothing(content):
        return ""
    if content is None:
        raise _fault(f"{place} is {'null' if 'content' in message else 'missing'}; messages: {NEEDED}")
    if not isinstance(content, Sequence) or not content:
        raise _fault(f"{place} must be a text or a list of parts of type text")
    return "".join(_part(f"{place}.{number}", part) for number, part in enumerate(content))


def _part(place: str, part: Any) -> str:
    if not isinstance(part, Mapping):
        raise _fault(f"{place} must be an object with the type text and a text")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise _fault(f"{place}.type is {json.dumps(kind, default=str)}, and only parts of type text are read")
    if not isinstance(text := part.get(kind), str):
        raise _fault(f"{place}.{kind} must be a text")
    if more := [str(key) for key, value in part.items() if key not in ("type", kind) and not says_nothing(value)]:
        raise _fault(f"{place}.{more[0]}: templates cannot use it; leave it out")
    return text


def _calls(place: str, calls: Any) -> list[Any]:
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise _fault(f"{place} must be a list of calls")
    for number, call in enumerate(calls):
        if not isinstance(call, Mapping) or not isinstance(inner := function_of(call), Mapping) or not _named(inner):
            raise _fault(f"{place}.{number} must be an object with a function that has a name and arguments")
    return list(calls)


def _named(function: Mapping[str, Any]) -> bool:
    return isinstance(function.get("name"), str)


def function_of(call: Mapping[str, Any]) -> Any:
    """The name and the arguments of a tool's call, which may have them in an object of their own."""
    return call.get("function", call)


def with_function(call: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """A tool's call with another name, or other arguments."""
    inner = {**function_of(call), **changed}
    return {**call, "function": inner} if "function" in call else inner


def with_objects(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in which the arguments of calls are objects; clients send them as JSON in a text."""
    return [
        {**message, "tool_calls": [with_function(call, **_object(call)) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else {**message}
        for message in messages
    ]


def argument_texts(messages: Sequence[Message]) -> list[str]:
    """The arguments of calls that are JSON in a text."""
    return [
        function_of(call)["arguments"]
        for message in messages
        for call in message.get("tool_calls", ())
        if _object(call)
    ]


def _object(call: Mapping[str, Any]) -> dict[str, Any]:
    given = function_of(call).get("arguments")
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(given)
            return {"arguments": found} if isinstance(found, dict) else {}
    return {}


def _fault(what: str) -> RecordError:
    return RecordError("invalid_record", what)
