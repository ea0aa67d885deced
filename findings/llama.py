"""The C library in xllamacpp 2026.10.11549, tiny GGUF files with random weights, and contexts that read them."""

import ctypes
import importlib.util
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_uint32, c_void_p
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np

VERSIONS = f"xllamacpp {version('xllamacpp')}, gguf {version('gguf')}"
WORDS, WIDTH = 64, 64

lib = ctypes.CDLL(str(next(Path(importlib.util.find_spec("xllamacpp").origin).parent.glob("*.so"))))
silent = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda *_: None)
lib.llama_log_set(silent, None)


class ModelParams(ctypes.Structure):
    """llama_model_params, of which the fields that are set are named."""

    _fields_ = (
        ("first", c_void_p * 9),
        ("vocab_only", c_bool),
        ("flags", c_bool * 4),
        ("load_mtp", c_bool),
        ("rest", c_bool * 2),
    )


class ContextParams(ctypes.Structure):
    """llama_context_params, whose first fields are named; kv_unified is false by default."""

    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq", "n_threads", "n_threads_batch")),
        ("ctx_type", c_int),
        ("rest", c_uint32 * 32),
    )


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", c_int),
        *((name, c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


lib.llama_model_default_params.restype = ModelParams
lib.llama_context_default_params.restype = ContextParams
for function, result, *arguments in (
    (lib.llama_model_load_from_file, c_void_p, c_char_p, ModelParams),
    (lib.llama_init_from_model, c_void_p, c_void_p, ContextParams),
    (lib.llama_get_memory, c_void_p, c_void_p),
    (lib.llama_memory_seq_rm, c_bool, c_void_p, c_int, c_int, c_int),
    (lib.llama_decode, c_int, c_void_p, Batch),
    (lib.llama_get_logits_ith, POINTER(c_float), c_void_p, c_int),
):
    function.restype, function.argtypes = result, arguments


def load(path, architecture, values, shapes):
    """Write a model and load it: further values of its header, and the shape of each tensor as numpy has it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("no_vocab")
    values = {"vocab_size": WORDS, "embedding_length": WIDTH, "context_length": 64, **values}
    for name, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{name}", value)
    chance = np.random.default_rng(0)
    for name, shape in shapes.items():
        scale = 1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 1
        writer.add_tensor(name, scale * chance.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parameters = lib.llama_model_default_params()
    parameters.load_mtp = True
    model = lib.llama_model_load_from_file(str(path).encode(), parameters)
    assert model, "the model was not loaded"
    return model


class Context:
    """A context for a number of sequences that keeps some states of each before the last, or of the MTP layers."""

    def __init__(self, model, sequences=1, kept=0, mtp=False):
        parameters = lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max, parameters.n_rs_seq = 256 * sequences, sequences, kept
        parameters.n_threads = parameters.n_threads_batch = 1
        parameters.ctx_type = int(mtp)
        self.handle = lib.llama_init_from_model(model, parameters)
        assert self.handle, "no context was made"

    def read(self, *parts, wanted=None, states=None):
        """One call for parts (sequence, first position, tokens); returns the logits of the wanted tokens, or of all.

        A context of MTP layers needs a state for each token, float32.
        """
        each = [(s, start + i, token) for s, start, tokens in parts for i, token in enumerate(tokens)]
        count = len(each)
        wanted = range(count) if wanted is None else wanted
        sequences, positions, tokens = (np.array(column, np.int32) for column in zip(*each, strict=True))
        addresses = sequences.ctypes.data + sequences.itemsize * np.arange(count, dtype=np.uint64)
        ones = np.ones(count, np.int32)
        marks = np.isin(np.arange(count), wanted).astype(np.int8)
        arrays = tokens, states, positions, ones, addresses, marks
        batch = Batch(count, *(None if array is None else array.ctypes.data for array in arrays))
        assert lib.llama_decode(self.handle, batch) == 0, "the call failed"
        return np.array([lib.llama_get_logits_ith(self.handle, i)[:WORDS] for i in wanted])

    def remove(self, sequence, length):
        """Keep the first tokens of a sequence only; returns what llama.cpp does."""
        return lib.llama_memory_seq_rm(lib.llama_get_memory(self.handle), sequence, length, -1)
