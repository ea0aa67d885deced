"""A stand-in for llama.cpp's library: a deterministic model in numpy that checks the order and arguments of calls.

Vocabulary and metadata come from a GGUF file. A row of logits is a function of all tokens that the sequence's memory
holds, so a token too many, too few or at another place changes it. What llama.cpp would do silently wrong, or what
would end the process, is an `AssertionError` here. Further functions of llama.cpp are added as methods of
`PretendedLlama` with a ``_`` before their names.
"""

import ctypes
import pickle
import sys
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from specctl.errors import ModelError
from specctl.models.llama import library as real
from tests.support.tiny_gguf import SNAPSHOTS, byte_pieces

RECURRENT = ("mamba2",)
HYBRID = ("lfm2", "qwen35", "falcon-h1", "granitehybrid")
ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<eos>")
"""Texts of control tokens that end a text wherever they are."""
FREE = 1 << 33  # Bytes of memory that an accelerator says to have free


@dataclass(frozen=True)
class Model:
    """An open file."""

    path: Path
    kind: str  # architecture
    metadata: dict[str, Any]
    pieces: list[bytes]
    types: list[int]
    vocab_only: bool
    seed: int
    size: int
    parameters: int

    def number(self, key: str, default: int = 0) -> int:
        found = self.metadata.get(f"{self.kind}.{key}", default)
        return int(max(found) if isinstance(found, list) else found)

    @property
    def stateful(self) -> bool:
        return self.kind in RECURRENT + HYBRID

    @property
    def window(self) -> int:
        return self.number("attention.sliding_window")


@dataclass
class Sequence:
    """What the memory holds of a sequence."""

    cells: list[int] = field(default_factory=list)  # tokens by position, of attention layers
    lost: int = 0  # positions before this one are not in the cache of layers with a window
    state: int = 0  # of recurrent layers
    read: int = 0  # the number of tokens in the state
    kept: list[int] = field(default_factory=list)  # states after each token of the last call
    pending: bool = False  # rolled back since the last call
    copying: bool = False  # copied since the last call


@dataclass
class Context:
    """A context with its sequences and the rows of its last call."""

    model: Model
    parameters: Any
    sequences: list[Sequence]
    logits: Any  # (R, V)
    states: Any  # (R, D)
    rows: dict[int, int] = field(default_factory=dict)  # row by place in the last batch
    hidden: bool = False
    seen: Any = None  # (T, D) of all tokens of the last call, where MTP layers' inputs are wanted

    @property
    def capacity(self) -> int:
        return int(self.parameters.n_ctx) // int(self.parameters.n_seq_max)

    @property
    def ahead(self) -> bool:
        """Whether it is one of MTP layers."""
        return bool(self.parameters.ctx_type)

    @property
    def stateful(self) -> bool:
        return self.model.stateful and not self.ahead

    @property
    def snapshots(self) -> int:
        return int(self.parameters.n_rs_seq) if self.model.kind in SNAPSHOTS and not self.ahead else 0


@dataclass
class Given:
    """Tokens with rows of numbers."""

    context: Context
    tokens: list[int] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    rows: dict[int, bytes] = field(default_factory=dict)
    wanted: dict[int, bool] = field(default_factory=dict)


IMPORTERS = (
    "specctl.doctor.diagnosis",
    "specctl.doctor.gguf_facts",
    "specctl.models.llama.model",
    "specctl.models.llama.width_trial",
    "specctl.models.loading.file_models",
    "specctl.models.loading.pair_members",
    "specctl.observing.results",
)
"""Modules that import functions of `specctl.models.llama.library` by name."""


