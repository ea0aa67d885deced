"""What the server answers: texts of `generate`, whoever asks at the same time, and errors that name what is wrong."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import run
from threading import current_thread
from time import monotonic, sleep
from typing import Any
from unittest.mock import MagicMock
from weakref import WeakKeyDictionary

import httpx
import pytest
from starlette.testclient import TestClient

import specctl
from specctl.decoding.session import Session, TextRequest
from specctl.errors import ModelError, UsageError
from specctl.models.running.grammars import grammar, grammar_text
from specctl.models.running.grammars.grammar import Grammars
from specctl.serving.answers import AnswerText, encoded
from specctl.serving.endpoints import EventStream, application
from specctl.serving.listening import Listener, address_of, bound
from specctl.serving.served import Served
from specctl.serving.service import Limits, Service
from specctl.serving.text_thread import Ended, Event, Ticket, Wrote
from specctl.text_engine.pair_rows import passes_of
from tests.support.invoked import invoke
from tests.support.onnx_models import needs_onnx
from tests.support.waiting_grammars import gone

pytestmark = needs_onnx
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED: list[dict[str, Any]] = [
    {"prompt": "the th"},
    {"prompt": "of the", "max_tokens": 3},
    {"prompt": "he said", "temperature": 1.0, "seed": 3},
    {"prompt": "and then", "temperature": 0.7, "seed": 4, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"prompt": "an", "stop": ["e", "a"]},
    {"prompt": [5, 6, 7], "specctl": {"policy": "svip:threshold=0.3"}},
    {"prompt": "the th", "specctl": {"draft": False}},
    {"prompt": ["it was"], "temperature": 1.0, "seed": 8, "frequency_penalty": 1.0, "logit_bias": {"9": 4.0}},
]

SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "path": TEXT,
    "headers": [(b"content-type", b"application/json")],
    "query_string": b"",
    "client": None,
    "server": None,
    "scheme": "http",
    "root_path": "",
}


def service_of(decoder: specctl.Decoder, rows: int = 3, limits: Limits | None = None) -> Service:
    passes = passes_of(decoder.pair, rows) if rows > 1 else None
    return Service(
        Served.here(decoder.pair, decoder.profile, "toy", passes), limits or Limits(body=20_000, tokens=2000)
    )


@pytest.fixture(scope="module")
def client(decoder: specctl.Decoder) -> Iterator[TestClient]:
    with TestClient(application(service_of(decoder))) as client:
        yield client


def streamed(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = client.post(path, json={**body, "stream": True}).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_greedy_texts_are_those_of_generate(client: TestClient, decoder: specctl.Decoder) -> None:
    expected = decoder.generate("the th")
    answer = client.post(TEXT, json={"prompt": "the th", "model": "toy"}).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason.value)
    details = answer["usage"].pop("completion_tokens_details")
    assert answer["usage"].pop("prompt_tokens_details")["cached_tokens"] in range(expected.prompt_tokens)
    assert answer["usage"] == {
        "prompt_tokens": expected.prompt_tokens,
        "completion_tokens": len(expected.tokens),
        "total_tokens": expected.prompt_tokens + len(expected.tokens),
    }
    drafted = sum(round_.drafted for round_ in expected.rounds)
    assert sum(details.values()) == drafted > 0
    said = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    chat = client.post(CHAT, json={"messages": said, "max_completion_tokens": 5}).json()["choices"][0]
    asked = decoder.generate([{"role": "user", "content": "hi"}], max_new_tokens=5)
    assert chat["message"] == {"role": "assistant", "content": asked.text, "refusal": None}


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_a_stream_is_the_same_text(client: TestClient, number: int) -> None:
    body = {**ASKED[number], "logprobs": 2}
    whole = client.post(TEXT, json=body).json()
    chunks = streamed(client, TEXT, {**body, "stream_options": {"include_usage": True}})
    *pieces, last, usage = chunks
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert {piece["choices"][0]["finish_reason"] for piece in pieces} <= {None}
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    told = [piece["choices"][0]["logprobs"] for piece in pieces if piece["choices"][0]["logprobs"]]
    for key, values in whole["choices"][0]["logprobs"].items():
        assert [value for one in told for value in one[key]] == values


def test_requests_at_once_are_answered_as_alone(client: TestClient) -> None:
    def ask(body: dict[str, Any]) -> Any:
        return client.post(TEXT, json={**body, "max_tokens": body.get("max_tokens", 40)}).json()["choices"]

    alone = [ask(body) for body in ASKED]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, ASKED * 3)) == alone * 3


def test_log_probabilities_do_not_depend_on_the_draft(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    drafted = client.post(CHAT, json=body).json()["choices"][0]
    chunks = streamed(client, CHAT, {**body, "specctl": {"draft": False}})
    told = [one for chunk in chunks for one in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(told) == len(drafted["logprobs"]["content"]) == 12
    for one, other in zip(told, drafted["logprobs"]["content"], strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert (one["token"], len(one["top_logprobs"])) == (other["token"], 2)


def test_rounds_tell_where_tokens_come_from(client: TestClient) -> None:
    answer = client.post(TEXT, json={"prompt": "the th", "specctl": {"rounds": True}}).json()
    rounds = answer["specctl"]["rounds"]
    assert [sum(one["origin"] == "accepted" for one in round_["tokens"]) for round_ in rounds] == [
        round_["accepted"] for round_ in rounds
    ]
    assert {one["origin"] for round_ in rounds for one in round_["tokens"]} <= {"accepted", "corrected", "bonus"}
    alone = client.post(TEXT, json={"prompt": "the th", "specctl": {"rounds": True, "draft": False}}).json()
    assert sum(alone["usage"]["completion_tokens_details"].values()) == 0
    assert {one["origin"] for round_ in alone["specctl"]["rounds"] for one in round_["tokens"]} == {"bonus"}
    chunks = streamed(client, TEXT, {"prompt": "the th", "specctl": {"rounds": True}})
    assert [one["tokens"] for chunk in chunks if "specctl" in chunk for one in chunk["specctl"]["rounds"]] == [
        round_["tokens"] for round_ in rounds
    ]


def test_seeds_and_rules(client: TestClient) -> None:
    def text(**body: Any) -> str:
        return client.post(TEXT, json={"prompt": "the th", "max_tokens": 30, **body}).json()["choices"][0]["text"]

    assert text(temperature=1.0, seed=7) == text(temperature=1.0, seed=7)
    assert text(temperature=1.0) != text(temperature=1.0)
    forced = client.post(TEXT, json={"prompt": "a", "logit_bias": {"9": 100.0}, "logprobs": 0}).json()
    assert len(set(forced["choices"][0]["logprobs"]["tokens"])) == 1
    rules = {"logit_bias": {"9": 1.0}, "presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    rules |= {"encoder_repetition_penalty": 0.5, "encoder_no_repeat_ngram_size": 3}
    assert text(**rules) == text(**rules, specctl={"draft": False}) != text()
    filters = {"typical_p": 0.2, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.2, "temperature": 1.0, "seed": 7}
    assert text(**filters) == text(**filters) != text(temperature=1.0, seed=7)


def test_a_text_fits_its_schema(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, compile_ = [], Grammars._compile
    monkeypatch.setattr(
        Grammars, "_compile", lambda *given: compiling.append(current_thread().name) or compile_(*given)
    )
    schema = {"type": "json_schema", "json_schema": {"name": "hue", "schema": {"enum": ["red", "green"]}}}
    body = {"prompt": "a", "response_format": schema, "logprobs": 1, "max_tokens": 40}
    answer = client.post(TEXT, json=body).json()["choices"][0]
    assert compiling
    assert "models" not in compiling, "all texts would wait"
    assert (json.loads(answer["text"]) in ("red", "green"), answer["finish_reason"]) == (True, "stop")
    assert max(answer["logprobs"]["token_logprobs"]) <= 0
    wrong = {**schema, "json_schema": {"name": "hue", "schema": {"type": "colour"}}}
    answer = client.post(TEXT, json={**body, "response_format": wrong})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    for schema, status in ((True, 200), (False, 400)):
        form = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
        assert client.post(TEXT, json={**body, "response_format": form}).status_code == status


TWICE = {
    "patternProperties": {"^k$": {"enum": ["v"]}},
    "additionalProperties": False,
    "minProperties": 2,
    "maxProperties": 2,
}
"""A schema of objects, whose grammar knows one property alone, to be written twice."""


def test_a_text_that_does_not_fit_its_schema_is_an_error(client: TestClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "k", "schema": {"type": "object", **TWICE}}}
    body = {"prompt": "a", "response_format": form, "max_tokens": 200}
    answer = client.post(TEXT, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (422, "unfit_text", "response_format")
    assert error["message"] == 'the text does not fit the schema: $ is {"k": "v"}, and "minProperties" is 2'
    told = client.post(TEXT, json={**body, "stream": True})
    if told.status_code == 200:  # else the text had ended before anything was sent
        *_, last, done = told.text.strip().split("\n\n")
        assert (last, done) == (f"data: {encoded(answer.json())}", "data: [DONE]")
    else:
        assert (told.status_code, told.json()) == (422, answer.json())
    cut = client.post(TEXT, json={**body, "max_tokens": 3}).json()["choices"][0]
    assert cut["finish_reason"] == "length"


def test_a_grammar_that_cannot_go_on_is_no_wrong_request(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_text, "STATES", 30)
    form = {"name": "a", "schema": {"type": "string", "pattern": "^([a-z]{2,9} ?){20,40}$"}}
    body = {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": form}, "max_tokens": 400}
    answer = client.post(TEXT, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "grammar_failed")
    assert "\n" not in answer.json()["error"]["message"]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars that take what the titles of their schemas say."""
    monkeypatch.setattr("specctl.models.running.grammars.trials.PROGRAM", "tests.support.waiting_grammars")
    monkeypatch.setattr(grammar, "_MADE", WeakKeyDictionary())


