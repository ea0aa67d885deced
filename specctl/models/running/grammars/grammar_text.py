"""Grammars in llguidance's own form; JSON schemas are rewritten so that it reads them as JSON Schema defines them.

No torch and no numpy here: the process that compiles grammars imports it.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

EXACT = 1 << 53  # Integers up to this size are exact in llguidance, which uses float64
ONE = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
"""Keywords with a schema as their value."""
LISTED = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})  # Keywords whose value is a list of schemas
NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords with an object of schemas as their value."""
COUNTS = frozenset({
    "maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties",
})  # fmt: skip
"""Keywords with a count as their value; JSON Schema also allows it as 2.0."""
LIBRARY_KEYS = frozenset({"x-guidance"})  # Keys by which a schema could change how llguidance reads it
FREE_FORMATS = frozenset({"binary", "password"})  # OpenAPI formats that every string satisfies
OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")  # Drafts that ignore everything next to a ``$ref``
FIRST_DRAFTS = ("draft-03", "draft-04")  # Drafts with ``id`` for a schema's address
LATEST = r"https?://json-schema\.org/schema#?"
"""An address without a draft, which stands for the latest one."""
DRAFT_7 = "http://json-schema.org/draft-07/schema#"

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTHS = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_FOURTHS}|{_FOURTHS}00)-02-29)"
)
_ZONE = "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:[.][0-9]+)?{_ZONE}|23:59:60(?:[.][0-9]+)?(?:[Zz]|[+-]00:00))"
FORMATS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}
"""The patterns of string formats: only existing days, and leap seconds only where UTC has them."""
_NO_BREAK = r"[^\n\r\u2028\u2029]"
_SPACES = r"\t\n\x0b\x0c\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_FLAGS = re.compile(r"\(\?[a-zA-Z-]")
_EMPTY = re.compile(r"\[(\^?)\]")


class SchemaError(ValueError):
    """A schema that no text can fit; the message is one line."""


def formed(schema: Any) -> dict[str, Any]:
    """An equivalent schema in the form that llguidance reads.

    Keywords without effect and llguidance's own keys are dropped, patterns follow ECMA-262, and dates and times must
    exist in the calendar.

    Args:
        schema: parsed from JSON; may be a boolean.

    Raises:
        SchemaError: no text fits it, or none that llguidance can write.
    """
    if schema is False:
        raise SchemaError("false is a schema that no text fits; leave it out for any text, or say true for any JSON")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise SchemaError("a schema is an object, true or false")
    draft = schema.get("$schema", "")
    if not isinstance(draft, str):
        raise SchemaError("$.$schema is the address of a draft of JSON Schema, as a text; leave it out for 2020-12")
    old = any(name in draft for name in OLD_DRAFTS)
    listed = old or "2019-09" in draft  # drafts in which ``items`` may be a list
    first = any(name in draft for name in FIRST_DRAFTS)
    found: dict[str, Any] = _Form(old, listed, first).of(schema)
    if re.fullmatch(LATEST, draft):
        del found["$schema"]
    # Exclusive limits are numbers by now, as in later drafts.
    return {**found, "$schema": DRAFT_7} if first else found


class _Form:
    """Rewrites schemas of one draft.

    Args:
        old: whether nothing next to a ``$ref`` counts.
        listed: whether ``items`` may be a list.
        first: whether a schema's address is its ``id``.
    """

    def __init__(self, old: bool, listed: bool, first: bool) -> None:
        self._old, self._listed, self._first = old, listed, first

    def of(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        found = {key: self._value(key, value) for key, value in schema.items() if key not in LIBRARY_KEYS}
        if self._first and isinstance(found.get("id"), str):
            found["$id"] = found.pop("id")
        if self._old and "$ref" in found:
            found.pop("$id", None)
        for key in ("const", "enum"):
            _require_exact(key, found.get(key))
        if not self._listed:
            _name_items(found)
        _name_limits(found)
        for key, nothing in _NOTHING.items():
            if key in found and nothing(found):
                del found[key]
        pattern = FORMATS.get(kind) if isinstance(kind := found.get("format"), str) else None
        if pattern is not None and isinstance(found.get("allOf", []), list):
            found["allOf"] = [*found.get("allOf", []), {"pattern": pattern}]
        return found

    def _value(self, key: str, value: Any) -> Any:
        if key in COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        if key == "pattern" and isinstance(value, str):
            return ecma(value)
        if key in NAMED and isinstance(value, dict):
            named = ecma if key == "patternProperties" else str
            return {named(name): self.of(one) for name, one in value.items()}
        if key in LISTED and isinstance(value, list):
            return [self.of(one) for one in value]
        return self.of(value) if key in ONE else value


def _name_items(schema: dict[str, Any]) -> None:
    """Rename list-valued ``items`` of earlier drafts to ``prefixItems``."""
    rest = schema.pop("additionalItems", None)
    if isinstance(schema.get("items"), list) and "prefixItems" not in schema:
        schema["prefixItems"] = schema.pop("items")
        if rest is not None:
            schema["items"] = rest
        if not schema["prefixItems"]:
            del schema["prefixItems"]


def _name_limits(schema: dict[str, Any]) -> None:
    """Turn draft 4's boolean exclusive limits into numbers."""
    for excluded, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(excluded), bool):
            is_so = schema.pop(excluded)
            if is_so and limit in schema:
                schema[excluded] = schema.pop(limit)


def _any(schema: Any) -> bool:
    return schema is True or schema == {}


def _all_any(named: Any) -> bool:
    return isinstance(named, dict) and all(_any(one) or one == [] for one in named.values())


_NOTHING: Mapping[str, Callable[[dict[str, Any]], bool]] = {
    "uniqueItems": lambda schema: schema["uniqueItems"] is False,
    "dependentRequired": lambda schema: _all_any(schema["dependentRequired"]),
    "dependentSchemas": lambda schema: _all_any(schema["dependentSchemas"]),
    "dependencies": lambda schema: _all_any(schema["dependencies"]),
    "unevaluatedProperties": lambda schema: _any(schema["unevaluatedProperties"]),
    "unevaluatedItems": lambda schema: _any(schema["unevaluatedItems"]),
    "propertyNames": lambda schema: _any(schema["propertyNames"]),
    "not": lambda schema: schema["not"] is False,
    "contains": lambda schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda schema: "contains" not in schema,
    "maxContains": lambda schema: "contains" not in schema,
    "if": lambda schema: all(_any(schema.get(key, True)) for key in ("then", "else")),
    "then": lambda schema: "if" not in schema or _any(schema["then"]),
    "else": lambda schema: "if" not in schema or _any(schema["else"]),
    "format": lambda schema: isinstance(schema["format"], str) and schema["format"] in FREE_FORMATS,
}
"""Keywords that may have no effect, with a test for that; they are tested in this order."""


def _require_exact(key: str, value: Any) -> None:
    """Raise SchemaError for a required number that llguidance would write as a different one."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _require_exact(key, one)
    elif isinstance(value, int | float) and abs(value) > EXACT:
        raise SchemaError(f"{key}: {value} is beyond 2^53, up to which llguidance writes numbers as they are")


def ecma(pattern: str) -> str:
    """An ECMA-262 pattern in the syntax of Rust's regex, where the two differ.

    A dot matches no line break, ``\\s`` is ECMA-262's white space, and classes have no operators. A pattern with flags
    is taken as Rust's already.
    """
    if _FLAGS.search(pattern):
        return pattern
    found: list[str] = []
    place, within = 0, False
    while place < len(pattern):
        if not within and (empty := _EMPTY.match(pattern, place)) is not None:
            found.append(r"[\s\S]" if empty[1] else r"[^\s\S]")
            place = empty.end()
            continue
        sign = pattern[place : place + 2] if pattern[place] == "\\" else pattern[place]
        place += len(sign)
        if sign == "\\s":
            found.append(_SPACES if within else f"[{_SPACES}]")
        elif sign == "\\S":
            found.append(f"[^{_SPACES}]")
        elif sign == "." and not within:
            found.append(_NO_BREAK)
        else:
            found.append(f"\\{sign}" if within and sign in "[&~" else sign)
        within = sign == "[" or (within and sign != "]")
    return "".join(found)


WRITTEN: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
"""JSON is written as by Python's json module: with free whitespace a model may never write anything else. Keywords
unknown to llguidance are errors.
"""
STATES = 50_000
"""The most automaton states of a grammar during a text; llguidance's own limit is five times that. Each takes one or
two kilobytes. A single token may need many, while all texts of a batch wait.
"""


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar in llguidance's own form."""

    grammar: str  # in llguidance's form
    # for a JSON schema, the rewritten schema that texts are checked against, as JSON; None for other grammars
    schema: str | None = None


def grammar_text(kind: str, text: str, *, checked: bool = False) -> GrammarText:
    """A grammar in llguidance's form.

    Args:
        kind: ``json_schema``, ``regex`` or ``grammar``.
        text: the schema as JSON, the regular expression, or the Lark grammar.
        checked: whether to check a schema against the rules of its draft, which is slow for a long schema.

    Raises:
        ValueError: it is not a valid grammar of that kind; the message is one line.
        RecursionError: it is nested too deeply.
    """
    if kind == "regex":
        return GrammarText(LLMatcher.grammar_from_regex(text))
    if kind == "grammar":
        return GrammarText(LLMatcher.grammar_from_lark(text))
    schema = formed(json.loads(text))
    if checked:
        import jsonschema

        from specctl.models.running.grammars.schema_fit import SchemaFit

        try:
            SchemaFit(schema).require_schema()
        except jsonschema.SchemaError as error:
            raise ValueError(f"{error.json_path} is not a schema: {one_line(error.message)[:200]}") from error
    return GrammarText(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=WRITTEN), json.dumps(schema))


