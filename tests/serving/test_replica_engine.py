"""A server over replicas answers as one with the pair itself does."""

import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from attended import Attended
from starlette.testclient import TestClient
from transformers import AutoTokenizer

import specctl
from specctl.decoding.session import TextRequest
from specctl.models.files.tokenizer import BareTokenizer
from specctl.models.running.grammars import grammar, trials
from specctl.serving.endpoints import application
from specctl.serving.served import PairFacts, Served
from specctl.serving.service import Limits, Service
from specctl.text_engine.child import Host
from specctl.text_engine.here import HereEngine
from specctl.text_engine.pair_rows import passes_of
from tests.support.onnx_models import needs_onnx
from tests.support.waiting_grammars import gone

pytestmark = needs_onnx
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "the th"}),
    (TEXT, {"prompt": "he said", "temperature": 1.0, "seed": 3, "logprobs": 2}),
    (TEXT, {"prompt": [5, 6, 7], "specctl": {"policy": "svip:threshold=0.3", "rounds": True}}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    (
        TEXT,
        {"prompt": "an", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
]
TIMES = {"draft_ms", "verify_ms", "total_ms", "overlap_ms"}
LIMITS = Limits(tokens=200)


@pytest.fixture(scope="module")
def engine(decoder: specctl.Decoder) -> HereEngine:
    passes = passes_of(decoder.pair, 3)
    made = Served.here(decoder.pair, decoder.profile, "toy", passes, compiles=True).engine
    assert isinstance(made, HereEngine)
    return made


@pytest.fixture(scope="module")
def clients(decoder: specctl.Decoder, engine: HereEngine) -> Iterator[tuple[TestClient, TestClient]]:
    """Of a server over a replica, and what the pair answers itself, one after the other: they are one pair."""
    facts = engine.about
    assert isinstance(facts, PairFacts)
    tokenizer = pickle.loads(pickle.dumps(facts.tokenizer))
    assert isinstance(tokenizer, BareTokenizer)
    tokenizer.whole = lambda: decoder.pair.tokenizer
    pair = Served(Attended(engine), decoder.profile, facts, tokenizer, 1)
    with (
        TestClient(application(Service(pair, LIMITS))) as replicated,
        TestClient(application(Service(Served.here(decoder.pair, decoder.profile, "toy"), LIMITS))) as direct,
    ):
        yield replicated, direct


def answered(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    """What is the same whenever it is asked."""
    found = client.post(path, json=body).json()
    rounds = [{key: one[key] for key in one if key not in TIMES} for one in found.get("specctl", {}).get("rounds", [])]
    return found.get("choices", found), {key: found["usage"][key] for key in ("prompt_tokens", "total_tokens")}, rounds


def test_answers_are_those_of_the_pair(clients: tuple[TestClient, TestClient]) -> None:
    replicated, direct = clients
    expected = [answered(direct, path, body) for path, body in ASKED]
    assert [answered(replicated, path, body) for path, body in ASKED] == expected
    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(lambda one: answered(replicated, *one), ASKED * 3)) == expected * 3
    for (path, body), (choices, *_) in zip(ASKED, expected, strict=True):
        lines = replicated.post(path, json={**body, "stream": True}).text.strip().split("\n\n")
        assert lines.pop() == "data: [DONE]"
        told = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        text = "".join(one["text"] if path == TEXT else one["delta"].get("content", "") for one in told)
        assert text == (choices[0]["text"] if path == TEXT else choices[0]["message"]["content"])
        assert told[-1]["finish_reason"] == choices[0]["finish_reason"]


def test_what_is_offered_and_refused_is_the_same(clients: tuple[TestClient, TestClient]) -> None:
    replicated, direct = clients
    for path in ("/v1/specctl", "/health"):
        assert replicated.get(path).json() == direct.get(path).json()
    lengths = [client.get("/v1/models/toy").json()["max_model_len"] for client in clients]
    assert lengths[0] == lengths[1]
    wrong: list[dict[str, Any]] = [
        {"prompt": [1 << 20]},
        {"prompt": [5] * 5000},
        {"prompt": "a", "max_tokens": 300},
        {"prompt": "a", "specctl": {"policy": "unheard-of"}},
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 5}}},
        },
    ]
    for body in wrong:
        found = [client.post(TEXT, json=body) for client in clients]
        assert found[0].status_code == 400
        assert found[0].json() == found[1].json()


def test_metrics_are_those_of_all(clients: tuple[TestClient, TestClient]) -> None:
    replicated, _ = clients

    def tokens() -> float:
        lines = replicated.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith('specctl_tokens_total{kind="comp')).split()[-1])

    replicated.post(TEXT, json={"prompt": "the th", "max_tokens": 3})
    before = tokens()
    replicated.post(TEXT, json={"prompt": "the th", "max_tokens": 7})
    assert tokens() == before + 7
    assert "specctl_workers_ready 1.0" in replicated.get("/metrics").text


def test_without_a_spelling_the_whole_tokenizer_is_taken(
    decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.serving.served.light", lambda tokenizer: tokenizer)
    whole = AutoTokenizer.from_pretrained(decoder.profile.target.model)
    assert PairFacts.of(replace(decoder.pair, tokenizer=whole), {}, 1).tokenizer is None


def test_a_grammar_that_nobody_waits_for_is_compiled_no_longer(
    decoder: specctl.Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "PROGRAM", "tests.support.waiting_grammars")
    monkeypatch.setattr(grammar, "_MADE", WeakKeyDictionary())
    answers = list[Any]()
    host = Host(
        Served.here(decoder.pair, decoder.profile, "toy", compiles=True).engine, lambda *event: answers.append(event)
    )
    Thread(target=host.run, daemon=True).start()
    path = tmp_path / "process"
    schema = {"json_schema": {"title": f"works {path}"}}
    host.put(0, (TextRequest((1,), decoder.profile.sampling.model_copy(update=schema)), True))
    until = monotonic() + 60
    while not path.exists() and monotonic() < until:
        sleep(0.01)
    assert not gone(path)
    host.put(0, None)
    while not gone(path) and monotonic() < until:
        sleep(0.01)
    assert gone(path)
    assert answers == [("answer", (0, None))]
