"""Whether a text fits a JSON schema: llguidance does not enforce everything that a schema may ask for.

jsonschema checks the parsed value; of several equal names the last one counts. No torch and no numpy here.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Context, Decimal
from ipaddress import IPv4Address, IPv6Address
from itertools import islice
from threading import Lock
from typing import Any
from uuid import UUID

import jsonschema
from jsonschema.exceptions import ValidationError, best_match
from llguidance import LLMatcher, LLTokenizer
from referencing import Registry

SHOWN = 60  # How many characters of a value a message shows
_EXACTLY = Context(prec=10_000, Emin=-99_999, Emax=99_999)
_LABEL = re.compile("[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")

Found = Iterator[ValidationError]


class SchemaFit:
    """Checks texts against one schema.

    Args:
        schema: from `specctl.models.running.grammars.grammar_text.formed`.

    Raises:
        jsonschema.SchemaError: from `require_schema`, if it is not a valid schema.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._kind: Any = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        self._seen: dict[tuple[int, int], list[ValidationError]] = {}
        self._matching: dict[str, LLMatcher] = {}
        self._lock = Lock()
        self._validator: Any = None

    def require_schema(self) -> None:
        """Raise jsonschema.SchemaError if the schema violates the rules of its draft."""
        self._kind.check_schema(self._schema, format_checker=jsonschema.FormatChecker(formats=()))

    def fault(self, text: str) -> str | None:
        """Why a text does not fit, in one line; None if it does."""
        try:
            value = json.loads(text, parse_float=_number)
        except RecursionError:
            return "it is nested too deeply to be read"
        except ValueError as error:
            return f"it is not JSON ({error})"
        with self._lock:
            if self._validator is None:
                self._validator = self._made()
            self._seen.clear()
            try:
                worst = best_match(self._validator.iter_errors(value))
            except RecursionError:
                return "it is nested too deeply to be compared with the schema"
            except Exception as error:  # libraries raise various errors over references that they read differently
                return f"it cannot be compared with the schema ({type(error).__name__}: {_short(str(error))})"
            finally:
                self._seen.clear()
        return None if worst is None else _told(worst)

    def _made(self) -> Any:
        kinds = self._kind.VALIDATORS
        own: dict[str, Callable[..., Any]] = {
            "$ref": self._once(kinds["$ref"]),
            "additionalProperties": self._additional,
            "multipleOf": _multiple,
            "pattern": self._pattern,
            "patternProperties": self._pattern_properties,
        }
        checker = jsonschema.FormatChecker(formats=())
        checker.checkers = dict(_FORMATS)
        extended: Any = jsonschema.validators.extend(self._kind, own)
        # An empty registry, so that references to other places are not fetched.
        return extended(_exact(self._schema), format_checker=checker, registry=Registry())

    def _once(self, judge: Callable[..., Any]) -> Callable[..., Any]:
        """The first error of a reference for a value, computed once: otherwise several references to one place would
        multiply.
        """

        def judged(validator: Any, reference: Any, instance: Any, schema: Any) -> Found:
            place = id(schema), id(instance)
            if place not in self._seen:
                self._seen[place] = [*islice(judge(validator, reference, instance, schema) or (), 1)]
            yield from self._seen[place]

        return judged

    def _matches(self, pattern: str, text: str) -> bool:
        """Whether a pattern occurs in a text, by the same rules as in the grammar."""
        if pattern not in self._matching:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
            self._matching[pattern] = LLMatcher(_bytes(), grammar, log_level=0)
        matcher = self._matching[pattern].deep_copy()
        tokens = list(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace"))
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def _pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> Found:  # noqa: ARG002
        if isinstance(instance, str) and not self._matches(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def _pattern_properties(self, validator: Any, patterns: Any, instance: Any, schema: Any) -> Found:  # noqa: ARG002
        if isinstance(instance, dict):
            for pattern, one in patterns.items():
                for name, value in instance.items():
                    if self._matches(pattern, name):
                        yield from validator.descend(value, one, path=name, schema_path=pattern)

    def _additional(self, validator: Any, rest: Any, instance: Any, schema: Any) -> Found:
        if not isinstance(instance, dict):
            return
        for name, value in instance.items():
            patterns = schema.get("patternProperties", ())
            if name in schema.get("properties", ()) or any(self._matches(pattern, name) for pattern in patterns):
                continue
            if rest is False:
                yield ValidationError(f"{name!r} is not a property")
            else:
                yield from validator.descend(value, rest, path=name)


def _multiple(validator: Any, step: Any, instance: Any, schema: Any) -> Found:  # noqa: ARG001
    """Whether a number is a multiple, computed exactly; float64 division would round."""
    number = isinstance(instance, int | Decimal) and not isinstance(instance, bool)
    if number and _EXACTLY.remainder(Decimal(instance), Decimal(step)):
        yield ValidationError(f"{instance} is not a multiple of {step}")


def _bytes() -> LLTokenizer:
    """A tokenizer whose ids are bytes."""
    global _BYTES
    if _BYTES is None:
        _BYTES = LLTokenizer("byte")
    return _BYTES


_BYTES: LLTokenizer | None = None


def _number(text: str) -> Decimal | int:
    """A number exactly as written, with 1.0 as an integer; raises ValueError if no parser can represent it."""
    if float(text) in (float("inf"), float("-inf")):
        raise ValueError(f"{_short(text)} is beyond float64")
    number = Decimal(text)
    return int(number) if number == number.to_integral_value() else number


def _exact(value: Any) -> Any:
    """A schema with numbers exactly as written, for comparison with those of a text."""
    if isinstance(value, dict):
        return {key: _exact(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_exact(one) for one in value]
    return Decimal(repr(value)) if isinstance(value, float) else value


def _told(error: ValidationError) -> str:
    """An error in one line: the place, the value there, and the schema's requirement."""
    keyword, asked = error.validator, json.dumps(error.validator_value, default=float)
    what = json.dumps(error.instance, ensure_ascii=False, default=float)
    return f"{_short(error.json_path)} is {_short(what)}, and {json.dumps(keyword)} is {_short(asked)}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def _hostname(text: str) -> bool:
    """RFC 1123: labels of at most 63 characters, at most 253 in all."""
    return len(text) <= 253 and all(_LABEL.fullmatch(label) for label in text.split("."))


def _email(text: str) -> bool:
    """RFC 5321: 64 bytes before the last @, 254 in all, and after it a host name or an address in brackets."""
    local, at, domain = text.rpartition("@")
    fits = 0 < len(local.encode()) <= 64 and len(text.encode()) <= 254
    return bool(at) and fits and (domain.startswith("[") or _hostname(domain))


def _readable(kind: Callable[[str], Any]) -> Callable[[str], bool]:
    def reads(text: str) -> bool:
        kind(text)
        return True

    return reads


def _strings(check: Callable[[str], bool]) -> Callable[[object], bool]:
    return lambda value: not isinstance(value, str) or check(value)


_FORMATS: dict[str, tuple[Callable[[object], bool], Any]] = {
    "email": (_strings(_email), ()),
    "hostname": (_strings(_hostname), ()),
    "ipv4": (_strings(_readable(IPv4Address)), ValueError),
    "ipv6": (_strings(_readable(IPv6Address)), ValueError),
    "uuid": (_strings(_readable(UUID)), ValueError),
}
"""Formats that are checked again; dates and times are patterns of the schema by then."""
