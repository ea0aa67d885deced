"""Which passes of llama.cpp round alike: by the types of a file's blocks, and by a trial whose result is kept."""

import os
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from specctl.errors import ModelError
from specctl.models.files.gguf_header import Header, Tensor
from specctl.models.llama import width_trial
from specctl.models.llama.library import BF16, F16, TILED
from specctl.models.llama.rounding import Rounding, roundings
from specctl.models.llama.width_trial import alike, rounding_of
from tests.support.pretended_llama import PretendedLlama
from tests.support.tiny_gguf import write


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def header(**kinds: str) -> Header:
    """Of a file with matrices of these types, and of vectors and kernels of float32."""
    sides = {"attn_norm.weight": (64,), "ssm_conv1d.weight": (4, 64), "attn_q.bias": (64,), "ssm_a": (1, 8)}
    tensors = [Tensor(f"blk.0.{name}", sides, "F32", 0, 0) for name, sides in sides.items()]
    tensors += [Tensor(f"{name}.weight", (64, 64), kind, 0, 0) for name, kind in kinds.items()]
    return Header({}, tensors, [])


@pytest.mark.parametrize(
    ("kinds", "first"),
    [
        ({"ffn_up": "Q8_0"}, Rounding(1, 63, F16, repack=True)),
        ({"ffn_up": "Q4_1", "token_embd": "F16", "output": "Q8_0"}, Rounding(1, 63, F16, repack=True)),
        ({"ffn_up": "Q4_1", "token_embd": "F16"}, Rounding(2, 63, F16, repack=True)),
        ({"ffn_up": "BF16"}, Rounding(2, 63, F16, repack=True)),
        ({"ffn_up_exps": "Q8_0", "ffn_gate_inp": "F32"}, Rounding(2, 63, F16, repack=True)),
        ({"ffn_up": "IQ4_NL"}, Rounding(1, 63, F16, repack=True)),
        ({"ffn_up": "Q4_K", "ffn_down": "Q6_K"}, Rounding(1, 63, F16, repack=False)),
        ({"ffn_up": "IQ4_XS", "ffn_down": "IQ4_NL"}, Rounding(2, 63, F16, repack=False)),
        ({"ffn_up": "IQ2_XXS"}, Rounding(1, 63, F16, repack=False)),
    ],
)
def test_the_fastest_rounding_follows_from_the_types(kinds: dict[str, str], first: Rounding) -> None:
    found = roundings(header(**kinds), one_thread=True, accelerated=False)
    assert found[0] == first
    assert found[-1] == Rounding(2, 7, BF16, repack=False)
    assert len(found) == len(set(found)) < 12


def test_with_several_threads_the_cache_is_never_float16() -> None:
    found = roundings(header(ffn_up="Q8_0"), one_thread=False, accelerated=False)
    assert found[0] == Rounding(1, 512, BF16, repack=True)
    assert {each.cache for each in found} == {BF16}


def test_on_an_accelerator_types_do_not_count() -> None:
    found = roundings(header(ffn_up="Q4_K"), one_thread=False, accelerated=True)
    assert found == roundings(header(ffn_up="F16"), one_thread=True, accelerated=True)
    assert found[0] == Rounding(1, 512, F16, repack=True)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_padded_lengths_leave_no_token_with_fewer_than_least(least: int) -> None:
    rounding = Rounding(least)
    for lengths in product(range(1, 7), repeat=3):
        found = rounding.padded(lengths)
        assert all(mine >= length for mine, length in zip(found, lengths, strict=True))
        steps = sorted({0, *found})
        assert all(after - before >= least for before, after in pairwise(steps))
        if least == 1:
            assert found == list(lengths)


@pytest.mark.parametrize(
    ("library", "kind", "threads", "expected"),
    [
        ({}, "Q8_0", 1, Rounding(1, 63, F16, repack=True)),
        ({}, "Q8_0", "auto", Rounding(1, 512, BF16, repack=True)),
        ({"lone": 1e-3}, "Q8_0", 1, Rounding(2, 63, F16, repack=True)),
        ({"lone": 1e-3}, "F32", 2, Rounding(2, 512, BF16, repack=True)),
        ({"tile": 8}, "Q8_0", 1, Rounding(2, 7, F16, repack=False)),
        ({"lone": 1e-3, "tile": 8}, "F16", 1, Rounding(2, 7, F16, repack=False)),
        ({"tile": 64}, "F32", 1, Rounding(2, 63, F16, repack=True)),
        ({"tile": 64}, "F32", "auto", Rounding(2, 7, BF16, repack=False)),
    ],
)
def test_the_first_that_holds_is_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    library: dict[str, Any],
    kind: str,
    threads: Any,
    expected: Rounding,
) -> None:
    PretendedLlama(**library).install(monkeypatch)
    assert rounding_of(write(tmp_path / "m.gguf", kind=kind), threads=threads) == expected


