"""The library that tests use instead of llama.cpp: what it answers, and which calls it refuses."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specctl.models.llama.library import PARTIAL, Batch, Library
from tests.support.pretended_llama import PretendedLlama, needs_llama
from tests.support.tiny_gguf import ARCHITECTURES, SNAPSHOTS, STATEFUL, damaged, write

SIZES = {"words": 320, "layers": 2}


class Driver:
    """Calls of a library on a context of three sequences, each of which reads its own tokens."""

    def __init__(self, library: Library, file: Path) -> None:
        self.library = library
        parameters = library.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = library.llama_model_load_from_file(str(file).encode(), parameters)
        assert self.model
        found = library.llama_context_default_params()
        found.n_ctx, found.n_seq_max, found.n_outputs_max_per_seq, found.n_rs_seq = 768, 3, 0, 4
        found.n_threads = found.n_threads_batch = 1
        self.context = library.llama_init_from_model(self.model, found)
        self.memory = library.llama_get_memory(self.context)

    def read(self, sequence: int, start: int, tokens: list[int]) -> tuple[int, Any]:
        """The code and the rows (T, V) of tokens in a sequence."""
        count = len(tokens)
        ids, places = np.array(tokens, np.int32), np.arange(start, start + count, dtype=np.int32)
        ones, wanted, number = np.ones(count, np.int32), np.ones(count, np.int8), np.array([sequence], np.int32)
        numbers = np.full(count, number.ctypes.data, np.uint64)
        arrays = ids, None, places, ones, numbers, wanted
        batch = Batch(count, *(None if each is None else each.ctypes.data for each in arrays))
        code = self.library.llama_decode(self.context, batch)
        words = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.model))
        rows = [self.library.llama_get_logits_ith(self.context, place) for place in range(count if not code else 0)]
        return code, np.array([np.frombuffer(ctypes.string_at(row, 4 * words), np.float32) for row in rows])

    def answers(self) -> list[Any]:
        """What a number of calls return, and whether rows agree with rows of the first reading."""
        library, memory = self.library, self.memory

        def ends() -> list[int]:
            return [library.llama_memory_seq_pos_max(memory, number) for number in range(3)]

        _, first = self.read(0, 0, [5, 6, 7, 8, 9, 10])
        found: list[Any] = [library.llama_n_rs_seq(self.context), library.llama_n_ctx_seq(self.context), ends()]
        found.append(library.llama_memory_seq_rm(memory, 0, 3, -1))
        found.append(ends())
        if found[-2]:
            code, rows = self.read(0, 3, [8, 9])
            found += [code, np.array_equal(rows, first[3:5])]
            library.llama_memory_seq_cp(memory, 0, 2, -1, -1)
            code, rows = self.read(2, 5, [10, 11])
            found += [code, np.array_equal(rows[0], first[5]), ends()]
        found.append(library.llama_memory_seq_rm(memory, 0, -1, -1))
        found.append(self.read(0, 0, [5, 6])[0])
        size = library.llama_state_seq_get_size_ext(self.context, 0, PARTIAL)
        state = (ctypes.c_int8 * size)()
        found.append(library.llama_state_seq_get_data_ext(self.context, state, size, 0, PARTIAL) == size)
        found.append(self.read(0, 2, [7, 8])[0])
        found.append(library.llama_state_seq_set_data_ext(self.context, state, size, 0, PARTIAL) == size)
        found.append(library.llama_memory_seq_rm(memory, 0, 2, -1))
        code, rows = self.read(0, 2, [7, 8, 9, 10])
        found += [code, np.array_equal(rows, first[2:]), ends()]
        return found


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_answers_as_llama_cpp(tmp_path: Path, architecture: str) -> None:
    needs_llama()
    from specctl.models.llama.library import library

    file = write(tmp_path / "m.gguf", architecture)

    found = Driver(PretendedLlama(), file).answers()

    assert found == Driver(library(), file).answers()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_depend_on_what_the_memory_holds(tmp_path: Path, architecture: str) -> None:
    driver = Driver(PretendedLlama(), write(tmp_path / "m.gguf", architecture))

    found = driver.answers()

    kept = architecture not in STATEFUL or architecture in SNAPSHOTS
    assert found[3] == kept
    assert found[-3:-1] == [0, True]
    assert not kept or found[5:9] == [0, True, 0, True]


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    driver = Driver(PretendedLlama(), write(tmp_path / "m.gguf", "lfm2"))
    driver.read(0, 0, [5, 6, 7])
    library, memory = driver.library, driver.memory

    with pytest.raises(AssertionError, match="position 4 follows 3"):
        driver.read(0, 4, [8, 9])
    with pytest.raises(AssertionError, match="position 2 follows 3"):
        driver.read(0, 2, [8, 9])
    with pytest.raises(AssertionError, match="no token 320"):
        driver.read(0, 3, [320])
    with pytest.raises(AssertionError, match="no sequence 3"):
        driver.read(3, 0, [5])
    driver.read(0, 3, [8, 9])
    with pytest.raises(AssertionError, match="2 tokens back is not kept"):
        library.llama_memory_seq_rm(memory, 0, 3, -1)
    assert library.llama_memory_seq_rm(memory, 0, 4, -1)
    with pytest.raises(AssertionError, match="before a rollback"):
        library.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    assert not library.llama_memory_seq_rm(memory, 0, 3, -1)


def test_lone_rows_and_codes(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    plain, uneven = (Driver(PretendedLlama(lone=lone), file) for lone in (0, 1e-3))

    several = plain.read(0, 0, [5, 6, 7])[1]

    assert np.array_equal(uneven.read(0, 0, [5, 6, 7])[1], several)
    assert plain.read(1, 0, [5])[1][0].tolist() == several[0].tolist()
    assert not np.array_equal(uneven.read(1, 0, [5])[1][0], several[0])
    plain.library.codes.extend([1, -1, -2])  # type: ignore[attr-defined]
    assert [plain.read(0, 3, [8, 9])[0] for _ in range(2)] == [1, -1]
    assert plain.library.llama_memory_seq_pos_max(plain.memory, 0) == 2
    assert plain.read(0, 3, [8, 9])[0] == -2
    assert plain.library.llama_memory_seq_pos_max(plain.memory, 0) == 3
    assert plain.read(2, 0, [5] * 300)[0] == 1


@pytest.mark.parametrize("how", ["short", "header", "empty", "text", "architecture"])
def test_files_that_cannot_be_loaded(tmp_path: Path, how: str) -> None:
    library = PretendedLlama()
    file = write(tmp_path / "m.gguf", "unknown" if how == "architecture" else "llama")
    file = file if how == "architecture" else damaged(file, how)

    with library.logged() as lines:
        found = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())

    assert found is None
    assert "error loading model" in lines[-1]
