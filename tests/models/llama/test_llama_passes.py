"""Passes on llama.cpp: every token's logits are those of the text read token by token, whatever is read with it."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from specctl.errors import ModelError, RecordError
from specctl.models.llama.library import BF16, Library
from specctl.models.llama.model import LlamaModel, cards_for
from specctl.models.llama.passes import ROWS, LlamaPasses
from specctl.models.llama.rounding import Rounding
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from tests.support.pretended_llama import PretendedLlama, needs_llama
from tests.support.tiny_gguf import damaged, write

V, CONTEXT = 320, 1024
PLAIN, LONE, NARROW = Rounding(cache=BF16), Rounding(least=2, cache=BF16), Rounding(least=2, most=7, repack=False)
Opener = Callable[..., LlamaModel]


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.slow)])
def opener(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Makes and opens a tiny model; its weights are of 32 bits, whose lone rows round otherwise."""
    if request.param == "real":
        needs_llama()
    else:
        PretendedLlama(lone=1e-3).install(monkeypatch)

    def opened(architecture: str = "llama", kind: str = "F32", **more: Any) -> LlamaModel:
        file = write(tmp_path / f"{architecture}-{kind}.gguf", architecture, kind, context=CONTEXT, **more)
        return LlamaModel.open(file, device="cpu")

    return opened


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedLlama:
    return PretendedLlama().install(monkeypatch)


def some_text(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(4, V, length)]


def rows_of(passes: LlamaPasses, text: Sequence[int]) -> Any:
    """Logits ``(T, V)`` of a text that is read token by token."""
    slot = Slot(passes)
    return np.stack([slot.extend([token], 1).columns[0].copy() for token in text])  # type: ignore[union-attr]


def slot_of(model: LlamaModel, rounding: Rounding = LONE) -> Slot:
    return Slot(LlamaPasses(model, V, CONTEXT, rounding, 1))


@pytest.mark.parametrize("rounding", [LONE, NARROW])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_widths_and_rollbacks(opener: Opener, architecture: str, rounding: Rounding) -> None:
    text, draws = some_text(330), np.random.default_rng(0)
    slot = slot_of(opener(architecture), rounding)
    expected, place = rows_of(slot.passes, text), 0  # type: ignore[arg-type]
    slot = Slot(slot.passes.fresh())
    while place < len(text) - 9:
        right, wrong = int(draws.integers(1, 9)), int(draws.integers(0, 9))
        drafted = text[place : place + right] + some_text(wrong)
        keep = int(draws.integers(1, len(drafted) + 1))

        found = slot.extend(drafted, keep).columns

        rows = slice(max(place, place + len(drafted) - keep), place + right)
        assert np.array_equal(found[: max(0, right - len(drafted) + keep)], expected[rows])
        place += right
        slot.rollback(place)


def test_every_depth(opener: Opener) -> None:
    text = some_text(40)
    slot = slot_of(opener())
    expected = rows_of(slot.passes, text)  # type: ignore[arg-type]
    slot = Slot(slot.passes.fresh())
    for depth in range(len(text)):
        slot.extend([*text[slot.length :], 5], 0)
        slot.rollback(depth)
        assert slot.length == depth
        assert np.array_equal(slot.extend(text[depth:], len(text) - depth).columns, expected[depth:])


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_several_sequences_of_unequal_widths(opener: Opener, architecture: str) -> None:
    text, draws = some_text(200), np.random.default_rng(1)
    alone = LlamaPasses(opener(architecture), V, CONTEXT, LONE, 1)
    expected, passes, lengths = rows_of(alone, text), alone.over(3), [0, 0, 0]
    for _ in range(30):
        requests, right = [], {}
        for slot in range(3):
            if (width := int(draws.integers(0, 7))) and lengths[slot] + width < len(text):
                tokens = text[lengths[slot] : lengths[slot] + width]
                wrong = some_text(int(draws.integers(0, 4)))
                keep = int(draws.integers(0, width + 1)) + len(wrong)
                requests.append(Request(slot, lengths[slot], [*tokens, *wrong], keep))
                right[slot] = (width, keep - len(wrong))
        for request, found in zip(requests, passes.forward(requests), strict=True):
            width, keep = right[request.slot]
            end = lengths[request.slot] = request.after + width
            assert len(found.columns) == request.keep
            assert np.array_equal(found.columns[:keep], expected[end - keep : end])


