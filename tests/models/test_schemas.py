"""Schemas mean what JSON Schema says: what llguidance reads otherwise is put another way, or the text is judged."""

import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
from llguidance import LLTokenizer

from specctl.models.running.grammars.grammar_text import FORMATS, SchemaError, compiled, formed, grammar_text
from specctl.models.running.grammars.schema_fit import SchemaFit

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
TOKENS = LLTokenizer("byte")


def writable(schema: Any, text: str) -> bool:
    """Whether a grammar lets a text be written."""
    found = grammar_text("json_schema", json.dumps(schema), checked=True)
    matcher, tokens = compiled(TOKENS, found.grammar), list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def fault(schema: Any, text: str) -> str | None:
    return SchemaFit(formed(schema)).fault(text)


DAYS: dict[str, list[str]] = {
    "date": ["2024-02-29", "2000-02-29", "1900-12-31", "0001-01-01", "9999-04-30"],
    "time": ["23:59:59Z", "23:59:60Z", "12:00:00.123+01:30", "00:00:00-23:59", "23:59:60.5+00:00"],
    "date-time": ["2024-02-29T23:59:60Z", "2023-02-28T00:00:00.5-05:00"],
}
NO_DAYS: dict[str, list[str]] = {
    "date": ["2023-02-29", "1900-02-29", "2023-04-31", "0000-10-10", "2023-13-01", "2023-01-00"],
    "time": ["12:00:60Z", "23:59:60+01:00", "24:00:00Z", "12:60:00Z"],
    "date-time": ["2023-02-29T12:00:00Z", "2023-02-28T12:00:60Z", "2023-02-28T12:00:00"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_days_and_times_are_those_of_the_calendar(name: str) -> None:
    for schema in ({"type": "string", "format": name}, {"format": name, "pattern": "[0-9]"}):
        assert all(writable(schema, f'"{text}"') for text in DAYS[name])
        assert not any(writable(schema, f'"{text}"') for text in NO_DAYS[name])


@pytest.mark.parametrize("years", [range(1999, 2002), pytest.param(range(1, 10_000), marks=pytest.mark.exhaustive)])
def test_every_day_is_one(years: range) -> None:
    fit = SchemaFit(formed({"format": "date"}))
    for year in years:
        days = {date(year, 1, 1) + timedelta(count) for count in range(365)} | {date(year, 12, 31)}
        written = {f"{year:04}-{month:02}-{day:02}" for month in range(14) for day in range(33)}
        assert {text for text in written if fit.fault(f'"{text}"') is None} == set(map(str, days))


MEANT: list[tuple[Any, list[str], list[str]]] = [
    (True, ["1", '{"a": [null]}'], []),
    ({"type": "string", "pattern": "^.$"}, ['"a"', '"ü"'], ['"\\r"', '"\u2028"', '"\u2029"']),
    ({"type": "string", "pattern": "^\\s$"}, ['" "', '"\ufeff"', '"\u2028"'], ['"\u0085"', '"a"']),
    ({"type": "string", "pattern": "^[\\s.]$"}, ['"\ufeff"', '"."'], ['"a"']),
    ({"type": "string", "pattern": "^[[&&a]$"}, ['"["', '"&"', '"a"'], ['"b"']),
    ({"type": "string", "pattern": "^[^]$"}, ['"["', '"\\n"'], ['"ab"']),
    ({"type": "string", "pattern": "^(?i)a.$"}, ['"Ab"'], ['"ba"']),
    (
        {"patternProperties": {"^.$": {"type": "null"}}, "additionalProperties": False},
        ['{"a": null}'],
        ['{"ab": null}'],
    ),
    ({"type": "string", "maxLength": 2.0}, ['"ab"'], ['"abc"']),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, ["3"], ["2"]),
    ({"items": [{"type": "null"}], "additionalItems": {"type": "integer"}}, ["[null, 1]"], ["[null, null]"]),
    ({"type": "string", "format": "password"}, ['"a"'], ["1"]),
    ({"$schema": DRAFT_4, "type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),
    ({"$schema": DRAFT_4, "type": "integer", "maximum": 3, "exclusiveMaximum": False}, ["3"], ["4"]),
    (
        {
            "$schema": DRAFT_4,
            "definitions": {"a": {"id": "http://a/b", "type": "null"}},
            "properties": {"id": {"$ref": "http://a/b"}},
        },
        ['{"id": null}'],
        ['{"id": 1}'],
    ),
    ({"$schema": "http://json-schema.org/schema#", "type": "null"}, ["null"], ["1"]),
    ({"enum": [0.5, 9007199254740992]}, ["0.5", "9007199254740992"], ["1"]),
]


@pytest.mark.parametrize(("schema", "texts", "others"), MEANT, ids=lambda one: json.dumps(one)[:40])
def test_what_is_written_is_what_is_meant(schema: Any, texts: list[str], others: list[str]) -> None:
    for text in texts:
        assert (writable(schema, text), fault(schema, text)) == (True, None)
    for text in others:
        assert not writable(schema, text)
        assert fault(schema, text) is not None


NOTHING: list[dict[str, Any]] = [
    {"uniqueItems": False},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentSchemas": {"a": True}},
    {"dependencies": {}},
    {"unevaluatedProperties": True},
    {"unevaluatedItems": {}},
    {"propertyNames": {}},
    {"not": False},
    {"contains": {"type": "null"}, "minContains": 0},
    {"minContains": 2},
    {"if": {"type": "null"}},
    {"if": {"type": "null"}, "then": {}},
    {"then": {"type": "null"}, "else": {"type": "null"}},
]


@pytest.mark.parametrize("keywords", NOTHING, ids=json.dumps)
def test_keywords_that_ask_for_nothing_are_no_error(keywords: dict[str, Any]) -> None:
    for schema in (keywords, {"items": keywords}, {"anyOf": [keywords]}):
        assert writable(schema, "[1, 1]")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "false is a schema that no text fits"),
        ({"$schema": 5}, "\\$schema is the address of a draft"),
        ({"$schema": None}, "\\$schema is the address of a draft"),
        ({"const": 9007199254740993}, "const: 9007199254740993 is beyond 2"),
        ({"properties": {"a": {"enum": [1, [{"b": -(1 << 60)}]]}}}, "enum: -1152921504606846976 is beyond 2"),
    ],
)
def test_what_cannot_be_written_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        formed(schema)


