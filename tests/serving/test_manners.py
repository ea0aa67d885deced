"""Clients that take their time or call the server by another's name, and signals that come twice."""

import asyncio
import io
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from time import monotonic, sleep
from typing import Any
from unittest.mock import MagicMock
from weakref import WeakKeyDictionary

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient
from uvicorn.server import ServerState

import specctl
from specctl.commands.serve import _log as log
from specctl.decoding.session import Session
from specctl.errors import UsageError
from specctl.models.running.grammars import grammar, trials
from specctl.records import Round
from specctl.serving import listening as listening_module
from specctl.serving.endpoints import application
from specctl.serving.listening import WIRE, Connection, Listener, address_of, bound, known_hosts
from specctl.serving.middleware import AccessLog, ServerMetrics
from specctl.serving.served import Served
from specctl.serving.service import Service
from tests.support.hostile import Terminal
from tests.support.invoked import invoke
from tests.support.onnx_models import needs_onnx
from tests.support.waiting_grammars import gone

pytestmark = needs_onnx


def test_a_server_is_called_by_its_own_name(decoder: specctl.Decoder) -> None:
    with bound("127.0.0.1", 0) as listening:
        hosts = known_hosts("MyMachine", listening)
    client = TestClient(application(Service(Served.here(decoder.pair, decoder.profile, "toy")), hosts=hosts))

    def status(host: str) -> int:
        return client.get("/v1/models", headers={"Host": host}).status_code

    own = ("localhost", "LocalHost:8000", "127.0.0.1:80", "[::1]:8000", "[::1]", "mymachine:1")
    assert {status(host) for host in own} == {200}
    others = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "[::2]", "")
    assert {status(host) for host in others} == {403}
    with bound("0.0.0.0", 0) as listening:
        assert known_hosts("0.0.0.0", listening) is None


@pytest.mark.parametrize(("key", "what"), [("", "is empty"), (" a", "has white space"), ("a\n", "has white space")])
def test_keys_that_let_everybody_in_or_nobody(key: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = ("serve", "--host", "256.1.1.1")
    with pytest.raises(UsageError, match=f"the API key {what}"):
        invoke(*nowhere, "--api-key", key)
    monkeypatch.setenv("SPECCTL_API_KEY", key)
    with pytest.raises(UsageError, match=f"the API key {what}"):
        invoke(*nowhere)
    with pytest.raises(UsageError, match="cannot listen"):
        invoke(*nowhere, "--api-key", "a b")


async def connected(app: Any) -> tuple[Connection, MagicMock]:
    config = uvicorn.Config(app, http=Connection, log_config=None, ws="none")
    connection = Connection(config, ServerState(), {}, _loop=asyncio.get_running_loop())
    transport = MagicMock(spec=asyncio.Transport)
    transport.get_extra_info.return_value = None
    transport.is_closing.return_value = False
    connection.connection_made(transport)
    return connection, transport


async def aborted(transport: MagicMock) -> bool:
    for _ in range(1000):
        if transport.abort.called:
            return True
        await asyncio.sleep(0.001)
    return False


async def answered(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def test_headers_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "HEADER_SECONDS", 0.01)

    async def run() -> None:
        for began in (b"", b"GET / HTTP/1.1\r\nHost: a\r\n"):
            connection, transport = await connected(answered)
            if began:
                connection.data_received(began)
            assert await aborted(transport)
        connection, transport = await connected(answered)
        for _ in range(2):
            connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            while not connection.cycle.response_complete:
                await asyncio.sleep(0)
        await asyncio.sleep(0.03)
        assert not transport.abort.called
        connection.data_received(b"GET / HTT")
        assert await aborted(transport)

    asyncio.run(run())


async def reads(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body that it was sent, in two pieces whose length nobody tells."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if WIRE in scope:
        scope[WIRE](body)
    else:
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"."})