def test_a_long_pass_is_read_in_pieces(opener: Opener) -> None:
    text = some_text(600)
    passes = LlamaPasses(opener(), V, CONTEXT, LONE, 1, slots=2)
    expected = rows_of(passes.over(1), text)
    begun = passes.forward([Request(0, 0, text[:580], 300), Request(1, 0, text[:40], 40)])
    again = passes.forward([Request(0, 580, text[580:], 20), Request(1, 40, text[40:41], 1)])

    assert np.array_equal(begun[0].columns, expected[280:580])
    assert np.array_equal(begun[1].columns, expected[:40])
    assert np.array_equal(again[0].columns, expected[580:])
    assert np.array_equal(again[1].columns, expected[40:41])


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_growth_and_copies_keep_what_was_read(opener: Opener, architecture: str) -> None:
    text = some_text(620)
    passes = LlamaPasses(opener(architecture), V, CONTEXT, LONE, 1, slots=3)
    expected = rows_of(passes.over(1), text)
    passes.forward([Request(0, 0, text[:200], 1), Request(1, 0, text[:90], 1)])
    passes.copy(0, 2, 0, 150)
    assert np.array_equal(passes.forward([Request(2, 150, text[150:160], 10)])[0].columns, expected[150:160])
    passes.copy(0, 2, 0, 190)
    before = passes.capacity

    found = passes.forward([Request(0, 200, text[200:600], 2), Request(2, 190, text[190:200], 10)])  # grows

    assert before < 600 <= passes.capacity
    assert np.array_equal(found[0].columns, expected[598:600])
    assert np.array_equal(found[1].columns, expected[190:200])
    found = passes.forward([Request(1, 90, text[90:100], 10), Request(0, 600, text[600:], 20)])
    assert np.array_equal(found[0].columns, expected[90:100])
    assert np.array_equal(found[1].columns, expected[600:])


def test_the_context_can_be_filled(opener: Opener) -> None:
    text = some_text(CONTEXT + 1)
    slot = slot_of(opener(kind="Q8_0"))
    slot.extend(text[: CONTEXT - 2], 0)

    last = slot.extend(text[CONTEXT - 2 : CONTEXT], 2).columns.copy()  # type: ignore[union-attr]
    slot.rollback(CONTEXT - 1)
    alone = slot.extend(text[CONTEXT - 1 : CONTEXT], 1).columns

    assert np.array_equal(alone, last[1:])
    with pytest.raises(RecordError, match="the text has 1025 tokens; the model holds 1024"):
        slot.extend(text[CONTEXT:], 1)


def test_states_where_they_are_wanted(opener: Opener) -> None:
    text = some_text(90)
    passes = LlamaPasses(opener(), V, CONTEXT, LONE, 1, slots=2)
    alone = Slot(passes.over(1))
    expected = np.concatenate([alone.extend([token], 1, hidden=True).hidden for token in text])  # type: ignore[misc]

    first, second = passes.forward([Request(0, 0, text[:80], 70, hidden=True), Request(1, 0, text[:9], 1)])
    third = passes.forward([Request(0, 80, text[80:], 2), Request(1, 9, text[9:12], 3, hidden=True)])

    assert np.array_equal(first.hidden, expected[10:80])  # type: ignore[arg-type]
    assert second.hidden is None
    assert third[0].hidden is None
    assert np.array_equal(third[1].hidden, expected[9:12])  # type: ignore[arg-type]
    assert np.array_equal(third[0].columns, rows_of(passes.over(1), text)[88:])