class _Listed:
    """What llguidance reads of a vocabulary. A text is split by ``encode``, else into the longest tokens."""

    bos_token_id = None

    def __init__(self, form: Mapping[str, Any], eos: int, encode: Callable[[str], list[int]] | None) -> None:
        self.tokens = [token.encode("latin-1") for token in form["tokens"]]
        self.special_token_ids = form["special"]
        self.eos_token_id = eos
        self._encode = encode or self._longest
        special = {*self.special_token_ids}
        self._ids = {} if encode else {token: i for i, token in enumerate(self.tokens) if token and i not in special}

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text is encoded, not bytes")  # llguidance tries whether bytes are
        return self._encode(text)

    def _longest(self, text: str) -> list[int]:
        data, start = text.encode(), 0
        found: list[int] = []
        while start < len(data):
            end = next((end for end in range(len(data), start, -1) if data[start:end] in self._ids), None)
            found += [] if end is None else [self._ids[data[start:end]]]
            start = end or start + 1
        return found


def library_tokens(
    form: str | Mapping[str, Any], eos: Collection[int], encode: Callable[[str], list[int]] | None = None
) -> LLTokenizer:
    """llguidance's form of a tokenizer.

    Args:
        form, encode: see `Backend` in `specctl.models.files.tokenizer`. Of a vocabulary without ``encode`` grammars
            can be compiled, but the tokens that they force may be others.
        eos: ids that end a text, at least one.

    Raises:
        Exception: llguidance does not support it; it raises nothing narrower.
    """
    if isinstance(form, str):
        return LLTokenizer(form, eos_token=sorted(eos))
    return LLTokenizer(TokenizerWrapper(_Listed(form, min(eos), encode)), eos_token=sorted(eos))


def compiled(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A compiled grammar at its start.

    Args:
        tokens: the tokenizer's ids.
        grammar: see `GrammarText`.

    Raises:
        ValueError: it cannot be compiled, or llguidance warns that it ignores a part of it; the message is one line.
    """
    limits = LLParserLimits(max_lexer_states=STATES, verbose_errors=False)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    if wrong := [matcher.get_error()] if matcher.is_error() else matcher.get_grammar_warnings():
        raise ValueError(one_line(" ".join(wrong)))
    return matcher


def one_line(message: str) -> str:
    """A message without the lines that only point at something above them."""
    return " ".join(line.strip() for line in message.splitlines() if line.strip(" ^|"))
