"""`bench --url` and `chat --url`: a server of our own, and servers that behave badly."""

import asyncio
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import specctl
from specctl.benchmark import server_load
from specctl.benchmark.server_load import LOAD
from specctl.commands.talk import talk_with
from specctl.errors import SpecctlError, UsageError
from specctl.outputs import Outputs
from specctl.remote import AnswerError, Usage, chunk_of, connected, drafted_of
from specctl.serving.endpoints import application
from specctl.serving.listening import address_of, bound
from specctl.serving.served import Served
from specctl.serving.service import Service
from tests.support.invoked import invoke
from tests.support.onnx_models import needs_onnx, small_pair

RECORDS = [
    {"id": "a", "prompt": "the th"},
    {"id": "b", "prompt": "of the", "max_tokens": 4},
    {"id": "c", "turns": ["an", "it"]},
]
DIED = 'data: {"error": {"message": "died"}}\n\n'
PIECES = ["one ", "two ", "three"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a small pair answers."""
    folder = tmp_path_factory.mktemp("pair")
    small_pair(folder)
    models = {"target": str(folder / "target"), "draft": str(folder / "draft")}
    settings = ["engine=onnx", "sampling.max_new_tokens=12"]
    decoder = specctl.load(**models, policy="constant:draft_length=3", overrides=settings)
    app = application(Service(Served.here(decoder.pair, decoder.profile, "toy")), key="secret")
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    with bound("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        yield address_of(listening)
        server.should_exit = True
        thread.join(30)


Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@contextmanager
def pretended(answer: Answer, models: tuple[str, ...] = ("other",)) -> Iterator[str]:
    """A server that answers requests for texts so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {"data": [{"id": one} for one in models]} if self.path == "/v1/models" else None
            sent(self, 200 if found else 404, json.dumps(found or {}))

        def do_POST(self) -> None:
            answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sent(handler: BaseHTTPRequestHandler, status: int, body: str) -> None:
    handler.send_response(status)
    handler.end_headers()
    handler.wfile.write(body.encode())


def streamed(*pieces: str, end: str = "length", more: str = "data: [DONE]\n\n") -> str:
    choices = [{"text": piece} for piece in pieces] + ([{"text": "", "finish_reason": end}] if end else [])
    return "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + more


def records(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@needs_onnx
def test_a_server_is_measured(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECCTL_API_KEY", "secret")
    given, output = records(tmp_path, RECORDS), tmp_path / "out.jsonl"
    flags = ["-i", given, "--raw", "-n", 9, "--concurrency", "1,3", "-o", output, "--repeats", 2, "--json"]
    found = json.loads(invoke("bench", "--url", url, *flags).stdout)
    assert [(one["concurrency"], one["requests"], one["failed"]) for one in found["levels"]] == [(1, 8, {}), (3, 8, {})]
    assert {(one["tokens"], one["tokens_counted_by"]) for one in found["levels"]} == {(62, "server")}
    assert all(0 < one["acceptance_rate"] <= 1 for one in found["levels"])
    assert all(one["ttft_ms"]["p50"] <= one["e2el_ms"]["p50"] for one in found["levels"])
    header, *asked = LOAD.read(output)
    assert (header.model, header.concurrency, len(asked)) == ("toy", [1, 3], 16)
    texts = {(one.prompt, one.turn): one.text for one in asked}
    assert all(texts[one.prompt, one.turn] == one.text for one in asked)
    shown = invoke("bench", "--url", url, "-i", given, "--raw", "-n", 3, "--limit", 2, "-q").stdout
    assert "acceptance rate" in shown
    assert "TPOT" in shown


@needs_onnx
def test_a_conversation_with_a_server(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "talk.jsonl"
    lines = f"the th\n/policy svip:threshold=0.4\n/retry\n/set regex=a\n/stats\n/save {saved}\nof\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "specctl.models.loading.assembly", None)  # no model may be loaded
        from rich.console import Console

        told, wrote = io.StringIO(), io.StringIO()
        server = connected(url, "secret", "toy")
        flags = {"prompt.chat": False, "sampling.max_new_tokens": 6}
        with Outputs() as outputs:
            console = Console(file=told, width=200)
            assert talk_with(server, flags, console, wrote, outputs, person=False, quiet=False)  # type: ignore[arg-type]
    first, second, third, *_ = wrote.getvalue().split("\n")
    assert first == second != third
    assert json.loads(saved.read_text())["completion"] == [first]
    assert "policy svip:threshold=0.4" in told.getvalue()
    assert "generated tokens                12" in told.getvalue()


def test_failures_are_counted(tmp_path: Path) -> None:
    answers: dict[str, Answer] = {
        "fine": lambda http, _: sent(http, 200, streamed(*PIECES)),
        "busy": lambda http, _: sent(http, 500, '{"error": {"message": "no memory"}}'),
        "torn": lambda http, _: sent(http, 200, streamed(*PIECES, end="", more="")),
        "odd": lambda http, _: sent(http, 200, "data: {]\n\n"),
        "ended": lambda http, _: sent(http, 200, streamed("one", end="", more=DIED)),
    }
    given = records(tmp_path, [{"id": name, "prompt": name} for name in answers])
    with pretended(lambda http, body: answers[body["prompt"]](http, body)) as url:
        output = tmp_path / "out.jsonl"
        with pytest.raises(SpecctlError, match="4 of 5 requests failed") as raised:
            invoke("bench", "--url", url, "-i", given, "--concurrency", 2, "-o", output)
        assert raised.value.exit_code == 1
        _, *asked = LOAD.read(output)
        found = {one.prompt: one.error for one in asked}
        assert found == {
            "fine": None,
            "busy": "http_500",
            "torn": "broken_stream",
            "odd": "broken_stream",
            "ended": "error",
        }
        (fine,) = [one for one in asked if one.error is None]
        assert (fine.text, fine.tokens, fine.counted, fine.finish_reason) == ("one two three", 3, True, "length")
        busy = records(tmp_path, [{"prompt": "busy"}])
        with pytest.raises(AnswerError, match="the server answers 500: no memory"):
            invoke("bench", "--url", url, "-i", busy)
        with pytest.raises(SpecctlError, match="1 of 1 requests failed"):
            invoke("bench", "--url", url, "-i", busy, "--warm-up", 0)


def test_an_interrupt_shows_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(load: server_load.ServerLoad, concurrency: int, warm_up: int) -> None:
        if concurrency == 2:
            raise KeyboardInterrupt
        before(load, concurrency, warm_up)

    before = server_load.ServerLoad.run
    monkeypatch.setattr(server_load.ServerLoad, "run", interrupted)
    given = records(tmp_path, [{"id": "a", "prompt": "a"}])
    with pretended(lambda http, _: sent(http, 200, streamed(*PIECES))) as url:
        done = invoke("bench", "--url", url, "-i", given, "--concurrency", "1,2", code=130)
    assert "Interrupted: 1 request without a whole answer" in " ".join(done.stdout.split())


def test_what_cannot_be_asked() -> None:
    for flags, what in (
        (["bench", "--concurrency", 2], "--concurrency applies only to a server"),
        (
            ["bench", "--url", "http://x", "--policy", "svip", "--oracle"],
            "--url measures a server, so --policy, --oracle",
        ),
        (["chat", "--url", "http://x", "--engine", "eager"], "--url asks a server, so --engine has no effect"),
        (["bench", "--url", "x"], "--url x is not the URL"),
        (["bench", "--url", "http://x", "--concurrency", "0"], "--concurrency 0 is not a list"),
    ):
        with pytest.raises(UsageError, match=what):
            invoke(*flags)
    with pytest.raises(AnswerError, match="no server answers"):
        invoke("bench", "--url", "http://127.0.0.1:1")
    with pretended(lambda *_: None, ("a", "b")) as url:
        with pytest.raises(UsageError, match="has 2 models: a, b"):
            connected(url, None, None)
        with pytest.raises(UsageError, match="has no model 'c', only a, b"):
            connected(url, None, "c")
        assert connected(url.removesuffix("/v1"), None, "b").model == "b"


@needs_onnx
def test_a_wrong_key(url: str) -> None:
    with pytest.raises(AnswerError, match="the server answers 401: the API key is missing") as raised:
        connected(url, "wrong", None)
    assert "--api-key" in raised.value.hint


def test_without_httpx_there_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.remote.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="--url needs httpx") as raised:
        invoke("chat", "--url", "http://x")
    assert raised.value.hint.startswith('pip install "httpx')


def test_what_other_servers_tell_of_drafts() -> None:
    ours = 'specctl_draft_tokens_total{outcome="accepted"} 6.0\nspecctl_draft_tokens_total{outcome="rejected"} 2.0\n'
    name = "vllm:spec_decode_num_"
    theirs = f'{name}draft_tokens_total{{model_name="m"}} 8\n{name}accepted_tokens_total{{model_name="m"}} 6\n'
    assert drafted_of(ours) == drafted_of(theirs) == Usage(accepted=6, rejected=2)
    assert drafted_of("# HELP a\nother 3\n") is None
    timings = {"choices": [], "timings": {"draft_n": 8, "draft_n_accepted": 6}}
    chunk = chunk_of(f"data: {json.dumps(timings)}")
    assert chunk is not None
    assert chunk.usage == Usage(accepted=6, rejected=2)


def test_a_conversation_with_a_server_takes_neither_torch_nor_transformers() -> None:
    run = """
import sys
from specctl.__main__ import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "onnxruntime") if name in sys.modules], file=sys.stderr)
"""
    asked: list[dict[str, Any]] = []

    def answer(http: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        asked.append(body)
        sent(http, 200, streamed(*PIECES))

    with pretended(answer) as url:
        flags = [sys.executable, "-c", run, "chat", "--url", url, "--system", "brief", "-q"]
        done = subprocess.run(flags, input="hi\n", capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "one two three\n"), done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    assert [(one["role"], one["content"]) for one in asked[0]["messages"]] == [("system", "brief"), ("user", "hi")]