def test_the_fastest_number_of_threads(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = LlamaPasses(opener(), V, CONTEXT, LONE, 1)
    passes.try_threads([1, 2])
    assert (passes.threads, passes.tried) == (1, {})  # a small model

    monkeypatch.setattr("specctl.models.llama.passes.ONE_THREAD", 0)
    passes.try_threads([2])
    assert passes.threads == 2
    passes.try_threads([1, 2])
    assert passes.tried.keys() == {1, 2}
    assert passes.threads in (1, 2)
    text = some_text(5)
    assert np.array_equal(Slot(passes).extend(text, 5).columns, rows_of(passes.fresh(), text))


def test_calls(pretended: PretendedLlama, tmp_path: Path) -> None:
    passes = LlamaPasses(LlamaModel.open(write(tmp_path / "m.gguf")), V, CONTEXT, PLAIN, 1, slots=2)
    text = some_text(10)
    pretended.calls.clear()

    passes.forward([Request(0, 0, text[:4], 1), Request(1, 0, text[:2], 0)])
    passes.rollback(0, 3)
    passes.forward([Request(0, 3, text[3:5], 2)])

    wanted = [(0, place, text[place], place == 3) for place in range(4)] + [(1, p, text[p], False) for p in range(2)]
    assert pretended.calls == [
        ("llama_decode", tuple(wanted)),
        ("llama_memory_seq_rm", 0, 3, -1),
        ("llama_decode", ((0, 3, text[3], True), (0, 4, text[4], True))),
    ]
    pretended.calls.clear()
    passes.forward([Request(1, 0, some_text(600), 3)])
    assert [(len(call), sum(row[3] for row in call)) for call in pretended.decodes()] == [(512, 0), (88, 3)]
    pretended.calls.clear()
    passes.forward([Request(1, 0, some_text(100), 100)])
    assert [len(call) for call in pretended.decodes()] == [ROWS, 100 - ROWS]


@pytest.mark.parametrize(
    ("code", "error"), [(1, MemoryError), (-2, MemoryError), (-3, RuntimeError), (2, RuntimeError)]
)
def test_a_failed_call_loses_no_text(
    pretended: PretendedLlama, tmp_path: Path, code: int, error: type[Exception]
) -> None:
    text = some_text(20)
    passes = LlamaPasses(LlamaModel.open(write(tmp_path / "m.gguf")), V, CONTEXT, PLAIN, 1, slots=2)
    expected = rows_of(passes.over(1), text)
    passes.forward([Request(0, 0, text[:10], 1), Request(1, 0, text[:5], 1)])
    pretended.codes.append(code)

    with pytest.raises(error, match=f"code {code}"):
        passes.forward([Request(0, 10, text[10:], 10)])

    found = passes.forward([Request(0, 10, text[10:], 10), Request(1, 5, text[5:9], 4)])
    assert np.array_equal(found[0].columns, expected[10:])
    assert np.array_equal(found[1].columns, expected[5:9])


@pytest.mark.parametrize("architecture", ["llama", "lfm2", "mamba2"])
def test_an_interrupt_right_after_a_call(pretended: PretendedLlama, tmp_path: Path, architecture: str) -> None:
    text = some_text(20)
    model = LlamaModel.open(write(tmp_path / "m.gguf", architecture))
    passes = LlamaPasses(model, V, CONTEXT, PLAIN, 1, slots=2)
    expected = rows_of(passes.over(1), text)
    passes.forward([Request(0, 0, text[:10], 1), Request(1, 0, text[:5], 1)])
    read = pretended.llama_decode

    def interrupted(*arguments: Any) -> None:
        read(*arguments)
        raise KeyboardInterrupt

    for requests in ([Request(0, 10, text[10:13], 3), Request(1, 5, text[5:7], 2)], [Request(1, 5, text[5:8], 3)]):
        pretended.llama_decode = interrupted  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            passes.forward(requests)
        pretended.llama_decode = read  # type: ignore[method-assign]

    found = passes.forward([Request(0, 10, text[10:], 10), Request(1, 5, text[5:9], 4)])
    assert np.array_equal(found[0].columns, expected[10:])
    assert np.array_equal(found[1].columns, expected[5:9])


@pytest.mark.usefixtures("pretended")
def test_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaModel.open(write(tmp_path / "m.gguf"))
    slot, text = slot_of(model, PLAIN), some_text(300)
    expected = slot.extend(text[:200], 1).columns.copy()  # type: ignore[union-attr]
    monkeypatch.setattr("specctl.models.llama.passes.LARGE", 0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))

    with pytest.raises(MemoryError, match=r"512 tokens take .* of memory, and .* is free"):
        slot.extend(text[200:], 1)
    assert np.array_equal(Slot(slot.passes).extend(text[:200], 1).columns, expected)
    with pytest.raises(ModelError, match="256 tokens of each of 2 texts take"):
        slot.over(2)
    monkeypatch.setattr("specctl.models.llama.passes.LARGE", 1 << 40)
    monkeypatch.setattr(PretendedLlama, "_llama_init_from_model", lambda *_: None)
    with pytest.raises(ModelError, match=r"no context of 512 tokens could be made for m\.gguf"):
        slot.over(2)


