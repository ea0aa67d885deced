"""Rollback, copies and growth of models on llama.cpp, most of all of those with recurrent layers."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.models.llama import states
from specctl.models.llama.library import BF16, PARTIAL
from specctl.models.llama.model import LlamaModel
from specctl.models.llama.passes import LlamaPasses
from specctl.models.llama.rounding import Rounding
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from tests.support.pretended_llama import PretendedLlama, needs_llama
from tests.support.tiny_gguf import ARCHITECTURES, KINDS, STATEFUL, write

WORDS = 320
EXACT = {
    **dict.fromkeys(("F32", "F16", "BF16"), Rounding(least=2, cache=BF16)),
    **dict.fromkeys(("Q8_0", "Q4_0"), Rounding(cache=BF16)),
    **dict.fromkeys(("Q4_K", "Q6_K"), Rounding(cache=BF16, repack=False)),
}
"""How files with blocks of a type are read."""


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> PretendedLlama:
    return PretendedLlama(lone=1e-3).install(monkeypatch)


def passes_of(file: Path, rounding: Rounding, slots: int = 1) -> LlamaPasses:
    model = LlamaModel.open(file, device="cpu", repack=rounding.repack)
    return LlamaPasses(model, WORDS, 1024, rounding, 1, slots)


def written(passes: LlamaPasses, prompt: Sequence[int], count: int) -> tuple[list[int], Any]:
    """The greedy text and its rows (N, V), read token by token."""
    slot, text, rows = Slot(passes), list(prompt), []
    for _ in range(count):
        row = slot.extend(text[slot.length :], 1).columns[-1].copy()
        rows.append(row)
        text.append(int(row.argmax()))
    return text, np.array(rows)


def drafted(slot: Slot, text: list[int], prompt: int, most: int, draws: random.Random) -> Any:
    """The rows (N, V) of a text whose tokens are drafted partly wrong and read several at a time."""
    rows: list[Any] = []
    end = prompt
    while end < len(text):
        draft = text[end : end + draws.randint(0, most)]
        wrong = draws.randint(0, len(draft))
        if wrong < len(draft):
            draft[wrong:] = [draws.randrange(WORDS) for _ in draft[wrong:]]
        kept = next((place for place, token in enumerate(draft) if token != text[end + place]), len(draft))
        before = text[slot.length : end]
        found = slot.extend([*before, *draft], len(draft) + 1).columns
        rows += [row.copy() for row in found[: kept + 1]]
        end += kept + 1
        slot.rollback(end - 1)
    return np.array(rows)[: len(text) - prompt]


def check_loop(file: Path, rounding: Rounding, count: int, *, most: int = 12, seed: int = 0) -> None:
    draws = random.Random(seed)
    prompt = [draws.randrange(4, 260) for _ in range(23)]
    text, rows = written(passes_of(file, rounding), prompt, count)
    assert len(set(text[-count:])) > 5

    found = drafted(Slot(passes_of(file, rounding)), text, len(prompt), most, draws)

    differ = [place for place in range(count) if not np.array_equal(rows[place], found[place])]
    assert not differ


@pytest.mark.parametrize(
    ("architecture", "least"), [*((name, 2) for name in ARCHITECTURES), ("llama", 1), ("lfm2", 1), ("mamba2", 1)]
)
def test_drafts_change_no_row(tmp_path: Path, llama: PretendedLlama, architecture: str, least: int) -> None:
    llama.lone *= least - 1
    check_loop(write(tmp_path / "m.gguf", architecture), Rounding(least=least), 60)


@pytest.mark.parametrize(("architecture", "saved"), [("qwen35", 1), ("mamba2", 12)])
def test_states_are_saved_where_none_are_kept(
    tmp_path: Path, llama: PretendedLlama, architecture: str, saved: int
) -> None:
    slot = Slot(passes_of(write(tmp_path / "m.gguf", architecture), Rounding()))
    text = [random.Random(0).randrange(4, 260) for _ in range(200)]
    slot.extend(text[:40], 1)

    for end in range(42, 162, 2):
        slot.extend([*text[slot.length : end], 5, 6, 7], 4)
        slot.rollback(end)

    # one after the prompt, then one for every 10 tokens
    assert llama.calls.count(("llama_state_seq_get_data_ext", 0, PARTIAL)) == saved


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize(
    ("room", "most", "kept"), [(1 << 26, 512, 8), (1 << 26, 6, 4), (1 << 26, 4, 2), (40_000, 512, 2), (1, 512, 0)]
)
def test_llama_cpp_keeps_states_that_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, most: int, kept: int
) -> None:
    monkeypatch.setattr(states, "SMALL", room)
    monkeypatch.setattr(states, "SHARE", 1 << 40)
    file, rounding = write(tmp_path / "m.gguf", "qwen35"), Rounding(least=2, most=most)

    passes = passes_of(file, rounding)

    def kept_now() -> int:
        return passes.model.library.llama_n_rs_seq(passes._context.handle)

    passes.forward([Request(0, 0, [5, 6], 1)])
    passes.forward([Request(0, 2, [9, 10], 1)])
    assert kept_now() == 0
    passes.forward([Request(0, 3, [12, 13], 1)])
    assert kept_now() == kept
    check_loop(file, rounding, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drafts_change_no_row_of_llama_cpp(tmp_path: Path, architecture: str, kind: str) -> None:
    needs_llama()
    check_loop(write(tmp_path / "m.gguf", architecture, kind), EXACT[kind], 200)


def check_batch(file: Path, rounding: Rounding, *, steps: int = 250, slots: int = 3, seed: int = 0) -> None:
    """Texts that begin alike are read in turns and together, dropped, begun anew and copied; rows stay the same."""
    draws = random.Random(seed)
    prompt = [draws.randrange(4, 260) for _ in range(40)]
    known = []
    for share in (0, 25, 40):
        own = [*prompt[:share], *(draws.randrange(4, 260) for _ in range(45 - share))]
        text, rows = written(passes_of(file, rounding), own, 260)
        known.append((text, rows, len(own)))
    shared = [[next(i for i in range(301) if a[0][i] != b[0][i]) if a is not b else 300 for b in known] for a in known]
    passes = passes_of(file, rounding, slots)
    which, ends = [draws.randrange(3) for _ in range(slots)], [0] * slots
    checked = 0
    for _ in range(steps):
        taking = [slot for slot in range(slots) if draws.random() < 0.7]
        for slot in taking:
            text = which[slot]
            if ends[slot] > 280 or draws.random() < 0.01:
                which[slot], ends[slot] = draws.randrange(3), 0
                others = [other for other in range(slots) if other != slot and other not in taking and ends[other]]
                if others and draws.random() < 0.8:
                    source = draws.choice(others)
                    stop = min(shared[which[slot]][which[source]], ends[source])
                    if draws.random() < 0.5 and stop:
                        stop = draws.randint(1, stop)
                    passes.copy(source, slot, 0, stop)
                    ends[slot] = stop
            elif ends[slot] and draws.random() < 0.03:
                ends[slot] = draws.randrange(ends[slot])
        wanted = []
        for slot in taking:
            text, rows, start = known[which[slot]]
            first = text[ends[slot] : max(start, ends[slot] + draws.randint(1, 2))]
            draft = text[ends[slot] + len(first) :][: draws.randint(0, 6)]
            kept = draws.randint(0, len(draft))
            draft[kept:] = [draws.randrange(WORDS) for _ in draft[kept:]]
            wanted.append((slot, kept, Request(slot, ends[slot], [*first, *draft], len(draft) + 1)))
        if not wanted:
            continue
        for (slot, kept, request), found in zip(wanted, passes.forward([each[2] for each in wanted]), strict=True):
            text, rows, start = known[which[slot]]
            last = request.after + len(request.tokens) - request.keep
            for place in range(max(start - 1, last), min(last + kept, 299 - 1) + 1):
                assert np.array_equal(found.columns[place - last], rows[place - start + 1]), (slot, place)
                checked += 1
            ends[slot] = passes.rollback(
                slot, min(last + kept + draws.randint(0, 1), request.after + len(request.tokens))
            )
            ends[slot] = min(ends[slot], last + kept + 1)
    assert checked > steps
    assert passes.capacity > 256


@pytest.mark.parametrize(
    ("architecture", "least"), [("gemma3", 2), ("qwen35", 1), ("qwen35", 2), ("mamba2", 1), ("granitehybrid", 2)]
)
def test_texts_read_together_change_no_row(
    tmp_path: Path, llama: PretendedLlama, architecture: str, least: int
) -> None:
    llama.lone *= least - 1
    check_batch(write(tmp_path / "m.gguf", architecture), Rounding(least=least))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_texts_read_together_change_no_row_of_llama_cpp(tmp_path: Path, architecture: str, kind: str) -> None:
    needs_llama()
    for seed in range(3):
        check_batch(write(tmp_path / "m.gguf", architecture, kind), EXACT[kind], seed=seed)


def check_moved(file: Path, rounding: Rounding) -> None:
    """A sequence goes back after calls without it, in which llama.cpp would move its state."""
    draws = random.Random(0)
    text, rows = written(passes_of(file, rounding), [draws.randrange(4, 260) for _ in range(20)], 20)
    passes = passes_of(file, rounding, 3)
    passes.forward([Request(0, 0, text[:5], 1)])
    passes.forward([Request(0, 3, text[:2], 1)])  # from now on llama.cpp keeps states
    for slot in (2, 0, 1):
        passes.forward([Request(slot, 0, text[:20], 1)])
    passes.forward([Request(0, 20, [text[20], 5, 6, 7, 8], 5)])

    passes.forward([Request(slot, 20, text[20:23], 1) for slot in (1, 2)])

    (found,) = passes.forward([Request(0, 21, text[21:25], 4)])
    assert np.array_equal(found.columns, rows[2:6])
    for slot in (1, 2):
        (found,) = passes.forward([Request(slot, 23, text[23:26], 3)])
        assert np.array_equal(found.columns, rows[4:7])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", STATEFUL)
def test_states_stay_in_their_places(tmp_path: Path, architecture: str) -> None:
    needs_llama()
    check_moved(write(tmp_path / "m.gguf", architecture, "Q8_0"), EXACT["Q8_0"])
