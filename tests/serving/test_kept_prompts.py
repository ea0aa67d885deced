"""What a server keeps of prompts: it is not read again, and no text has anything of another one's."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import specctl
from specctl.serving.endpoints import application
from specctl.serving.served import Served
from specctl.serving.service import Service
from specctl.text_engine.pair_rows import passes_of
from tests.support.checkpoints import save_model
from tests.support.onnx_models import needs_onnx
from tests.support.rotating_models import CONFIGS

pytestmark = needs_onnx
COMMON = [5 + number * 7 % 50 for number in range(60)]
TALKS: Sequence[list[int]] = (
    [*COMMON, 9, 8],
    [*COMMON, 9, 7, 6],
    [*COMMON[:45], 11],
    [12, *COMMON],
    COMMON[:33],
    [*COMMON, 9, 8],
)


def client_of(decoder: specctl.Decoder, rows: int) -> TestClient:
    passes = passes_of(decoder.pair, rows) if rows > 1 else None
    return TestClient(application(Service(Served.here(decoder.pair, decoder.profile, "toy", passes))))


def told(client: TestClient, prompt: list[int], **more: Any) -> Any:
    body = {"prompt": prompt, "logprobs": 1, "max_tokens": 30, "logit_bias": {"0": -100}, **more}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    return choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]


def counted(client: TestClient) -> tuple[float, float]:
    """Tokens of prompts that were read and kept."""
    lines = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[0] != "#")
    return tuple(float(lines.get(f'specctl_prompt_tokens_total{{how="{how}"}}', 0)) for how in ("read", "kept"))  # type: ignore


HOW: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"specctl": {"draft": False}},
    {"specctl": {"policy": "svip"}},
)
ASKED = [(talk, HOW[number % len(HOW)]) for number, talk in enumerate(TALKS)]


@pytest.fixture(scope="module")
def fresh(decoder: specctl.Decoder) -> list[Any]:
    """What a server of its own answers to each."""
    found = []
    for prompt, how in ASKED:
        with client_of(decoder, 1) as client:
            found.append(told(client, prompt, **how))
            assert counted(client) == (len(prompt), 0)
    return found


@pytest.mark.parametrize("rows", [1, 3])
def test_texts_are_those_of_a_fresh_server(decoder: specctl.Decoder, fresh: list[Any], rows: int) -> None:
    assert len({tuple(tokens) for _, _, tokens in fresh}) > 3
    with client_of(decoder, rows) as client, ThreadPoolExecutor(4) as threads:
        assert [told(client, prompt, **how) for prompt, how in ASKED] == fresh
        assert list(threads.map(lambda one: told(client, one[0], **one[1]), ASKED * 2)) == fresh * 2
        read, kept = counted(client)
    assert read + kept == 3 * sum(len(prompt) for prompt, _ in ASKED)
    assert kept > 300


@pytest.mark.parametrize("rows", [1, 3])
def test_a_conversation_that_comes_again_reads_what_is_new(decoder: specctl.Decoder, rows: int) -> None:
    with client_of(decoder, rows) as client:
        client.post("/v1/completions", json={"prompt": COMMON, "max_tokens": 4})
        again = client.post("/v1/completions", json={"prompt": [*COMMON, 5, 6, 7], "max_tokens": 4})
        assert again.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": len(COMMON)}
        assert counted(client) == (len(COMMON) + 3, len(COMMON))


@pytest.mark.slow
def test_a_text_that_is_read_anew_does_not_count_its_prompt_twice(tmp_path: Path) -> None:
    """It crosses the border at which its model rotates otherwise, and so did the one whose text another row holds."""
    config = CONFIGS["phi3"](70)
    config.vocab_size = 258
    where = ["target.device=cpu", "target.dtype=float32", "engine=eager"]
    decoder = specctl.load(target=str(save_model(tmp_path, config)), draft="prompt:lookup", overrides=where)
    with client_of(decoder, 2) as client, ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: told(client, COMMON), range(6)))
        assert len(set(map(str, found))) == 1
        read, kept = counted(client)
    assert read + kept == 6 * len(COMMON)