async def told(*pieces: bytes) -> bytes:
    """What a connection answers to what it receives."""
    connection, transport = await connected(reads)
    for piece in pieces:
        connection.data_received(piece)
    while connection.cycle is not None and not connection.cycle.response_complete:
        await asyncio.sleep(0)
    return b"".join(call.args[0] for call in transport.write.call_args_list)


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
CHUNKS, WHOLE = b"\r\n\r\n5\r\nhello\r\n1\r\n.\r\n0\r\n\r\n", b"\r\n\r\nhello."


@pytest.mark.parametrize(
    ("head", "ends"),
    [
        (b"POST / HTTP/1.1\r\nHost: a\r\n", CHUNKS),
        (b"POST / HTTP/1.1\r\nHost: a\r\n" + UPGRADE, CHUNKS),  # as Java's and curl's clients ask for HTTP/2
        (b"POST / HTTP/1.0\r\n", WHOLE),  # which knows no chunks
    ],
)
def test_clients_of_several_kinds(head: bytes, ends: bytes) -> None:
    sent = head + b"Content-Length: 5\r\n\r\nhello"
    assert asyncio.run(told(sent)).endswith(ends)
    assert asyncio.run(told(*(sent[place : place + 7] for place in range(0, len(sent), 7)))).endswith(ends)


def test_headers_that_do_not_end() -> None:
    pieces = [b"GET / HTTP/1.1\r\nHost: a\r\nA: ", *[b"a" * 10_000] * 2]
    assert asyncio.run(told(*pieces)).startswith(b"HTTP/1.1 400 ")
    assert asyncio.run(told(*pieces[:2])) == b""