def test_a_file_is_opened_once_and_freed_last(pretended: PretendedLlama, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    model = LlamaModel.open(file)
    slot = slot_of(model, PLAIN)
    assert LlamaModel.open(str(file)) is model
    assert LlamaModel.open(file, vocab_only=True) is model
    assert LlamaModel.open(file, repack=False) is not model
    rows = slot.extend(some_text(3), 3).columns
    del model, slot
    pretended.calls.clear()
    assert rows.shape == (3, V)

    del rows

    assert [call[0] for call in pretended.calls] == ["llama_free", "llama_model_free"]
    words = LlamaModel.open(file, vocab_only=True)
    assert (words.layers, words.vocabulary) == (0, V)
    assert LlamaModel.open(file) is not words


def test_facts(opener: Opener) -> None:
    model = opener("gemma3", window=16, tokenizer_ggml_eot_token_id=2)
    assert (model.vocabulary, model.context, model.layers, model.window, model.stateful) == (V, CONTEXT, 2, 16, False)
    assert model.ends == (0, 2)
    assert model.metadata("general.architecture") == "gemma3"
    assert model.metadata("tokenizer.ggml.tokens") is None
    assert model.template is not None
    assert opener("lfm2").stateful


@pytest.mark.parametrize("how", ["short", "header", "empty", "text", "strange"])
def test_files_that_cannot_be_loaded(opener: Opener, tmp_path: Path, how: str) -> None:
    whole = opener().path
    file = write(tmp_path / "m.gguf", how) if how == "strange" else damaged(whole, how)
    with pytest.raises(ModelError, match=rf"llama\.cpp cannot load {file}: .+\.") as raised:
        LlamaModel.open(file)
    assert ("unknown model architecture: 'strange'" in str(raised.value)) == (how == "strange")
    with pytest.raises(ModelError, match=r"nothing\.gguf cannot be read: No such file"):
        LlamaModel.open(tmp_path / "nothing.gguf")


@pytest.mark.usefixtures("pretended")
def test_models_that_write_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = LlamaModel.metadata
    slot = slot_of(LlamaModel.open(write(tmp_path / "m.gguf")), PLAIN)
    monkeypatch.setattr(
        LlamaModel, "metadata", lambda model, key: "false" if key == "qwen3.attention.causal" else said(model, key)
    )
    monkeypatch.setattr(PretendedLlama, "_llama_get_logits_ith", lambda *_: None)

    with pytest.raises(ModelError, match=r"n\.gguf is not a model that writes text token by token"):
        LlamaModel.open(write(tmp_path / "n.gguf", "qwen3"))
    with pytest.raises(ModelError, match=r"llama\.cpp computes no logits for .*m\.gguf"):
        slot.extend([5], 1)


@pytest.mark.slow
def test_an_abort_ends_the_process_with_a_message() -> None:
    found = needs_llama()
    names = [found.library, *sorted(found.library.parent.glob(f"libggml-base{found.library.suffix}"))]
    code = f"""
import ctypes
from specctl.models.llama.library import library
library()
for name in {[str(name) for name in names]}:
    abort = getattr(ctypes.CDLL(name), "ggml_abort", None)
    if abort is not None:
        abort(b"a.c", 7, b"there is no cell")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr == "error: llama.cpp failed: a.c:7: there is no cell\n"


def test_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two: Library = PretendedLlama(cards=("CUDA0", "CUDA1")).install(monkeypatch)
    assert [card.name for card in cards_for(two, "auto", 1000)] == ["CUDA0", "CUDA1"]
    assert [card.name for card in cards_for(two, "cuda", 1000)] == ["CUDA0"]
    assert [card.name for card in cards_for(two, "cuda:1", 1 << 60)] == ["CUDA1"]
    assert cards_for(two, "auto", 1 << 60) == cards_for(two, "cpu", 1000) == []
    file = write(tmp_path / "m.gguf")
    assert LlamaModel.open(file).cards == ("CUDA0", "CUDA1")
    for device in ("cuda:2", "mps", "xpu:0"):
        with pytest.raises(ModelError, match=rf"has no device {device} \(it has cpu, CUDA0, CUDA1\)"):
            LlamaModel.open(file, device=device)
