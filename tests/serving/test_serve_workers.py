"""`specctl serve --workers`: flags that cannot be, and workers that are processes, one of which is killed."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
from test_openai_client import serving

from specctl.commands import loading
from specctl.errors import ModelError, UsageError
from specctl.serving.listening import bound
from specctl.text_engine.job import ReplicaError
from tests.support.invoked import invoke
from tests.support.onnx_models import needs_onnx

PROMPTS = ["Once upon a time", "The old man", "One day, a girl", "It was"]
LONG: dict[str, Any] = {"max_tokens": 300, "logit_bias": {"0": -100}, "specctl": {"policy": "constant:draft_length=3"}}
"""A text that goes on until the limit, by a policy that reads no clock."""


@pytest.mark.parametrize("workers", ["0", "-1", "many", "1.5"])
def test_what_is_no_number_of_workers(workers: str) -> None:
    with pytest.raises(UsageError, match=f"--workers needs a number or auto, not {workers}"):
        invoke("serve", "--workers", workers)


def test_a_port_that_is_in_use_is_told_before_anything_is_loaded() -> None:
    with bound("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            invoke("serve", "--workers", 2, "--port", port)


def test_shards_that_are_more_than_the_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    flags = ("--workers", 2, "--set", "target.shards=2", "--port", 0, "-q")
    with pytest.raises(UsageError, match="2 replicas of 2 GPUs each do not fit on 3") as raised:
        invoke("serve", *flags)
    assert "use --workers 1" in raised.value.hint


def test_workers_that_all_end_while_they_load_are_models_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any, **__: Any) -> Any:
        raise ReplicaError("no replica is left: the last one was ended by signal 9", "a hint about records")

    monkeypatch.setattr(loading, "start_replicas", ended)
    with pytest.raises(ModelError, match="no replica is left") as raised:
        invoke("serve", "--workers", 2, "--port", 0, "-q")
    assert (raised.value.exit_code, raised.value.hint) == (3, "Fewer --workers need less memory.")


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def wait_until(true: Any, seconds: float = 120.0) -> None:
    due = monotonic() + seconds
    while not true():
        assert monotonic() < due, "it never came true"
        sleep(0.05)


def gauge(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[-1])


def events(lines: Any) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line]


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
@needs_onnx
def test_a_worker_is_killed_and_the_server_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    done = invoke("generate", "-i", str(tmp_path / "in.jsonl"), "-n", "16", "-q")
    greedy = [json.loads(line)["completion"] for line in done.stdout.splitlines()]
    with serving("--batch", "4", "--workers", "2") as (url, process, lines), ThreadPoolExecutor(8) as threads:
        path = f"{url}/v1/completions"
        wait_until(lambda: gauge(url, "specctl_workers_ready") == 2)
        workers = children(process.pid)
        assert len(workers) == 2

        def text(prompt: str, **more: Any) -> str:
            answer = httpx.post(path, json={"prompt": prompt, **more}, timeout=120)
            return str(answer.json()["choices"][0]["text"])

        assert list(threads.map(text, PROMPTS * 4)) == greedy * 4
        sampled = {"temperature": 1.0, "seed": 7, **LONG}
        alone = text("The sun", **sampled)
        assert list(threads.map(lambda _: text("The sun", **sampled), range(6))) == [alone] * 6

        begun = Barrier(5)

        def stream(_: int) -> str:
            with httpx.stream("POST", path, json={"prompt": "The sun", "stream": True, **sampled}, timeout=120) as told:
                told_lines = told.iter_lines()
                first = next(told_lines)
                begun.wait(120)
                *pieces, end = events([first, *told_lines])
            assert end == "[DONE]"
            return "".join(json.loads(piece)["choices"][0]["text"] for piece in pieces)

        streams = [threads.submit(stream, number) for number in range(4)]
        begun.wait(120)
        os.kill(workers[0], signal.SIGKILL)
        assert [one.result() for one in streams] == [alone] * 4
        wait_until(lambda: gauge(url, "specctl_workers_ready") == 2)
        assert any("replica 1 was ended by signal 9; it is started again" in line for line in lines)
        assert workers[1] in children(process.pid)
        assert text(PROMPTS[0]) == greedy[0]

        with httpx.stream("POST", path, json={"prompt": "The sun", "stream": True, **sampled}, timeout=120) as told:
            told_lines = told.iter_lines()
            next(told_lines)
            workers = children(process.pid)
            process.send_signal(signal.SIGTERM)
            assert events(told_lines)[-1] == "[DONE]"
        assert process.wait(60) == 0
        assert not any(map(alive, workers))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
@needs_onnx
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_server_that_is_killed_and_at_a_second_signal(how: signal.Signals) -> None:
    with serving("--batch", "1", "--workers", "1", "--engine", "eager") as (url, process, _):
        workers = children(process.pid)
        body = {"prompt": "The", "stream": True, **LONG, "max_tokens": 900, "specctl": {"draft": False}}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as told:
            next(told.iter_lines())
            if how == signal.SIGTERM:  # the text must outlast the second signal
                for worker in workers:
                    os.kill(worker, signal.SIGSTOP)
            process.send_signal(how)
            if how == signal.SIGTERM:
                wait_until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503)
                process.send_signal(how)
            assert process.wait(60) == (143 if how == signal.SIGTERM else -9)
        for worker in filter(alive, workers):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGCONT)
        wait_until(lambda: not any(map(alive, workers)))


def alive(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
