"""A server of its own and the `openai` client."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.invoked import invoke
from tests.support.onnx_models import needs_onnx

pytestmark = [pytest.mark.slow, needs_onnx]
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
PROMPTS = ["Once upon a time", "The old man", "One day, a girl", "It was"]


@contextmanager
def serving(*flags: str, **environment: str) -> Iterator[tuple[str, "subprocess.Popen[str]", list[str]]]:
    """The URL of a server, its process, and what it says."""
    command = [sys.executable, "-m", "specctl", "serve", "--port", "0", "-n", "16", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"http://[^/]+", line):
            break
    else:
        pytest.fail("".join(lines))
    reading = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
    reading.start()
    try:
        yield found[0], process, lines
    finally:
        process.kill()
        process.wait()
        reading.join()
        process.stderr.close()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, "subprocess.Popen[str]", list[str]]]:
    with serving("--batch", "4", SPECCTL_API_KEY="open sesame") as found:
        yield found


def test_the_session_of_the_page(server: tuple[str, "subprocess.Popen[str]", list[str]]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (session,) = re.findall(r"<!-- session -->\n```python\n(.*?)```", page, re.S)
    expected = re.findall(r"```text\n(.*?)```", page, re.S)[0]
    session = session.replace("http://127.0.0.1:8000", server[0]).replace('"none"', '"open sesame"')
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(session, "docs/serve.md", "exec"), {})
    assert out.getvalue() == expected


def test_texts_are_those_of_generate_and_errors_those_of_the_client(
    server: tuple[str, "subprocess.Popen[str]", list[str]], tmp_path: Path
) -> None:
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="open sesame", max_retries=0) as client:
        records = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
        (tmp_path / "in.jsonl").write_text(records)
        done = invoke("generate", "-i", str(tmp_path / "in.jsonl"), "-n", "16", "-q")
        expected = [json.loads(line)["completion"] for line in done.stdout.splitlines()]
        model = client.models.list().data[0].id
        whole = [client.completions.create(model=model, prompt=prompt) for prompt in PROMPTS]
        assert [one.choices[0].text for one in whole] == expected
        streams = [client.completions.create(model=model, prompt=prompt, stream=True) for prompt in PROMPTS]
        assert ["".join(chunk.choices[0].text for chunk in stream) for stream in streams] == expected
        with client.completions.create(model=model, prompt="a", max_tokens=200, stream=True) as stream:
            next(iter(stream))  # and goes away
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="unknown parameter"):
            client.completions.create(model=model, prompt="a", extra_body={"temprature": 1})
    with (
        openai.OpenAI(base_url=f"{server[0]}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    assert not any("sesame" in line or "girl" in line for line in server[2])


def test_the_first_signal_lets_texts_end() -> None:
    with serving("--batch", "1", "--target", "embedded:target") as (url, process, _):
        body = {"prompt": "The", "max_tokens": 120, "stream": True, "logit_bias": {"0": -100}}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(60) == 0