@pytest.mark.parametrize("schema", [{"format": ["date"]}, {"type": ["null", ["null"]]}, {"properties": {"a": 5}}])
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match="is not a schema"):
        grammar_text("json_schema", json.dumps(schema), checked=True)


@pytest.mark.parametrize("schema", [{"uniqueItems": True}, {"items": {"not": {}}}, {"format": "unheard-of"}])
@pytest.mark.parametrize("key", [{"lenient": True}, {"nonsense": 1}])
def test_the_librarys_own_keys_have_no_effect(schema: dict[str, Any], key: dict[str, Any]) -> None:
    messages = []
    for own in ({}, {"x-guidance": key}):
        with pytest.raises(ValueError, match="Un") as raised:
            writable({**schema, **own}, "1")
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    assert writable({"x-guidance": key, "properties": {"x-guidance": {"type": "null"}}}, '{"x-guidance": null}')
    assert not writable({"properties": {"x-guidance": {"type": "null"}}}, '{"x-guidance": 1}')


def test_warnings_are_errors() -> None:
    from llguidance import LLMatcher

    loose = LLMatcher.grammar_from_json_schema('{"uniqueItems": true}', overrides={"lenient": True})
    with pytest.raises(ValueError, match="uniqueItems"):
        compiled(TOKENS, loose)


def test_a_reference_of_draft_7_has_the_base_around_it() -> None:
    schema = {
        "$schema": DRAFT_7,
        "$id": "http://localhost/base/",
        "definitions": {
            "far": {"$id": "http://localhost/a.json", "type": "string"},
            "near": {"$id": "a.json", "type": "number"},
        },
        "allOf": [{"$id": "http://localhost/", "$ref": "a.json"}],
    }
    assert writable(schema, "1")
    assert not writable(schema, '"a"')
    assert (fault(schema, "1"), fault(schema, '"a"')) == (None, '$ is "a", and "type" is "number"')


