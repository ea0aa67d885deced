"""JSON schemas and other grammars over a real tokenizer: what is written fits, and is what the target alone writes."""

import json
import sys
from typing import Any

import jsonschema
import pytest

from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.errors import ProfileError, RecordError
from specctl.models.loading.assembly import load_pair
from specctl.models.running.grammars import grammar
from specctl.models.running.pair import Pair
from specctl.policies import Setting
from specctl.profile import resolve
from specctl.profile.schema import SamplingTable
from specctl.prompts.suites import Suite, SuitePrompt
from specctl.records import FinishReason
from specctl.replay.recording.collecting import collect_traces
from tests.support.random_schemas import random_schema

pytest.importorskip("llguidance")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "colour": {"enum": ["red", "green"]}},
    "required": ["name", "colour"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"regex": "[a-f]{3,9}-[0-9]{2}"},
    {"grammar": 'start: ("ab" | "ba"){2,5} "!"'},
]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(resolve("embedded", overrides=["engine=eager", "target.device=cpu", "draft.device=cpu"]).profile)


def written(pair: Pair, policy: str, **settings: Any) -> tuple[str, FinishReason, int]:
    session = Session(pair, build_drafter(pair, Setting.of({"name": policy})))
    table = SamplingTable.model_validate({"max_new_tokens": 150, **settings})
    done = session.generate(pair.tokenizer.encode("Once upon a time"), table)
    return done.text, done.finish_reason, len(done.rounds)


@pytest.mark.parametrize("settings", GRAMMARS, ids=lambda settings: next(iter(settings)))
def test_what_is_written_is_what_the_target_alone_writes(pair: Pair, settings: Any) -> None:
    text, reason, rounds = written(pair, "none", **settings)
    assert reason is FinishReason.STOP
    for policy in ("svip", "constant"):
        drafted = written(pair, policy, **settings)
        assert drafted[:2] == (text, reason)
        assert drafted[2] < rounds
    if "json_schema" in settings:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 1000), marks=pytest.mark.exhaustive)], ids=str)
def test_texts_fit_random_schemas(pair: Pair, seeds: range) -> None:
    for seed in seeds:
        schema = random_schema(seed)
        text, reason, _ = written(pair, "constant", json_schema=schema, temperature=1.5, seed=seed, max_new_tokens=500)
        assert reason is FinishReason.STOP, (seed, schema, text)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"json_schema": {"type": "nothing"}}, "json_schema: .*nothing"),
        ({"json_schema": False}, "json_schema: false is a schema that no text fits"),
        ({"regex": "(["}, "regex: "),
        ({"grammar": "start: nowhere"}, "grammar: "),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_one_error(pair: Pair, settings: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message) as raised:
        written(pair, "none", **settings)
    assert raised.value.kind == grammar.INVALID
    assert written(pair, "constant", regex="ab")[0] == "ab"  # the next text is written


TWICE: dict[str, Any] = {
    "type": "object",
    "patternProperties": {"^k[0-9]$": {"enum": ["v", "w"]}},
    "additionalProperties": False,
    "minProperties": 2,
    "maxProperties": 2,
}
"""Of which the target writes one property twice, where nothing is asked of how often it may."""


@pytest.mark.parametrize("policy", ["none", "svip"])
def test_a_text_that_ends_without_fitting_its_schema_is_an_error(pair: Pair, policy: str) -> None:
    with pytest.raises(
        RecordError, match=r'^the text does not fit the schema: \$ is .*, and "minProperties" is 2$'
    ) as raised:
        written(pair, policy, json_schema=TWICE)
    assert raised.value.kind == grammar.UNFIT
    text, reason, _ = written(pair, policy, json_schema={**TWICE, "minProperties": 1})
    assert (len(json.loads(text)), reason) == (1, FinishReason.STOP)
    assert written(pair, policy, json_schema=TWICE, max_new_tokens=5)[1] is FinishReason.LENGTH
    text, reason, _ = written(pair, policy, json_schema=SCHEMA)  # the next text is written
    assert (json.loads(text).keys(), reason) == (set(SCHEMA["required"]), FinishReason.STOP)


def test_a_stop_string_may_not_cut_a_text_that_is_to_fit(pair: Pair) -> None:
    with pytest.raises(
        RecordError, match="the text, which a stop string ended, does not fit the schema: it is not JSON"
    ):
        written(pair, "svip", json_schema=SCHEMA, stop=['"'])
    assert written(pair, "svip", json_schema=SCHEMA, stop=["unheard of"])[1] is FinishReason.STOP


def test_true_is_any_json(pair: Pair) -> None:
    found = written(pair, "svip", json_schema=True)
    assert found == written(pair, "svip", json_schema={})


def test_one_grammar_for_a_text() -> None:
    with pytest.raises(ValueError, match="json_schema and regex each say"):
        SamplingTable(json_schema=True, regex="a")


def test_without_the_library_there_is_a_message(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(grammar, "_MADE", {})
    with pytest.raises(RecordError, match=r"pip install .*llguidance.* .*jsonschema"):
        written(pair, "none", regex="ab")


def test_texts_with_grammars_are_not_measured(pair: Pair) -> None:
    """They would be read again without them."""
    profile = resolve("embedded", overrides=['sampling.regex="ab"']).profile
    suite = Suite("texts", (SuitePrompt("a", "", {"prompt": "a"}),), "")
    with pytest.raises(ProfileError, match="without rules about tokens"):
        collect_traces(pair, profile, suite, 4)