class PretendedLlama(real.Library):
    """A library in memory.

    Args:
        lone: how much a row differs that is computed, or wanted, without another.
        tile: from this number of rows on they round otherwise; 0 for no such number.
        cards: names of accelerators.

    Attributes:
        calls: names and arguments of the calls that change something, a decode with its tokens as tuples of sequence,
            position, token, and whether logits are wanted.
        codes: what the next calls of ``llama_decode`` return; read no further than half where they are negative below
            -1, or 2.
    """

    def __init__(self, *, lone: float = 0, tile: int = 0, cards: tuple[str, ...] = ()) -> None:
        self.package = real.Package("llama-cpp-python", "0.3.36", Path("pretended"), real.ContextParams)
        self.lines: Any = deque(maxlen=100)
        self.lone, self.tile, self.cards = lone, tile, cards
        self.calls: list[tuple[Any, ...]] = []
        self.codes: deque[int] = deque()
        self.things: dict[int, Any] = {}
        for name, (_, arguments) in self.package.functions.items():
            setattr(self, name, partial(self._checked, name, arguments))

    def _checked(self, name: str, types: tuple[Any, ...], *arguments: Any) -> Any:
        assert len(arguments) == len(types), f"{name} takes {len(types)} arguments"
        for argument, kind in zip(arguments, types, strict=True):
            kind.from_param(argument)
        function: Callable[..., Any] | None = getattr(type(self), f"_{name}", None)
        assert function is not None, f"the pretended library has no {name}"
        return function(self, *arguments)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "PretendedLlama":
        """Let every module of specctl find this library instead of an installed one."""
        for module in IMPORTERS:  # a module that is first imported later would keep this library after the test
            import_module(module)
        names = ("library", "package", "require_llama")
        replaced = dict(zip(names, (lambda: self, lambda: self.package, lambda: self.package), strict=True))
        before = {name: getattr(real, name) for name in names}
        for module in [*sys.modules.values()]:
            if getattr(module, "__name__", "").startswith("specctl."):
                for name in names:
                    if getattr(module, name, None) is before[name]:
                        monkeypatch.setattr(module, name, replaced[name])
        return self

    def decodes(self) -> list[list[tuple[int, int, int, bool]]]:
        """The tokens of each ``llama_decode`` so far."""
        return [list(call[1]) for call in self.calls if call[0] == "llama_decode"]

    # models

    def _new(self, thing: Any) -> int:
        handle = 4096 + 16 * len(self.things)
        self.things[handle] = thing
        return handle

    def _get(self, handle: Any, kind: type) -> Any:
        thing = self.things.get(handle)
        assert isinstance(thing, kind), f"{handle} is not a {kind.__name__}, or is freed"
        return thing

    def _llama_backend_init(self) -> None:
        pass

    def _llama_model_default_params(self) -> Any:
        return real.ModelParams(n_gpu_layers=-1, use_extra_bufts=True)

    def _llama_model_load_from_file(self, path: bytes, parameters: Any) -> int | None:
        try:
            model = _opened(Path(path.decode()), vocab_only=parameters.vocab_only)
        except (ValueError, KeyError, IndexError, OSError, UnicodeDecodeError) as error:
            self.lines.append(f"llama_model_load: error loading model: {error}\n")
            return None
        self.calls.append(("llama_model_load_from_file", path.decode(), bool(parameters.use_extra_bufts)))
        return self._new(model)

    def _llama_model_free(self, handle: int) -> None:
        model = self._get(handle, Model)
        users = [thing for thing in self.things.values() if isinstance(thing, Context) and thing.model is model]
        assert not users, "a context still uses the model"
        self.calls.append(("llama_model_free", handle))
        self.things[handle] = None

    def _llama_model_get_vocab(self, handle: int) -> int:
        self._get(handle, Model)
        return handle

    def _llama_model_n_ctx_train(self, handle: int) -> int:
        return self._model(handle).number("context_length")

    def _llama_model_n_embd(self, handle: int) -> int:
        return self._model(handle).number("embedding_length")

    def _llama_model_n_layer(self, handle: int) -> int:
        model = self._model(handle)
        return 0 if model.vocab_only else model.number("block_count") - model.number("nextn_predict_layers")

    def _llama_model_n_layer_nextn(self, handle: int) -> int:
        return self._model(handle).number("nextn_predict_layers")

    def _llama_model_n_head_kv(self, handle: int) -> int:
        return self._model(handle).number("attention.head_count_kv")

    def _llama_model_n_swa(self, handle: int) -> int:
        return self._model(handle).window

    def _llama_model_size(self, handle: int) -> int:
        return self._model(handle).size

    def _llama_model_n_params(self, handle: int) -> int:
        return self._model(handle).parameters

    def _llama_model_has_encoder(self, handle: int) -> bool:
        return self._model(handle).kind.startswith("t5")

    def _llama_model_is_recurrent(self, handle: int) -> bool:
        return self._model(handle).kind in RECURRENT

    def _llama_model_is_hybrid(self, handle: int) -> bool:
        return self._model(handle).kind in HYBRID

    def _llama_model_is_diffusion(self, handle: int) -> bool:
        return self._model(handle).kind == "dream"

    def _llama_model_chat_template(self, handle: int, name: bytes | None) -> bytes | None:
        key = "tokenizer.chat_template" + ("" if name is None else f".{name.decode()}")
        found = self._model(handle).metadata.get(key)
        return None if found is None else found.encode()

    def _llama_model_meta_val_str(self, handle: int, key: bytes, buffer: Any, size: int) -> int:
        found = self._model(handle).metadata.get(key.decode())
        return -1 if found is None or isinstance(found, list) else _put(_text(found), buffer, size)

    def _model(self, handle: int) -> Model:
        found: Model = self._get(handle, Model)
        return found

    # vocabulary

    def _llama_vocab_type(self, handle: int) -> int:
        return {"llama": 1, "gpt2": 2}[self._model(handle).metadata["tokenizer.ggml.model"]]

    def _llama_vocab_n_tokens(self, handle: int) -> int:
        return len(self._model(handle).pieces)

    def _llama_vocab_get_text(self, handle: int, token: int) -> bytes:
        return str(self._model(handle).metadata["tokenizer.ggml.tokens"][token]).encode()

    def _llama_vocab_get_attr(self, handle: int, token: int) -> int:
        return 1 << {2: 0, 5: 1, 1: 2, 3: 3, 4: 4, 6: 5}[self._model(handle).types[token]]

    def _llama_vocab_is_eog(self, handle: int, token: int) -> bool:
        model = self._model(handle)
        named = [model.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return token in named or (model.types[token] == 3 and model.pieces[token].decode() in ENDS)

    def _special(self, handle: int, name: str) -> int:
        return int(self._model(handle).metadata.get(f"tokenizer.ggml.{name}_token_id", -1))

    def _llama_vocab_eos(self, handle: int) -> int:
        return self._special(handle, "eos")

    def _llama_vocab_get_add_bos(self, handle: int) -> bool:
        model = self._model(handle)
        sentencepiece = model.metadata["tokenizer.ggml.model"] == "llama"
        return bool(model.metadata.get("tokenizer.ggml.add_bos_token", sentencepiece))

    def _llama_tokenize(
        self, handle: int, text: Any, length: int, tokens: Any, room: int, add_special: bool, parse_special: bool
    ) -> int:
        """The longest piece at each place; control tokens where ``parse_special``."""
        model = self._model(handle)
        content = ctypes.string_at(_address(text), length)
        whole = (2, 3, 4) if parse_special else (4,)  # types of tokens that divide a text
        pieces = {p: i for i, p in enumerate(model.pieces) if p and model.types[i] in (1, 6, *whole)}
        spaced = model.metadata["tokenizer.ggml.model"] == "llama"
        divides = True
        longest = max(map(len, pieces), default=0)
        found = [self._special(handle, "bos")] if add_special and self._llama_vocab_get_add_bos(handle) else []
        place = 0
        while place < length:
            width = next(w for w in range(longest, 0, -1) if content[place : place + w] in pieces)
            token = pieces[content[place : place + width]]
            if spaced and divides and model.types[token] not in whole:
                content, length = content[:place] + b" " + content[place:], length + 1
                width = next(w for w in range(longest, 0, -1) if content[place : place + w] in pieces)
                token = pieces[content[place : place + width]]
            divides = model.types[token] in whole
            found.append(token)
            place += width
        if len(found) > room:
            return -len(found)
        _write(tokens, np.array(found, np.int32))
        return len(found)

    def _llama_token_to_piece(self, handle: int, token: int, buffer: Any, size: int, strip: int, special: bool) -> int:
        model = self._model(handle)
        kind = model.types[token]
        piece = b"" if kind == 5 or (kind in (2, 3) and not special) else model.pieces[token]
        piece = piece[strip:] if strip and piece.startswith(b" ") else piece
        if len(piece) > size:
            return -len(piece)
        ctypes.memmove(_address(buffer), piece, len(piece))
        return len(piece)

    # contexts

    def _llama_context_default_params(self) -> Any:
        return real.ContextParams(
            n_ctx=512, n_batch=2048, n_ubatch=512, n_seq_max=1, n_outputs_max_per_seq=1, n_threads=4,
            n_threads_batch=4, flash_attn_type=-1, type_k=real.F16, type_v=real.F16, offload_kqv=True, op_offload=True,
            swa_full=True, no_perf=True,
        )  # fmt: skip

    def _llama_init_from_model(self, handle: int, parameters: Any) -> int | None:
        model = self._model(handle)
        assert not model.vocab_only, "the model has no weights"
        assert parameters.n_ubatch <= parameters.n_batch
        assert parameters.swa_full or not model.window, "the cache of a window is too small for a rollback"
        assert not parameters.kv_unified, "one sequence changes how another rounds"
        if model.kind in SNAPSHOTS and parameters.n_rs_seq:
            assert parameters.n_ubatch >= parameters.n_rs_seq + 2
        kept = real.ContextParams.from_buffer_copy(parameters)
        if kept.ctx_type and not model.number("nextn_predict_layers"):
            self.lines.append("llama_init_from_model: the model has no MTP layers\n")
            return None
        most = int(kept.n_outputs_max or kept.n_batch)
        self.calls.append(("llama_init_from_model", int(kept.n_ctx), int(kept.n_seq_max)))
        return self._new(
            Context(
                model,
                kept,
                [Sequence() for _ in range(kept.n_seq_max)],
                np.zeros((most, len(model.pieces)), np.float32),
                np.zeros((most, model.number("embedding_length")), np.float32),
            )
        )

    def _llama_free(self, handle: int) -> None:
        self._get(handle, Context)
        self.calls.append(("llama_free", handle))
        self.things[handle] = None

    def _context(self, handle: int) -> Context:
        found: Context = self._get(handle, Context)
        return found

    def _sequence(self, handle: int, number: int) -> Sequence:
        sequences = self._context(handle).sequences
        assert 0 <= number < len(sequences), f"there is no sequence {number}"
        return sequences[number]

    def _llama_n_ctx_seq(self, handle: int) -> int:
        return self._context(handle).capacity

    def _llama_n_rs_seq(self, handle: int) -> int:
        return self._context(handle).snapshots

    def _llama_set_n_threads(self, handle: int, one: int, many: int) -> None:  # noqa: ARG002
        self._context(handle)

    def _llama_set_embeddings(self, handle: int, wanted: bool) -> None:
        self._context(handle).hidden = wanted

    def _llama_get_memory(self, handle: int) -> int:
        self._context(handle)
        return handle

    def _llama_memory_clear(self, handle: int, data: bool) -> None:
        context = self._context(handle)
        self.calls.append(("llama_memory_clear", handle, data))
        context.sequences = [Sequence() for _ in context.sequences]

    def _llama_memory_seq_rm(self, handle: int, number: int, start: int, stop: int) -> bool:
        sequence, context = self._sequence(handle, number), self._context(handle)
        assert stop == -1, "only the last tokens of a sequence are removed"
        self.calls.append(("llama_memory_seq_rm", number, start, stop))
        if start <= 0:
            context.sequences[number] = Sequence()
            return True
        if context.stateful and start < sequence.read:
            back = sequence.read - start
            if sequence.pending or back > context.snapshots:
                return False
            assert back < len(sequence.kept), f"the state {back} tokens back is not kept, and llama.cpp takes another"
            sequence.state, sequence.read, sequence.pending = sequence.kept[-1 - back], start, True
        del sequence.cells[start:]
        return True

    def _llama_memory_seq_cp(self, handle: int, source: int, number: int, start: int, stop: int) -> None:
        read, context = self._sequence(handle, source), self._context(handle)
        self._sequence(handle, number)
        assert (max(start, 0), stop) == (0, -1), "only whole sequences can be copied"
        assert not read.pending, "a sequence is copied as it was before a rollback"
        assert source != number
        self.calls.append(("llama_memory_seq_cp", source, number, start, stop))
        read.kept = []
        copy: Sequence = pickle.loads(pickle.dumps(read))
        copy.copying = True
        context.sequences[number] = copy

    def _llama_memory_seq_pos_min(self, handle: int, number: int) -> int:
        sequence, model = self._sequence(handle, number), self._context(handle).model
        if model.kind in RECURRENT:
            return sequence.read - 1
        return -1 if sequence.lost >= len(sequence.cells) else sequence.lost

    def _llama_memory_seq_pos_max(self, handle: int, number: int) -> int:
        sequence, model = self._sequence(handle, number), self._context(handle).model
        return (sequence.read if model.kind in RECURRENT else len(sequence.cells)) - 1

    def _state(self, handle: int, number: int, flags: int) -> bytes:
        sequence, context = self._sequence(handle, number), self._context(handle)
        model = context.model
        assert not sequence.copying, "the sequence's copy is still to be made"
        assert flags in (0, real.PARTIAL)
        part = flags == real.PARTIAL and context.stateful
        lost = max(0, len(sequence.cells) - model.window) if model.window else 0
        cells = None if part else sequence.cells
        return pickle.dumps((cells, max(lost, sequence.lost), sequence.state, sequence.read))

    def _llama_state_seq_get_size_ext(self, handle: int, number: int, flags: int) -> int:
        return len(self._state(handle, number, flags))

    def _llama_state_seq_get_data_ext(self, handle: int, data: Any, size: int, number: int, flags: int) -> int:
        content = self._state(handle, number, flags)
        assert len(content) <= size
        self.calls.append(("llama_state_seq_get_data_ext", number, flags))
        ctypes.memmove(_address(data), content, len(content))
        return len(content)

    def _llama_state_seq_set_data_ext(self, handle: int, data: Any, size: int, number: int, flags: int) -> int:
        sequence = self._sequence(handle, number)
        cells, lost, state, read = pickle.loads(ctypes.string_at(_address(data), size))
        assert cells is not None or flags == real.PARTIAL, "the saved state is only a part"
        self.calls.append(("llama_state_seq_set_data_ext", number, flags))
        if cells is not None:
            sequence.cells = list(cells)
            sequence.lost = lost
            assert len(cells) <= self._context(handle).capacity
        sequence.state, sequence.read, sequence.kept, sequence.pending = state, read, [], False
        return size

    def _llama_decode(self, handle: int, batch: Any) -> int:
        context, count = self._context(handle), int(batch.n_tokens)
        assert 0 < count <= context.parameters.n_batch, f"{count} tokens in a batch"
        assert batch.embd is None
        assert not context.ahead, "MTP layers read tokens with states"

        def array(address: int | None, kind: Any) -> Any:
            assert address is not None
            return np.frombuffer(ctypes.string_at(address, count * np.dtype(kind).itemsize), kind)

        assert (array(batch.n_seq_id, np.int32) == 1).all()
        numbers = [ctypes.c_int32.from_address(int(place)).value for place in array(batch.seq_id, np.uint64)]
        tokens, positions = array(batch.token, np.int32).tolist(), array(batch.pos, np.int32).tolist()
        wanted = array(batch.logits, np.int8).tolist()
        assert set(wanted) <= {0, 1}
        return self._decoded(handle, context, numbers, positions, tokens, wanted, tokens)

    def _decoded(
        self,
        handle: int,
        context: Context,
        numbers: list[int],
        positions: list[int],
        tokens: list[int],
        wanted: list[int],
        cells: list[int],
    ) -> int:
        """Read tokens; ``cells`` are what the memory keeps of them."""
        count = len(tokens)
        given = [(n, p, t, bool(w)) for n, p, t, w in zip(numbers, positions, tokens, wanted, strict=True)]
        self.calls.append(("llama_decode", tuple(given)))
        assert sum(wanted) <= len(context.logits), "more rows are wanted than the context has room for"
        most = context.parameters.n_outputs_max_per_seq
        ends: dict[int, int] = {}
        for number, position, token, _ in given:
            sequence = self._sequence(handle, number)
            assert 0 <= token < len(context.model.pieces), f"there is no token {token}"
            end = self._end(context, sequence) if number not in ends else ends[number]
            assert position == end, f"position {position} follows {end} tokens of sequence {number}"
            ends[number] = position + 1
        for number in ends:
            rows = sum(row[3] for row in given if row[0] == number)
            assert not most or rows <= most, "more rows of a sequence are wanted than the context allows"
        if any(end > context.capacity for end in ends.values()):
            return 1  # as llama.cpp, without a change
        code = self.codes.popleft() if self.codes else 0
        if code in (1, -1):
            return code
        for sequence in context.sequences:
            sequence.copying = False
        for number in ends:
            context.sequences[number].kept, context.sequences[number].pending = [], False
        context.rows = {}
        widths = _widths(numbers, wanted, int(context.parameters.n_ubatch))
        for place, (number, _, token, want) in enumerate(given[: count // 2] if code else given):
            self._read(context, context.sequences[number], token, cells[place], place, want, widths[place])
        return code

    def _llama_batch_ext_init(self, handle: int) -> int:
        return self._new(Given(self._context(handle)))

    def _llama_batch_ext_free(self, handle: int) -> None:
        given = self._get(handle, Given)
        alive = any(thing is given.context for thing in self.things.values())
        assert alive, "the context is freed after its batches"
        self.things[handle] = None

    def _llama_batch_ext_clear(self, handle: int) -> None:
        self.things[handle] = Given(self._get(handle, Given).context)

    def _llama_batch_ext_add_token(self, handle: int, number: int, token: int) -> int:
        given: Given = self._get(handle, Given)
        assert number == 0
        given.tokens.append(token)
        return len(given.tokens) - 1

    def _llama_batch_ext_set_pos(self, handle: int, place: int, position: int) -> bool:
        self._get(handle, Given).positions[place] = ctypes.c_int32.from_address(position).value
        return True

    def _llama_batch_ext_set_embd_state(self, handle: int, place: int, row: Any) -> bool:  # noqa: ARG002
        return False  # as in version 0.5

    def _llama_batch_ext_set_embd_token(self, handle: int, place: int, row: Any) -> bool:
        given: Given = self._get(handle, Given)
        assert (row.n_rows, row.n_embd) == (1, given.context.states.shape[1])
        given.rows[place] = ctypes.string_at(row.data, 4 * row.n_embd)
        return True

    def _llama_batch_ext_set_output_logits(self, handle: int, place: int, wanted: bool) -> bool:
        self._get(handle, Given).wanted[place] = wanted
        return True

    def _llama_process(self, handle: int, kind: int, batch: int) -> int:
        given, context = self._get(batch, Given), self._context(handle)
        assert given.context is context
        assert context.ahead
        assert kind == 1
        places = range(len(given.tokens))
        assert 0 < len(places) <= context.parameters.n_batch
        assert given.positions.keys() == given.rows.keys() == given.wanted.keys() == {*places}
        cells = [zlib.crc32(given.rows[place], given.tokens[place]) >> 1 for place in places]
        positions, wanted = ([each[place] for place in places] for each in (given.positions, given.wanted))
        return self._decoded(handle, context, [0] * len(places), positions, given.tokens, wanted, cells)

    def _llama_set_embeddings_nextn(self, handle: int, wanted: bool, masked: bool) -> None:
        context = self._context(handle)
        assert not masked, "llama.cpp shows the first tokens' states instead of the wanted ones"
        shape = (int(context.parameters.n_batch), context.states.shape[1])
        context.seen = np.zeros(shape, np.float32) if wanted else None

    def _llama_get_embeddings_nextn_ith(self, handle: int, place: int) -> int:
        seen = self._context(handle).seen
        assert seen is not None, "the last call had no such states"
        return int(seen[place].ctypes.data)

    def _end(self, context: Context, sequence: Sequence) -> int:
        """The number of tokens in a sequence's memory."""
        model = context.model
        if context.stateful and model.kind not in RECURRENT:
            assert len(sequence.cells) == sequence.read, "states and attention differ in length"
        return sequence.read if context.stateful else len(sequence.cells)

    def _read(
        self,
        context: Context,
        sequence: Sequence,
        token: int,
        cell: int,
        place: int,
        want: bool,
        widths: tuple[int, int],
    ) -> None:
        model = context.model
        sequence.state = zlib.crc32(token.to_bytes(4, "little"), sequence.state)
        sequence.read += 1
        sequence.kept = [*sequence.kept, sequence.state][-1 - context.snapshots :]
        if model.kind not in RECURRENT:
            sequence.cells.append(cell)
        seen = max(0, len(sequence.cells) - model.window) if model.window else 0
        assert seen >= sequence.lost, "tokens in the window are not in its cache"
        if not want and context.seen is None:
            return
        text = np.array(sequence.cells, np.int32).tobytes()
        code = zlib.crc32(text, sequence.state if context.stateful else 0)
        vocabulary, size = context.logits.shape[1], context.states.shape[1]
        if context.seen is not None:
            context.seen[place] = np.random.default_rng((code, model.seed, 2)).standard_normal(size)
        if not want:
            return
        row = np.random.default_rng((token, vocabulary)).standard_normal(vocabulary) * 2
        row += np.random.default_rng((code, model.seed)).standard_normal(vocabulary) * 0.7
        if 1 in widths:
            row += self.lone * np.sin(np.arange(vocabulary))
        if self.tile and widths[0] >= self.tile:
            row += 1e-3 * np.cos(np.arange(vocabulary))
        number = context.rows[place] = len(context.rows)
        context.logits[number] = row
        if context.hidden:
            context.states[number] = np.random.default_rng((code, model.seed, 1)).standard_normal(size)

    def _row(self, handle: int, place: int, rows: Any) -> int:
        number = self._context(handle).rows.get(place)
        assert number is not None, f"no row was wanted of token {place}"
        return int(rows[number].ctypes.data)

    def _llama_get_logits_ith(self, handle: int, place: int) -> int:
        return self._row(handle, place, self._context(handle).logits)

    def _llama_get_embeddings_ith(self, handle: int, place: int) -> int:
        context = self._context(handle)
        assert context.hidden, "the last call had no states"
        return self._row(handle, place, context.states)

    # devices

    def _ggml_backend_dev_count(self) -> int:
        return 1 + len(self.cards)

    def _ggml_backend_dev_get(self, index: int) -> int:
        return index + 1

    def _ggml_backend_dev_name(self, device: int) -> bytes:
        return ("CPU", *self.cards)[device - 1].encode()

    def _ggml_backend_dev_type(self, device: int) -> int:
        return int(device > 1)

    def _ggml_backend_dev_memory(self, device: int, free: Any, total: Any) -> None:
        assert device >= 1
        for number in (free, total):
            getattr(number, "_obj", number).value = FREE


def needs_llama() -> real.Package:
    """The installed package with llama.cpp's library; skips a test where there is none."""
    try:
        return real.require_llama()
    except ModelError as error:
        pytest.skip(str(error))


def _opened(path: Path, *, vocab_only: bool) -> Model:
    """Raises ValueError with llama.cpp's reason if a file cannot be loaded."""
    from tests.support.tiny_gguf import ARCHITECTURES, parts

    files = parts(path) if "-00001-of-" in path.name else [path]
    readers = [gguf.GGUFReader(file) for file in files]
    metadata = {name: each.contents() for name, each in readers[0].fields.items() if not name.startswith("GGUF.")}
    if len(files) != metadata.get("split.count", 1):
        raise ValueError("a part of the split file is missing")
    kind = metadata["general.architecture"]
    if kind not in (*ARCHITECTURES, "t5", "dream"):
        raise ValueError(f"unknown model architecture: '{kind}'")
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    names = {tensor.name: tensor for tensor in tensors}
    if not vocab_only and not any(name.startswith("blk.0.attn_norm") for name in names):
        raise ValueError("missing tensor 'blk.0.attn_norm.weight'")
    types = metadata["tokenizer.ggml.token_type"]
    sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    letters = {letter: byte for byte, letter in enumerate(byte_pieces())}
    pieces = []
    for text, type_ in zip(metadata["tokenizer.ggml.tokens"], types, strict=True):
        if type_ == 6:
            pieces.append(bytes([int(text[3:5], 16)]))
        elif type_ != 1:
            pieces.append(text.encode())
        else:
            pieces.append(text.replace("▁", " ").encode() if sentencepiece else bytes(letters[one] for one in text))
    return Model(
        path,
        kind,
        metadata,
        pieces,
        types,
        vocab_only,
        zlib.crc32(names["token_embd.weight"].data.tobytes()),
        sum(int(tensor.n_bytes) for tensor in tensors),
        sum(int(tensor.n_elements) for tensor in tensors),
    )


def _widths(numbers: list[int], wanted: list[int], most: int) -> list[tuple[int, int]]:
    """For each token, with how many others, itself included, it is computed, and how many of them are wanted.

    Sequences are read together as far as the shortest has tokens, then the others as far as the next one.
    """
    steps: dict[int, tuple[int, int]] = {}
    left = {number: [place for place, each in enumerate(numbers) if each == number] for number in numbers}
    while left:
        together = min(min(map(len, left.values())), max(1, most // len(left)))
        step = [place for places in left.values() for place in places[:together]]
        steps |= {place: (len(step), sum(wanted[each] for each in step)) for place in step}
        left = {number: places[together:] for number, places in left.items() if len(places) > together}
    return [steps[place] for place in range(len(numbers))]


def _text(value: Any) -> bytes:
    return (str(value).lower() if isinstance(value, bool) else str(value)).encode()


def _address(buffer: Any) -> int:
    address = buffer if isinstance(buffer, int) else ctypes.cast(buffer, ctypes.c_void_p).value
    assert address is not None
    return address


def _put(text: bytes, buffer: Any, size: int) -> int:
    """Write a string as ``snprintf`` does; returns its whole length."""
    if size:
        ctypes.memmove(_address(buffer), text[: size - 1] + b"\0", min(len(text), size - 1) + 1)
    return len(text)


def _write(buffer: Any, values: Any) -> None:
    if len(values):
        ctypes.memmove(_address(buffer), values.tobytes(), values.nbytes)
