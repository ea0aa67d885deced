"""llama.cpp: its server, which is asked over HTTP on this machine; all in the process group of this one."""

import json
import re
import socket
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path
from time import sleep
from typing import Any

from .serving import Answer, serve

SHORT = {"float16": "f16", "float32": "f32"}
LONGEST = 16
"""Most tokens of a draft that ends by its confidence."""


def version() -> str:
    said = subprocess.run([sys.argv[2], "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version: *([^\n]+)", said.stdout + said.stderr)
    if found is None:
        raise RuntimeError(f"{sys.argv[2]} --version tells no version")
    return found[1]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Pair:
    """The models that a question names, in a server with one slot."""

    def __init__(self, question: dict[str, Any]) -> None:
        folder, cache = Path(question["folder"]), SHORT[question["cache"]]
        threads = str(question["threads"])
        self._port = free_port()
        command = [sys.argv[2], "-m", str(folder / "target.gguf"), "-c", str(question["context"]), "-np", "1"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "-t", threads, "-tb", threads]
        # A repeated prompt would otherwise cost nothing.
        command += ["--cache-ram", "0", "-ctk", cache, "-ctv", cache]
        if cache == "f32":
            command += ["-fa", "off"]  # it is slow on such a cache
        if question["draft"] != "none":
            most = question.get("tokens", LONGEST)
            command += ["-md", str(folder / "draft.gguf"), "-ctkd", cache, "-ctvd", cache]
            command += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(most), "--spec-draft-n-min", "0"]
            command += ["--spec-draft-p-min", str(question.get("threshold", 0.0))]
        self._stop = question["stop"]
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        while not self._ready():
            if self._server.poll() is not None:
                raise RuntimeError(f"{sys.argv[2]} ended with exit code {self._server.returncode}")
            sleep(0.05)

    def run(self, batch: list[list[int]], most: int) -> list[Answer]:
        (ids,) = batch  # there is one slot
        # Without the other samplers nothing but the largest logit is looked for.
        sampling = {"temperature": 0, "samplers": ["temperature"]}
        question = {"prompt": ids, "n_predict": most, "cache_prompt": False, "return_tokens": True, **sampling}
        status, text = self._ask("POST", "/completion", json.dumps(question))
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {text[:200]}")
        found = json.loads(text)
        tokens, times = [int(token) for token in found["tokens"]], found["timings"]
        if found.get("stop_type") == "eos" and self._stop and tokens[-1:] != self._stop[:1]:
            tokens.append(self._stop[0])
        accepted = int(times.get("draft_n_accepted", 0))
        seconds = (times["prompt_ms"] + times["predicted_ms"]) / 1e3
        passes, drafted = len(tokens) - accepted, int(times.get("draft_n", 0))
        return [Answer(tokens, seconds, times["prompt_ms"] / 1e3, passes, drafted)]

    def _ready(self) -> bool:
        try:
            return self._ask("GET", "/health")[0] == 200
        except OSError:
            return False

    def _ask(self, method: str, path: str, body: str = "") -> tuple[int, str]:
        connection = HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


if __name__ == "__main__":
    serve(version, Pair)