@pytest.mark.parametrize("architecture", ["gemma3", "lfm2", "qwen35", "mamba2"])
def test_windows_and_states_are_tried_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    PretendedLlama().install(monkeypatch)
    path = write(tmp_path / "m.gguf", architecture, "Q8_0")
    assert rounding_of(path, threads=1) == Rounding(1, 63, F16, repack=True)


def test_a_model_that_never_rounds_alike_cannot_be_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = PretendedLlama(lone=1e-3, tile=5).install(monkeypatch)
    path = write(tmp_path / "m.gguf", kind="Q8_0")
    for _ in range(2):
        made = len(library.decodes())
        with pytest.raises(
            ModelError, match=r"m\.gguf cannot be a target: what llama\.cpp computes for a token"
        ) as found:
            rounding_of(path, threads=1)
        assert found.value.exit_code == 3
    assert len(library.decodes()) == made


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(width_trial, "SECONDS", 0.0)


def decodes(library: PretendedLlama, path: Path, **settings: Any) -> int:
    """How many calls of ``llama_decode`` it takes to find a file's rounding."""
    before = len(library.decodes())
    assert rounding_of(path, **settings).least == 1
    return len(library.decodes()) - before


@pytest.mark.usefixtures("short_trials")
def test_a_trial_is_made_once_for_a_file_and_a_way_to_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = PretendedLlama().install(monkeypatch)
    path = write(tmp_path / "m.gguf", kind="Q8_0")

    assert decodes(library, path, threads=1) > 0
    opened = len(library.calls)
    assert decodes(library, path, threads=1) == 0
    assert len(library.calls) == opened

    assert decodes(library, path, threads=2) > 0
    assert decodes(library, path, threads="auto") == 0
    monkeypatch.setenv(TILED, "1")
    assert decodes(library, path, threads=1) > 0
    monkeypatch.setattr(library, "package", library.package._replace(version="0.3.37"))
    assert decodes(library, path, threads=1) > 0
    os.utime(path, (1, 1))
    assert decodes(library, path, threads=1) > 0


@pytest.mark.usefixtures("short_trials")
@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"schema_version": 0, "rounding": [1, 63, 1, true]}',
        '{"schema_version": 1}',
        '{"schema_version": 1, "rounding": [1, 63, 1]}',
        '{"schema_version": 1, "rounding": [0, 63, 1, true]}',
        '{"schema_version": 1, "rounding": [2, 3, 1, true]}',
        '{"schema_version": 1, "rounding": [1, 63, 1, "yes"]}',
        '{"schema_version": 1, "rounding": "all"}',
    ],
)
def test_a_damaged_record_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    library = PretendedLlama().install(monkeypatch)
    path = write(tmp_path / "m.gguf", kind="Q8_0")
    decodes(library, path, threads=1)
    (kept,) = (tmp_path / "cache").rglob("widths/*.json")
    whole = kept.read_text()
    kept.write_text(content)

    assert decodes(library, path, threads=1) > 0
    assert kept.read_text() == whole


@pytest.mark.usefixtures("short_trials")
def test_a_folder_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = PretendedLlama().install(monkeypatch)
    path = write(tmp_path / "m.gguf", kind="Q8_0")
    (tmp_path / "cache").write_text("a file")
    assert decodes(library, path, threads=1) > 0
    assert decodes(library, path, threads=1) > 0


def test_a_large_models_trial_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specctl.models.llama.model import LlamaModel
    from specctl.models.llama.passes import LlamaPasses

    library = PretendedLlama().install(monkeypatch)
    model = LlamaModel.open(write(tmp_path / "m.gguf", kind="Q8_0"))

    def count(seconds: float) -> int:
        before, now = len(library.decodes()), iter(range(100))
        assert alike(LlamaPasses(model, model.vocabulary, 384, Rounding(), 1, 2), lambda: seconds * next(now))
        return len(library.decodes()) - before

    assert count(10.0) < 3 < 30 < count(0.0)
