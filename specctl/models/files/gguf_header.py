"""The header of a GGUF file: its metadata and tensors, read without the package gguf.

The format is described in ggml's ``docs/gguf.md``.
"""

import hashlib
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from specctl.errors import ModelError

VERSIONS = (2, 3)
MAGIC = b"GGUF"
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by a value's type."""
TOKENIZER, TEMPLATE = "tokenizer.", "tokenizer.chat_template"  # How keys of metadata begin
ENDS = ("eos", "eot", "eom")
"""What may end a text, by its metadata key: the end of a text, of a turn, of a message."""
STRING, ARRAY = 8, 9  # The other types of values
ALIGNMENT = 32  # Of the tensors' data in bytes, where the file does not say
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""The name of one part of a model in several files: what all share, the part's number from 1, how many there are."""
LAYER = re.compile(r"blk\.(\d+)\.")
"""How the names of a layer's tensors begin."""
ATTENTION = ("k", "v", "qkv", "kv_a_mqa", "output")
"""Matrices of a layer's attention: keys, values, both with the queries, both as a latent vector, and the output."""


class Block(NamedTuple):
    """A tensor's element type: blocks of numbers that are stored together."""

    name: str  # as in ggml, such as "Q4_K"
    numbers: int  # how many numbers a block has; 1 where each is stored by itself
    size: int  # of a block in bytes


BLOCKS: Mapping[int, Block] = {
    0: Block("F32", 1, 4),
    1: Block("F16", 1, 2),
    2: Block("Q4_0", 32, 18),
    3: Block("Q4_1", 32, 20),
    6: Block("Q5_0", 32, 22),
    7: Block("Q5_1", 32, 24),
    8: Block("Q8_0", 32, 34),
    9: Block("Q8_1", 32, 40),
    10: Block("Q2_K", 256, 84),
    11: Block("Q3_K", 256, 110),
    12: Block("Q4_K", 256, 144),
    13: Block("Q5_K", 256, 176),
    14: Block("Q6_K", 256, 210),
    15: Block("Q8_K", 256, 292),
    16: Block("IQ2_XXS", 256, 66),
    17: Block("IQ2_XS", 256, 74),
    18: Block("IQ3_XXS", 256, 98),
    19: Block("IQ1_S", 256, 50),
    20: Block("IQ4_NL", 32, 18),
    21: Block("IQ3_S", 256, 110),
    22: Block("IQ2_S", 256, 82),
    23: Block("IQ4_XS", 256, 136),
    24: Block("I8", 1, 1),
    25: Block("I16", 1, 2),
    26: Block("I32", 1, 4),
    27: Block("I64", 1, 8),
    28: Block("F64", 1, 8),
    29: Block("IQ1_M", 256, 56),
    30: Block("BF16", 1, 2),
    34: Block("TQ1_0", 256, 54),
    35: Block("TQ2_0", 256, 66),
    39: Block("MXFP4", 32, 17),
    40: Block("NVFP4", 64, 36),
    41: Block("Q1_0", 128, 18),
}
"""Element types by ggml's number."""


class Tensor(NamedTuple):
    """A tensor of a GGUF file."""

    name: str  # as in the file
    shape: tuple[int, ...]  # the inputs of a product first
    type: str  # of its blocks, such as "Q4_K"; "type 99" where it is unknown
    offset: int  # of its data in the file in bytes
    size: int  # of its data in bytes; 0 where its type is unknown
    part: int = 0  # which of the model's files has it, from 0


class Header(NamedTuple):
    """What a model's GGUF files say about it, without its weights."""

    values: Mapping[str, Any]  # metadata: numbers, flags and texts; of an array the number of its elements
    tensors: Sequence[Tensor]
    files: Sequence[Path]  # of the model, in their order
    tokens: str = ""  # a hash of the tokenizer's metadata: files with equal ones have one tokenizer

    @property
    def architecture(self) -> str:
        """Such as "llama" or "gemma3"."""
        return str(self.values.get("general.architecture", ""))

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of weights by the type of their blocks, the largest first."""
        found: Counter[str] = Counter()
        for tensor in self.tensors:
            found[tensor.type] += tensor.size
        return dict(found.most_common())

    @property
    def parameters(self) -> int:
        """The number of weights."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def end_ids(self) -> list[int]:
        """The ids that end a text by the file's own metadata, sorted; llama.cpp knows more by their spelling."""
        ids = (self.values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ENDS)
        return sorted({found for found in ids if isinstance(found, int)})

    @property
    def layers(self) -> int:
        """The number of layers, without those that predict further tokens."""
        return self.count("block_count") - self.ahead

    @property
    def ahead(self) -> int:
        """The number of layers that predict further tokens (MTP)."""
        return self.count("nextn_predict_layers")

    @property
    def context(self) -> int | None:
        """The length in tokens that the model was trained for; None if the file does not say."""
        return self.count("context_length") or None

    def split(self) -> tuple["Header", "Header"]:
        """The model without the layers that predict further tokens, and these."""
        parts: tuple[list[Tensor], list[Tensor]] = [], []
        for tensor in self.tensors:
            layer = LAYER.match(tensor.name)
            parts[layer is not None and int(layer[1]) >= self.layers].append(tensor)
        return self._replace(tensors=parts[0]), self._replace(tensors=parts[1])

    @property
    def cached_values(self) -> int:
        """How many numbers are cached for a token: the keys and values of all layers with attention."""
        rows = {tensor.name: tensor.shape for tensor in self.tensors}
        found = 0
        for layer in range(self.layers + self.ahead):
            sizes = {part: rows.get(f"blk.{layer}.attn_{part}.weight") for part in ATTENTION}
            key, value, joined, latent, output = (sizes[part] for part in ATTENTION)
            if latent is not None:
                found += latent[1]
            elif key is not None:
                found += key[1] + (key if value is None else value)[1]
            elif joined is not None and output is not None:
                found += joined[1] - output[0]
        return found

    @property
    def output_bytes(self) -> int:
        """The bytes of the output matrix, which may be that of the embeddings."""
        sizes = {tensor.name: tensor.size for tensor in self.tensors}
        return sizes.get("output.weight", sizes.get("token_embd.weight", 0))

    def read_bytes(self, tokens: int) -> int:
        """The bytes of weights that a pass over some tokens reads.

        Without embeddings, of which it reads a row for each token. Tokens are assumed to choose experts at random, so
        wider passes read more of them.
        """
        experts, chosen = self.count("expert_count"), self.count("expert_used_count")
        share = 1 - (1 - chosen / experts) ** tokens if experts else 1.0
        found = sum(
            tensor.size * (share if "_exps." in tensor.name else 1)
            for tensor in self.tensors
            if tensor.name not in ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")
        )
        return round(found) + self.output_bytes

    def count(self, key: str) -> int:
        """A number of the architecture's metadata; 0 without one."""
        found = self.values.get(f"{self.architecture}.{key}")
        return found if isinstance(found, int) else 0