def waiting(path: Path) -> dict[str, Any]:
    """A request whose schema is compiled for ever; the process that does so writes its number to a path."""
    form = {"name": "a", "schema": {"title": f"works {path}"}}
    return {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": form}}


@pytest.mark.usefixtures("trials")
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_is_compiled_no_longer_than_a_request_lasts(
    decoder: specctl.Decoder, tmp_path: Path, stream: bool
) -> None:
    with TestClient(application(service_of(decoder, 1, Limits(seconds=1)))) as client:
        answer = client.post(TEXT, json={**waiting(tmp_path / "one"), "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert waited_for(lambda: gone(tmp_path / "one"))


@pytest.mark.usefixtures("trials")
def test_others_are_answered_while_six_grammars_are_compiled_whose_clients_go_away(
    decoder: specctl.Decoder, tmp_path: Path
) -> None:
    paths = [tmp_path / str(number) for number in range(6)]
    small = {"type": "json_schema", "json_schema": {"name": "hue", "schema": {"enum": ["red", "green"]}}}
    service = service_of(decoder)

    async def run() -> None:
        transport = httpx.ASGITransport(application(service))
        app: Any = transport.app
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://a") as client,
        ):
            asking = [asyncio.create_task(client.post(TEXT, json=waiting(path))) for path in paths]
            while not any(path.exists() for path in paths):
                await asyncio.sleep(0.01)
            for body in ({"prompt": "the th"}, {"prompt": "a", "response_format": small, "max_tokens": 40}):
                answer = (await client.post(TEXT, json=body)).json()["choices"][0]
                assert answer["text"]
            assert json.loads(answer["text"]) in ("red", "green")
            assert not any(one.done() for one in asking)
            (began,) = [path for path in paths if path.exists()]
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            while not gone(began):
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 120))