LOOSE: list[tuple[Any, str, str, str | None]] = [
    ({"minProperties": 2}, '{"k": 1, "k": 2}', '{"k": 1, "l": 2}', '$ is {"k": 2}, and "minProperties" is 2'),
    (
        {"properties": {"a": {"type": "integer"}}},
        '{"\\u0061": "x"}',
        '{"b": "x"}',
        '$.a is "x", and "type" is "integer"',
    ),
    ({"type": "integer", "minimum": (1 << 53) + 1}, str(1 << 53), str((1 << 53) + 1), None),
    ({"type": "number"}, "1e400", "1e300", "it is not JSON (1e400 is beyond float64)"),
    ({"type": "number"}, "-1e999", "1e-400", None),
    ({"type": "string", "format": "email"}, f'"{"a" * 65}@b.example"', '"a@b.example"', None),
    ({"type": "string", "format": "hostname"}, f'"{".".join(["a" * 60] * 5)}"', '"a.example"', None),
]


@pytest.mark.parametrize(("schema", "loose", "text", "told"), LOOSE, ids=lambda one: json.dumps(one)[:40])
def test_what_the_grammar_is_too_loose_for_is_judged(schema: Any, loose: str, text: str, told: str | None) -> None:
    assert writable(schema, loose), "if not, the table in docs/grammars.md says what is no longer so"
    found = fault(schema, loose)
    assert found is not None
    assert "\n" not in found
    assert told in (None, found)
    assert writable(schema, text)
    assert fault(schema, text) is None


RIGHT: list[tuple[Any, str, str]] = [
    ({"multipleOf": 0.0001}, "-39993.2337", "0.00015"),
    ({"multipleOf": 0.1}, "0.3", "0.35"),
    ({"multipleOf": 3}, str(3 * 10**30), str(10**30)),
    ({"minimum": 0.1, "exclusiveMaximum": 0.3}, "0.1", "0.3"),
    ({"exclusiveMinimum": 0.1}, "0.10000000000000000001", "0.1"),
    ({"const": 2.5}, "2.50", "2.6"),
    ({"type": "integer"}, "1.0", "1.5"),
    ({"enum": [0.1]}, "1e-1", "0.2"),
    ({"format": "ipv4"}, '"127.0.0.1"', '"127.0.0.256"'),
    ({"format": "ipv6"}, '"::1"', '"::g"'),
    ({"format": "uuid"}, '"123e4567-e89b-12d3-a456-426614174000"', '"123"'),
    (
        {"patternProperties": {"^\\p{L}$": {"type": "null"}}, "additionalProperties": False},
        '{"é": null}',
        '{"1": null}',
    ),
    (
        {"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": {"type": "string"}},
        '{"b": ""}',
        '{"b": 1}',
    ),
    ({"pattern": "\\d"}, '"a1"', '"a\u0661"'),
]


@pytest.mark.parametrize(("schema", "text", "other"), RIGHT, ids=lambda one: json.dumps(one)[:40])
def test_texts_are_judged_by_what_is_written(schema: Any, text: str, other: str) -> None:
    assert fault(schema, text) is None
    assert fault(schema, other) is not None


def test_references_that_meet_are_judged_once() -> None:
    """Else this takes longer than anybody waits: each level doubles what is below it."""
    levels: dict[str, Any] = {"0": {"properties": {"a": {"type": "null"}}}}
    for level in range(1, 64):
        levels[str(level)] = {"allOf": [{"$ref": f"#/$defs/{level - 1}"}, {"$ref": f"#/$defs/{level - 1}"}]}
    schema = {"$defs": levels, "$ref": "#/$defs/63"}
    assert fault(schema, '{"a": null}') is None
    assert fault(schema, '{"a": 1}') == '$.a is 1, and "type" is "null"'


@pytest.mark.parametrize("depth", [300, 100_000])
def test_a_text_nested_too_deeply_is_said_to_be(depth: int) -> None:
    node = {"$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    assert "nested too deeply" in str(fault(node, "[" * depth + "]" * depth))
    assert fault(node, "[" * 30 + "]" * 30) is None


def test_nothing_is_fetched_for_a_reference_to_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"type": "null"}')
    schema = {"anyOf": [{"type": "null"}, {"$ref": (tmp_path / "a.json").as_uri()}]}
    assert str(fault(schema, "1")).startswith("it cannot be compared with the schema")