def parts_of(path: Path) -> list[Path]:
    """The files of the model that a file belongs to, by its name: itself, or all parts in their order."""
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    name, _, count = found.groups()
    return [path.with_name(f"{name}-{number:05d}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def read_header(path: Path) -> Header:
    """The header of a GGUF file, and of the other files where the model is in several.

    Args:
        path: of the file, or of any part.

    Raises:
        ModelError: a file is missing, damaged, cut off or not a GGUF file.
    """
    files = parts_of(path)
    values: dict[str, Any] = {}
    tensors: list[Tensor] = []
    tokens = ""
    for part, file in enumerate(files):
        try:
            with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
                reader = _Reader(data)
                found, infos = reader.header()
        except FileNotFoundError as error:
            which = f"{file} is missing" if len(files) == 1 else f"{file} is missing, one of the model's {len(files)}"
            raise ModelError(f"{which}.", "Download it, into the same folder.") from error
        except (OSError, ValueError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as error:
            reason = error.args[0] if isinstance(error, _BadHeaderError) else "its header is damaged"
            raise ModelError(f"{file} cannot be read: {reason}.", "Download it again.") from error
        values = {**found, **values}
        tokens = tokens or reader.tokens
        tensors += [each._replace(part=part) for each in infos]
    return Header(values, tensors, files, tokens)


class _BadHeaderError(ValueError):
    """What is wrong with a file, to end a sentence."""


class _Reader:
    """Reads values one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place, self.tokens = data, 0, ""

    def header(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The metadata and the tensors."""
        data = self.data
        if data[:4] != MAGIC:
            raise _BadHeaderError("it is not a GGUF file")
        self.place = 4
        if (version := self._number("I")) not in VERSIONS:
            raise _BadHeaderError(f"its version of GGUF is {version}, and {VERSIONS[0]} and {VERSIONS[1]} are known")
        count, keys = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        tokens = hashlib.sha256()
        for _ in range(keys):
            begin = self.place
            key = self._text()
            values[key] = self._value(self._number("I"))
            if key.startswith(TOKENIZER) and not key.startswith(TEMPLATE):
                tokens.update(data[begin : self.place])
                self.tokens = tokens.hexdigest()
        infos = [self._info() for _ in range(count)]
        alignment = int(values.get("general.alignment", ALIGNMENT))
        if alignment <= 0:
            raise _BadHeaderError("its header is damaged")
        start = -(-self.place // alignment) * alignment
        tensors = [each._replace(offset=start + each.offset) for each in infos]
        if (missing := max((each.offset + each.size for each in tensors), default=0) - len(data)) > 0:
            raise _BadHeaderError(f"it is cut off, and {missing:,} bytes are missing")
        return values, tensors

    def _number(self, kind: str) -> Any:
        layout = struct.Struct(f"<{kind}")
        (found,) = layout.unpack_from(self.data, self.place)
        self.place += layout.size
        return found

    def _text(self) -> str:
        start = self.place + 8
        self._skip_texts(1)
        return self.data[start : self.place].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._number(SCALARS[kind])
        kind, count = self._number("I"), self._number("Q")
        if kind == STRING:
            self._skip_texts(count)
        elif kind == ARRAY:
            for _ in range(count):
                self._value(ARRAY)
        else:
            self.place += count * struct.calcsize(f"<{SCALARS[kind]}")
        return count

    def _skip_texts(self, count: int) -> None:
        """Step over texts. A vocabulary has hundreds of thousands, so this loop is as short as it can be."""
        length, data, place = struct.Struct("<Q").unpack_from, self.data, self.place
        for _ in range(count):
            place += 8 + length(data, place)[0]
        if place > len(data):
            raise _BadHeaderError("it is cut off")
        self.place = place

    def _info(self) -> Tensor:
        name = self._text()
        dimensions = self._number("I")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        kind, offset = self._number("I"), self._number("Q")
        block = BLOCKS.get(kind, Block(f"type {kind}", 1, 0))
        return Tensor(name, shape, block.name, offset, prod(shape) // block.numbers * block.size)