WRONG: list[tuple[str, dict[str, Any], int, str | None]] = [
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": ["a", "b"]}, 400, "prompt"),
    (TEXT, {"prompt": [1 << 40]}, 400, "prompt"),
    (TEXT, {"prompt": [1 << 70]}, 400, "prompt"),
    (TEXT, {"prompt": [4096]}, 400, "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "prompt"),
    (TEXT, {"prompt": [[-1, 5]]}, 400, "prompt"),
    (TEXT, {"prompt": [True]}, 400, "prompt"),
    (TEXT, {"prompt": [1.5]}, 400, "prompt"),
    (TEXT, {"prompt": "a \ud800"}, 400, "prompt"),
    (TEXT, {"prompt": [5] * 5000}, 400, "prompt"),
    (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature"),
    (TEXT, {"prompt": "a", "temperature": "1"}, 400, "temperature"),
    (TEXT, {"prompt": "a", "temprature": 1}, 400, "temprature"),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (TEXT, {"prompt": "a", "repetition_penalty": 1e-300}, 400, "repetition_penalty"),
    (TEXT, {"prompt": "a", "n": 2}, 400, "n"),
    (TEXT, {"prompt": "a", "n": True}, 400, "n"),
    (TEXT, {"prompt": "a", "echo": True}, 400, "echo"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 2001}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    (TEXT, {"prompt": "a", "stop": [""]}, 400, "stop"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (TEXT, {"prompt": "a", "model": "gpt"}, 404, "model"),
    (TEXT, {"prompt": "a", "specctl": {"policy": "svpi"}}, 400, "specctl.policy"),
    (TEXT, {"prompt": "a", "specctl": {"policy": "svip:threshold=x"}, "stream": True}, 400, "specctl.policy"),
    (TEXT, {"prompt": "a", "specctl": {"polcy": "svip"}}, 400, "specctl.polcy"),
    (TEXT, {"prompt": "a", "specctl": {"policy": "svip", "draft": False}}, 400, "specctl.policy"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": "Bo"}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, 400, "tools"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "guided_json": {"type": "null"}}, 400, "guided_json"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "stream_options": {"include_usage": 1}}, 400,
     "stream_options.include_usage"),
    (TEXT, {"prompt": "a", "response_format": "json"}, 400, "response_format"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": 1}}}, 400,
     "response_format"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"nam": 1}}}, 400,
     "response_format"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}}, 400,
     "response_format.json_schema.shema"),
    (TEXT, {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}, 400,
     "stream_options.continuous_usage_stats"),
    (TEXT, {"prompt": "a", "logit_bias": [1]}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logprobs": True}, 400, "logprobs"),
    (TEXT, {"prompt": {"a": 1}}, 400, "prompt"),
    (TEXT, {"prompt": "a", "stop": ["x", 1]}, 400, "stop"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, 400, "top_logprobs"),
    (TEXT, {"prompt": "a", "response_format": {"type": "xml"}}, 400, "response_format"),
    (TEXT, {"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "response_format"),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 2}, 400,
     "max_completion_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG)
def test_what_is_wrong_is_named(
    client: TestClient, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"]
    assert not re.search(
        r"\b(str|dictionary|constrained|Format|Options|Input|Value error|False|schema_)\b", error["message"]
    )


NOTHING: dict[str, Any] = {
    "n": 1, "best_of": 1, "echo": False, "suffix": "", "user": "me", "tools": [], "guided_json": None,
    "prompt_logprobs": None, "ignore_eos": False, "min_tokens": 0, "stop_token_ids": [], "length_penalty": 1.0,
    "use_beam_search": False, "top_k": -1, "response_format": {"type": "text"}, "stop": "", "specctl": None,
    "guided_regex": "", "prompt_cache_key": "k", "prompt_cache_options": {}, "prompt_cache_retention": "24h",
    "stream_options": {"include_usage": False}, "logit_bias": {}, "unheard": None, "temperature": None,
    "skip_special_tokens": True, "repeat_penalty": None, "tool_choice": "auto", "metadata": None,
}  # fmt: skip


@pytest.mark.parametrize("key", NOTHING)
def test_what_asks_for_nothing_is_taken(client: TestClient, key: str) -> None:
    asked = {"prompt": "the th", "max_tokens": 4}
    plain = client.post(TEXT, json=asked).json()
    answer = client.post(TEXT, json={**asked, key: NOTHING[key]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == plain["choices"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert client.post(CHAT, json={**chat, key: NOTHING[key]}).status_code == 200


def test_of_several_faults_the_first_in_the_body_is_named(client: TestClient) -> None:
    faults = {"tools": [{}], "tool_choice": "required", "n": 2, "temprature": 1, "model": "gpt", "max_tokens": 0}
    faults |= {"stop": [""], "stream_options": {"include_usage": True}, "specctl": {"polcy": 1}}
    named = {"specctl": "specctl.polcy"}
    for keys in (list(faults), list(faults)[::-1], ["n", "tools"], ["temprature", "n"], ["stop", "model"]):
        for at in range(len(keys)):
            body = {key: faults[key] for key in [*keys[at:], *keys[:at]]}
            first = next(iter(body))
            assert client.post(TEXT, json=body).json()["error"]["param"] == named.get(first, first)
    for keys in (("model", "stream_options"), ("stream_options", "model")):
        body = {key: faults[key] for key in keys} | {"prompt": "a"}
        assert client.post(TEXT, json=body).json()["error"]["param"] == keys[0]
    for keys in (("max_tokens", "logit_bias", "prompt"), ("prompt", "max_tokens"), ("logit_bias", "prompt")):
        wrong = {"max_tokens": 2001, "logit_bias": {"x": 1}, "prompt": [5] * 3000}
        body = {"prompt": "a"} | wrong if "prompt" not in keys else {key: wrong[key] for key in keys}
        assert client.post(TEXT, json=body).json()["error"]["param"] == keys[0]


@pytest.mark.parametrize("other", [{"n": 2}, {"temperature": -1}, {"stream_options": {}, "n": 2}, {"model": "gpt"}])
def test_what_the_models_refuse_stands_in_its_place_among_faults(client: TestClient, other: dict[str, Any]) -> None:
    """Though it takes them to find out."""
    name = next(key for key in other if key != "stream_options")
    for wrong in ({"logit_bias": {"999999": 1}}, {"max_tokens": 2001}, {"prompt": [5] * 3000}, {"prompt": [99999]}):
        (key,) = wrong
        rest: dict[str, Any] = {} if key == "prompt" else {"prompt": "a"}
        assert client.post(TEXT, json=wrong | other | rest).json()["error"]["param"] == key
        assert client.post(TEXT, json=other | wrong | rest).json()["error"]["param"] == name


def test_which_fault_is_named_does_not_depend_on_hashes() -> None:
    code = (
        "from specctl.serving.request_body import ChatBody, body_of\n"
        "body = {'tools': [{}], 'tool_choice': 'required', 'n': 2, 'functions': [{}], 'store': True}\n"
        "try: body_of(ChatBody, body, 'm')\nexcept Exception as error: print(error.param)"
    )
    for seed in "12":
        done = run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert done.stdout == "tools\n", done.stderr


def test_an_answer_comes_back_as_it_was(client: TestClient, decoder: specctl.Decoder) -> None:
    """With all that OpenAI's clients send of it."""
    user = {"role": "user", "content": "hi"}
    message = client.post(CHAT, json={"messages": [user], "max_tokens": 4}).json()["choices"][0]["message"]
    nulls = {"refusal": None, "tool_calls": None, "annotations": None, "audio": None, "function_call": None}
    expected = decoder.generate([user, {"role": "assistant", "content": message["content"]}, user], max_new_tokens=4)
    parts = [{"type": "text", "text": message["content"]}]
    for sent in (
        message,
        {**message, **nulls, "parsed": None},
        {**message, "annotations": [], "reasoning_content": "", "tool_calls": [], "name": None, "type": "message"},
        {**message, "content": parts},
        {**message, "parsed": {"a": 1}},
    ):
        answer = client.post(CHAT, json={"messages": [user, sent, user], "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == expected.text


def test_bodies_that_are_no_json_and_paths_that_are_none(client: TestClient) -> None:
    def status(**given: Any) -> int:
        answer = client.post(TEXT, **{"headers": {"content-type": "application/json"}, **given})
        assert answer.json()["error"]["message"]
        return answer.status_code

    assert status(content=b"{") == status(content=b"[1]") == status(content=b"\xff") == 400
    assert status(content=b'{"prompt": "a", "temperature": NaN}') == 400
    assert status(content=b"[" * 5000 + b"]" * 5000) == 400
    assert status(content=b'{"prompt": "' + b"a" * 20_001 + b'"}') == 413
    assert status(content=b"{}", headers={"content-type": "text/plain"}) == 415
    assert status(content=b'{"prompt": "a"}', headers={"origin": "http://a.example"}) == 415
    assert client.get(TEXT).status_code == 405
    assert client.get("/v2").status_code == client.get("/v1/models/other").status_code == 404
    assert client.get("/v1/models/toy").json() == client.get("/v1/models").json()["data"][0]


def test_errors_behind_the_last_round_are_told(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("lost")

    monkeypatch.setattr(AnswerText, "end", fail)
    *_, last = streamed(client, TEXT, {"prompt": "a"})
    assert last["error"]["message"] == "ValueError while the text was written"
    monkeypatch.setattr(EventStream, "_taken", fail)
    with pytest.raises(ValueError, match="lost"):
        client.post(TEXT, json={"prompt": "a", "stream": True})
    monkeypatch.undo()
    monkeypatch.setattr(AnswerText, "add", fail)
    answer = client.post(TEXT, json={"prompt": "a", "stream": True})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_a_stream_that_is_too_late_is_told_so(decoder: specctl.Decoder) -> None:
    service = service_of(decoder, 1, Limits(seconds=0.2))
    rounds = decoder.generate("the th").rounds

    def submit(ticket: Ticket) -> None:
        for round_ in rounds:
            ticket.receive([Wrote(round_)])  # and no end

    service.thread.submit = submit  # type: ignore[method-assign]
    with TestClient(application(service)) as client:
        *pieces, last = streamed(client, TEXT, {"prompt": "the th", "specctl": {"rounds": True}})
    assert sum(len(piece["specctl"]["rounds"]) for piece in pieces) == len(rounds)
    assert last["error"]["code"] == "timeout"


def test_rounds_behind_others_wait_for_the_next_look_and_the_first_and_the_end_for_nothing(
    decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.serving.service.GATHERED_SECONDS", 1e6)
    service, completion, heard = service_of(decoder, 1), decoder.generate("the th"), list[Event]()
    request = TextRequest((1,), decoder.profile.sampling)
    assert len(completion.rounds) > 2

    async def tell() -> None:
        service._loop = asyncio.get_running_loop()
        told: list[Event] = []
        for ticket in (Ticket(request, heard.extend), Ticket(request, heard.extend)):
            known = len(told) + 1
            for round_ in completion.rounds:
                event = ticket.wrote(round_)
                assert isinstance(event, Wrote)
                told.append(event)
                service._report([(ticket, event)])
                await asyncio.sleep(0)
                assert heard == told[:known], "the first was told at once, and the next look is long after"
        service._report([(ticket, Ended(completion))])
        await asyncio.sleep(0)
        assert heard == [*told, Ended(completion)]

    asyncio.run(tell())


def test_rounds_that_come_seldom_are_told_at_once_without_looks_between(
    decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.serving.service.GATHERED_SECONDS", 0.0)
    service, rounds, heard = service_of(decoder, 1), decoder.generate("the th").rounds, list[Event]()
    ticket, looks = (
        Ticket(TextRequest((1,), decoder.profile.sampling), heard.extend),
        MagicMock(wraps=service._hand_out),
    )
    monkeypatch.setattr(service, "_hand_out", looks)

    async def tell() -> None:
        service._loop = asyncio.get_running_loop()
        for number, round_ in enumerate(rounds, 1):
            event = ticket.wrote(round_)
            assert isinstance(event, Wrote)
            service._report([(ticket, event)])
            await asyncio.sleep(0.001)
            assert len(heard) == looks.call_count == number

    asyncio.run(tell())


def test_health_and_figures(client: TestClient) -> None:
    client.post(TEXT, json={"prompt": "the th"})
    assert client.get("/health").json() == {"status": "ok"}
    page = client.get("/metrics").text
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(figures['specctl_requests_total{path="/v1/completions",status="200"}']) >= 1
    assert float(figures['specctl_tokens_total{kind="completion"}']) >= 12
    assert float(figures["specctl_texts_running"]) == 0


def test_a_key_is_asked_for_where_there_is_one(decoder: specctl.Decoder) -> None:
    lines: list[dict[str, Any]] = []
    client = TestClient(application(service_of(decoder, 1), key="voilà", cors="http://a.example", log=lines.append))
    assert client.get("/health").status_code == 200
    for given in ({}, {"Authorization": "Bearer voila"}, {"Authorization": "voilà".encode("latin-1")}):
        answer = client.get("/v1/models", headers=given)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    right = {"Authorization": "Bearer  voilà ".encode()}
    answer = client.get("/v1/models", headers={**right, "Origin": "http://a.example"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "http://a.example")
    assert (
        "access-control-allow-origin"
        not in client.get("/v1/models", headers={**right, "Origin": "http://b.example"}).headers
    )
    assert [line["status"] for line in lines] == [200, 401, 401, 401, 200, 200]
    assert "voil" not in json.dumps(lines)


def waited_for(condition: Any) -> bool:
    until = monotonic() + 30
    while not condition() and monotonic() < until:
        sleep(0.01)
    return bool(condition())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("others", [0, 2])
def test_a_client_that_goes_away_frees_its_row(decoder: specctl.Decoder, others: int, stream: bool) -> None:
    service = service_of(decoder)
    body = json.dumps({"prompt": "the th", "max_tokens": 400, "stream": stream, "logit_bias": {"0": -100}}).encode()

    async def ask(app: Any, gone: asyncio.Event) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            pass

        await app({**SCOPE, "app": app}, receive, send)

    async def run() -> None:
        app = application(service)
        async with app.router.lifespan_context(app):
            gone = asyncio.Event()
            asking = [asyncio.create_task(ask(app, gone)) for _ in range(1 + others)]
            while service.thread.running < 1 + others:
                await asyncio.sleep(0.001)
            gone.set()
            await asyncio.wait_for(asyncio.gather(*asking), 30)
            while service.thread.running:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 60))
    service.thread.join(30)
    assert not service.thread.alive


def test_models_that_fail_end_all_texts(decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    service, ended = service_of(decoder, 1), list[bool]()
    service.failed = lambda: ended.append(True)

    def fail(*_: Any) -> Any:
        raise ValueError("no device any more")

    monkeypatch.setattr(Session, "play", fail)
    with TestClient(application(service)) as client:
        for _ in range(2):
            answer = client.post(TEXT, json={"prompt": "the th"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert "Retry-After" in answer.headers
        assert client.get("/health").status_code == 503
    assert ended
    assert isinstance(service.thread.died, ValueError)


def test_models_that_fail_end_the_program(decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no device any more")

    monkeypatch.setattr(Session, "play", fail)
    service = service_of(decoder, 1)
    listener = Listener(application(service), service, 5)
    with bound("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(httpx.post, f"{address_of(listening)}{TEXT}", json={"prompt": "a"}, timeout=30)
        with pytest.raises(ModelError, match="the models failed: ValueError: no device any more"):
            listener.serve_on(listening)
        assert asked.result().status_code == 503


def test_without_the_extra_there_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "uvicorn" else True)
    with pytest.raises(UsageError, match="serve needs uvicorn, which is not installed") as raised:
        invoke("serve")
    assert raised.value.hint.startswith('pip install "uvicorn')


def test_who_comes_when_too_many_wait_is_told_to_come_again(decoder: specctl.Decoder) -> None:
    service = service_of(decoder, 1, Limits(waiting=1, seconds=0.2))
    app = application(service)
    service.thread.start = lambda: None  # type: ignore[method-assign]
    with TestClient(app) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.post, TEXT, json={"prompt": "a", "stream": True})
        assert waited_for(lambda: service.thread.waiting == 1)
        second = client.post(TEXT, json={"prompt": "a"})
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert second.json()["error"]["type"] == "rate_limit_error"
        assert first.result().status_code == 504, "nobody takes it, and its time is over"
        assert service.thread.waiting == 0


def test_a_port_that_is_taken_and_a_host_that_is_none() -> None:
    with bound("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert address_of(taken) == f"http://127.0.0.1:{port}"
        for host, asked in (("127.0.0.1", port), ("256.1.1.1", 0), ("a..b", 0)):
            with pytest.raises(UsageError, match=f"cannot listen on {host} port {asked}: "):
                bound(host, asked)


def test_who_waits_when_it_closes_is_told_so(decoder: specctl.Decoder) -> None:
    service = service_of(decoder, 1)
    app = application(service)
    service.thread.start = lambda: None  # type: ignore[method-assign]
    with TestClient(app) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.post, TEXT, json={"prompt": "a"})
        assert waited_for(lambda: service.thread.waiting == 1)
        service.thread.close()
        assert first.result().status_code == client.post(TEXT, json={"prompt": "a"}).status_code == 503
