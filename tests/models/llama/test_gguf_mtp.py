"""MTP layers of GGUF files as drafts on llama.cpp."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.errors import ModelError
from specctl.models.llama.library import BF16
from specctl.models.llama.model import LlamaModel
from specctl.models.llama.mtp import MtpPasses
from specctl.models.llama.passes import LlamaPasses
from specctl.models.llama.rounding import Rounding
from specctl.models.passes.watching import LAST
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from tests.support.pretended_llama import PretendedLlama, needs_llama
from tests.support.tiny_gguf import write

WORDS = 320
EXACT = Rounding(least=2, cache=BF16)


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.slow)])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with an MTP layer, for a pretended library or for llama.cpp."""
    if request.param == "pretended":
        PretendedLlama().install(monkeypatch)
    else:
        needs_llama()
    return write(tmp_path / "m.gguf", "qwen35", "Q8_0", mtp=1)


def opened(file: Path, slots: int = 1) -> tuple[LlamaPasses, MtpPasses]:
    model = LlamaModel.open(file, device="cpu", repack=False)
    assert model.ahead == 1
    passes = LlamaPasses(model, WORDS, 1024, EXACT, 1, slots)
    passes.watch([LAST])
    return passes, MtpPasses(model, WORDS, 1024, 1)


def fresh_draft(file: Path, text: list[int], count: int) -> list[Any]:
    """The rows of ``count`` drafted tokens after a text that a new head reads at once."""
    passes, head = (Slot(each) for each in opened(file))
    states = passes.extend(text[:-1], 0).states
    assert states is not None
    head.observe_states(0, states)
    rows = [head.extend(text, 1).columns[-1].copy()]
    for _ in range(count - 1):
        rows.append(head.extend([int(rows[-1].argmax())], 1).columns[-1].copy())
    return rows


def test_drafts_depend_on_the_text_alone(file: Path) -> None:
    draws = random.Random(0)
    text = [draws.randrange(4, 260) for _ in range(200)]
    passes, head = (Slot(each) for each in opened(file))
    states = passes.extend(text[:19], 0).states
    assert states is not None
    assert states[LAST].shape == (19, 64)
    head.observe_states(0, states)
    end = 20
    while end < 150:
        count = draws.randint(1, 5)
        rows: list[Any] = []
        for _ in range(count):
            tokens = [int(rows[-1].argmax())] if rows else text[head.length : end]
            rows.append(head.extend(tokens, 1).columns[-1].copy())
        if end < 40 or end > 130:
            assert np.array_equal(rows, fresh_draft(file, text[:end], count))
        kept = draws.randint(0, count)  # of the draft, whose tokens are taken for the text's
        block = text[passes.length : end + kept]
        found = passes.extend([*block, 5], kept + 1)
        passes.rollback(end + kept)
        head.rollback(end + kept)
        assert found.states is not None
        head.observe_states(end + kept - len(block), {LAST: found.states[LAST][: len(block)]})
        end += kept + 1


def test_states_are_those_of_each_token(file: Path) -> None:
    text = [random.Random(1).randrange(4, 260) for _ in range(700)]
    whole = Slot(opened(file)[0]).extend(text, 0).states
    assert whole is not None
    passes, _ = opened(file, 2)
    states: list[Any] = [[], []]
    for start in range(0, 690, 30):
        requests = [Request(slot, start, text[start : start + 30 - slot], 1) for slot in range(2)]
        requests = [*requests, Request(1, start + 29, text[start + 29 : start + 30], 1)]
        for group in (requests[:2], requests[2:]):
            for request, found in zip(group, passes.run(group), strict=True):
                states[request.slot].append(found.states[LAST])
        assert found.states[LAST].shape == (1, 64)
    for each in states:
        assert np.array_equal(np.concatenate(each), whole[LAST][:690])


def test_a_file_without_such_layers_shows_no_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PretendedLlama().install(monkeypatch)
    passes = LlamaPasses(LlamaModel.open(write(tmp_path / "m.gguf"), device="cpu"), WORDS, 1024, EXACT, 1)

    with pytest.raises(IndexError, match="no layer -1"):
        passes.watch([LAST])


def test_states_of_passes_without_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PretendedLlama().install(monkeypatch)
    file = write(tmp_path / "m.gguf", llama_nextn_predict_layers=1, layers=3)
    passes = LlamaPasses(LlamaModel.open(file, device="cpu"), WORDS, 1024, Rounding(), 1)
    slot = Slot(passes)
    slot.extend([5, 6, 7], 1)

    slot.watch([LAST])

    states = slot.extend([8, 9], 1).states
    assert states is not None
    assert states[LAST].shape == (2, 64)


def test_a_file_without_such_layers_has_no_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PretendedLlama().install(monkeypatch)
    model = LlamaModel.open(write(tmp_path / "m.gguf"), device="cpu")

    with pytest.raises(ModelError, match="the model has no MTP layers"):
        MtpPasses(model, WORDS, 1024, 1)
