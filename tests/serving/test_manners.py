"""Clients that take their time or call the server by another's name, and signals that come twice."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic, sleep
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
import uvicorn
from onnx_models import needs_onnx
from starlette.testclient import TestClient
from uvicorn.server import ServerState

import specctl
from specctl.records import Round
from specctl.serving.connection import Connection
from specctl.serving.endpoints import application
from specctl.serving.listening import Listener, address_of, bound, known_hosts
from specctl.serving.order import Order
from specctl.serving.service import Service
from specctl.serving.text_writer import TextWriter

pytestmark = needs_onnx


def test_a_server_is_called_by_its_own_name(decoder: specctl.Decoder) -> None:
    with bound("127.0.0.1", 0) as listening:
        hosts = known_hosts("MyMachine", listening)
    client = TestClient(application(Service(decoder.pair, decoder.profile, "toy"), hosts=hosts))

    def status(host: str) -> int:
        return client.get("/v1/models", headers={"Host": host}).status_code

    own = ("localhost", "LocalHost:8000", "127.0.0.1:80", "[::1]:8000", "[::1]", "mymachine:1")
    assert {status(host) for host in own} == {200}
    others = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", "[::2]", "")
    assert {status(host) for host in others} == {403}
    with bound("0.0.0.0", 0) as listening:
        assert known_hosts("0.0.0.0", listening) is None


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
    play = TextWriter.play

    def forever(writer: TextWriter, order: Order) -> Iterator[Round]:
        first = next(play(writer, order))
        while True:
            sleep(0.001)
            yield first

    monkeypatch.setattr(TextWriter, "play", forever)
    service = Service(decoder.pair, decoder.profile, "toy")
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


def test_slow_headers_end_a_real_connection(decoder: specctl.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "HEADER_SECONDS", 0.01)
    service = Service(decoder.pair, decoder.profile, "toy")
    listener = Listener(application(service), service, 5)

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