def test_answers_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "UNREAD_SECONDS", 0.01)

    async def run() -> None:
        connection, transport = await connected(answered)
        connection.pause_writing()
        connection.resume_writing()
        await asyncio.sleep(0.03)
        assert not transport.abort.called
        connection.pause_writing()
        assert await aborted(transport)
        connection.connection_lost(None)

    asyncio.run(run())


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_second_signal_ends_texts(
    decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch, number: int, ends: type[BaseException]
) -> None:
    play = Session.play

    def forever(session: Session, *asked: Any) -> Iterator[Round]:
        first = next(play(session, *asked))
        while True:
            sleep(0.001)
            yield first

    monkeypatch.setattr(Session, "play", forever)
    service = Service(Served.here(decoder.pair, decoder.profile, "toy"))
    listener = Listener(application(service), service, 600)

    def ask(url: str) -> None:
        body = {"prompt": "the th", "stream": True, "specctl": {"rounds": True}}
        with (
            suppress(httpx.HTTPError),
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer,
        ):
            for _ in answer.iter_lines():
                if not service.thread.closing:
                    os.kill(os.getpid(), number)
                    until = monotonic() + 30
                    while not service.thread.closing and monotonic() < until:
                        sleep(0.001)
                    assert service.thread.running == 1
                    os.kill(os.getpid(), number)

    with bound("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, address_of(listening))
        with pytest.raises(ends) as raised:
            listener.serve_on(listening)
        asking.result()
    assert getattr(raised.value, "code", 143) == 143
    assert not service.thread.alive


def test_a_second_signal_does_not_wait_for_a_pass(
    decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = Event()

    def stuck(*_: Any) -> Iterator[Round]:
        release.wait(10)
        yield from ()

    monkeypatch.setattr(Session, "play", stuck)
    monkeypatch.setattr(listening_module, "LAST_SECONDS", 0.01)
    service = Service(Served.here(decoder.pair, decoder.profile, "toy"))
    listener = Listener(application(service), service, 600)

    def end() -> None:
        for reached in (lambda: service.thread.running, lambda: service.thread.closing):
            until = monotonic() + 10
            while not reached() and monotonic() < until:
                sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)

    with bound("127.0.0.1", 0) as listening, ThreadPoolExecutor(2) as threads:
        url = f"{address_of(listening)}/v1/completions"
        asked, ended = threads.submit(httpx.post, url, json={"prompt": "a"}, timeout=30), threads.submit(end)
        try:
            with pytest.raises(SystemExit):
                listener.serve_on(listening)
            assert service.thread.alive, "the pass still goes on"
        finally:
            release.set()
        ended.result()
        assert (asked.result().status_code, asked.result().json()["error"]["code"]) == (503, "unavailable")
    assert "Traceback" not in caplog.text
    service.thread.join(30)


@pytest.mark.parametrize("signals", [1, 2])
def test_signals_end_a_grammar_that_is_compiled(
    decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signals: int
) -> None:
    monkeypatch.setattr(trials, "PROGRAM", "tests.support.waiting_grammars")
    monkeypatch.setattr(grammar, "_MADE", WeakKeyDictionary())
    service = Service(Served.here(decoder.pair, decoder.profile, "toy"))
    listener = Listener(application(service), service, 600)
    path = tmp_path / "process"
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"title": f"works {path}"}}}

    def end() -> None:
        until = monotonic() + 60
        while not path.exists() and monotonic() < until:
            sleep(0.01)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            sleep(0.001)

    with bound("127.0.0.1", 0) as listening, ThreadPoolExecutor(2) as threads:
        url = f"{address_of(listening)}/v1/completions"
        asked = threads.submit(httpx.post, url, json={"prompt": "a", "response_format": form}, timeout=60)
        ended = threads.submit(end)
        with suppress(SystemExit):  # of the second signal, if it came before the first had ended it
            listener.serve_on(listening)
        ended.result()
        assert (asked.result().status_code, asked.result().json()["error"]["code"]) == (503, "unavailable")
    until = monotonic() + 60
    while not gone(path) and monotonic() < until:
        sleep(0.01)
    assert gone(path)
    assert not [thread for thread in enumerate_threads() if thread.name == "grammar"]


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_that_the_server_ends(decoder: specctl.Decoder, begun: bool) -> None:
    lines: list[dict[str, Any]] = []
    sent: list[dict[str, Any]] = []
    service = Service(Served.here(decoder.pair, decoder.profile, "toy"))

    async def waits(_scope: Any, _receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        scope = {"type": "http", "method": "GET", "path": "/"}
        log = AccessLog(waits, lines.append, ServerMetrics(service.thread))
        answering = asyncio.create_task(log(scope, asyncio.Event().wait, send))  # type: ignore[arg-type]
        while begun and not sent:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        answering.cancel()
        await answering

    asyncio.run(run())
    assert [one["status"] for one in sent if "status" in one] == [200 if begun else 503]
    assert lines[0]["error"] == "the server is shutting down"


def test_slow_headers_end_a_real_connection(decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "HEADER_SECONDS", 0.01)
    service = Service(Served.here(decoder.pair, decoder.profile, "toy"))
    listener = Listener(application(service), service, 5)
    assert listener.config.limit_concurrency == service.limits.waiting + 1 + 256

    def ask(address: tuple[str, int]) -> bytes:
        try:
            with socket.create_connection(address, 30) as client, suppress(ConnectionError):
                client.sendall(b"GET /health HT")
                return client.recv(1)
            return b""
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with bound("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, listening.getsockname()[:2])
        listener.serve_on(listening)
        assert asking.result() == b""


def test_the_log_is_json_in_a_file_and_a_short_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {
        "time": "2026-11-28T12:00:03.123+00:00",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions\x1b[2J",
        "status": 200,
        "ms": 310.2,
        "prompt_tokens": 4,
        "completion_tokens": 64,
        "drafted": 50,
        "accepted": 40,
        "finish_reason": "length",
    }
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log(line)
    assert json.loads(sys.stderr.getvalue()) == line  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stderr", Terminal())
    log(line)
    log({**line, "drafted": 0, "completion_tokens": 1, "error": "no place", "gone": True})
    first, second = sys.stderr.getvalue().splitlines()  # type: ignore[attr-defined]
    assert re.fullmatch(r"\d\d:\d\d:03 POST /v1/completions\S+ 200, 64 tokens, 80% of 50 accepted, 310.2 ms", first)
    assert "\x1b" not in first
    assert second.endswith(' 200, 1 token, 310.2 ms, the client is gone, error: "no place"')
