"""GGUF files opened by llama.cpp, with their facts."""

import os
import re
from collections.abc import Sequence
from ctypes import addressof, c_size_t, c_void_p, create_string_buffer
from functools import cached_property
from itertools import compress, repeat
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from weakref import WeakValueDictionary, finalize

from specctl.errors import ModelError
from specctl.models.files.gguf_header import parts_of
from specctl.models.llama.library import Library, library
from specctl.printable import one_line

REASON = re.compile(r"(?:.*?: )?error loading model: (?:error loading model (?:vocabulary|hyperparameters): )?(.*)")
"""A line of llama.cpp's log that says why a file cannot be loaded; the group is the reason."""

CARDS = {"cuda": ("CUDA", "ROCm", "HIP", "MUSA"), "mps": ("MTL", "Metal"), "xpu": ("SYCL",), "npu": ("CANN",)}
"""By kind of device in profiles, how the names of llama.cpp's devices begin."""
ALL = ("auto", "balanced", "balanced_low_0", "sequential")  # devices in profiles that stand for all accelerators
GPU, IGPU = 1, 2  # ggml's numbers of kinds of devices
SPARED = 1.2  # a file fits on accelerators if their free memory is this many times as large


class Card(NamedTuple):
    """An accelerator that the installed build of llama.cpp offers."""

    name: str
    handle: int
    kind: int
    free: int  # bytes


_opened: WeakValueDictionary[tuple[object, ...], "LlamaModel"] = WeakValueDictionary()
_lock = Lock()


class LlamaModel:
    """A GGUF file opened by llama.cpp, shared by its contexts; freed with the last reference. See `open`.

    Attributes:
        path: of the file, or of a split file's first part.
        library: llama.cpp's functions.
        handle, vocab: llama.cpp's pointers.
        cards: names of the accelerators that hold its layers; empty where the CPU computes all.
        vocabulary: V, the number of token ids.
        context: the length in tokens that it was trained for.
        width: D, the size of a token's state.
        layers: the number of layers, without those that predict further tokens.
        ahead: the number of layers that predict the token after next (MTP).
        window: how many tokens the layers with a sliding window see; 0 without such layers.
        stateful: whether it has recurrent layers, whose states cannot go back token by token.
        parameters, bytes: number and size of its weights.
    """

    def __init__(self, path: Path, lib: Library, handle: int, cards: Sequence[str]) -> None:
        self.path, self.library, self.handle = path, lib, handle
        finalize(self, lib.llama_model_free, handle)
        self.cards = tuple(cards)
        self.vocab: int = lib.llama_model_get_vocab(handle)
        self.vocabulary: int = lib.llama_vocab_n_tokens(self.vocab)
        self.context: int = lib.llama_model_n_ctx_train(handle)
        self.width: int = lib.llama_model_n_embd(handle)
        self.layers: int = lib.llama_model_n_layer(handle)
        self.ahead: int = lib.llama_model_n_layer_nextn(handle)
        self.window: int = max(0, lib.llama_model_n_swa(handle))
        self.stateful = bool(lib.llama_model_is_recurrent(handle) or lib.llama_model_is_hybrid(handle))
        self.parameters: int = lib.llama_model_n_params(handle)
        self.bytes: int = lib.llama_model_size(handle)

    @classmethod
    def open(
        cls, path: str | Path, *, device: str = "auto", repack: bool = True, vocab_only: bool = False
    ) -> "LlamaModel":
        """Open a file, or return the model that this process has open already.

        Args:
            path: of the file, or of a split file's first part.
            device: where its layers are, as in profiles; ``auto`` for the accelerators of the installed build where
                the file fits, else the CPU.
            repack: see `Rounding`.
            vocab_only: whether to read no weights; the model then has no layers, and no context may be made of it.

        Raises:
            ModelError: llama.cpp is not installed, cannot read the file, or has no such device; or the model is of a
                kind that does not write text token by token.
        """
        lib, path = library(), Path(path)
        try:
            status = path.stat()
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
        file = (os.path.realpath(path), status.st_mtime_ns, status.st_size)
        cards = [] if vocab_only else cards_for(lib, device, file_bytes(path))
        kind: tuple[object, ...] = (repack, *(card.name for card in cards))
        with _lock:
            if vocab_only and (found := next((m for key, m in _opened.items() if key[:3] == file), None)) is not None:
                return found
            key = (*file, vocab_only, *kind)
            if (found := _opened.get(key)) is None:
                handle = _load(lib, path, cards, repack=repack, vocab_only=vocab_only)
                found = cls(path, lib, handle, [card.name for card in cards])
                found._require_decoder()
                _opened[key] = found
            return found

    def _require_decoder(self) -> None:
        lib, handle = self.library, self.handle
        if not self.vocabulary:
            raise ModelError(f"{self.path} has no tokenizer.")
        sees_all = self.metadata(f"{self.metadata('general.architecture')}.attention.causal") == "false"
        if sees_all or lib.llama_model_is_diffusion(handle) or lib.llama_model_has_encoder(handle):
            raise ModelError(f"{self.path} is not a model that writes text token by token.")

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """All ids that end a text, in order: those that llama.cpp ends at, and the one that the file declares."""
        is_end, vocab = self.library.llama_vocab_is_eog, self.vocab
        found = {*compress(range(self.vocabulary), map(is_end, repeat(vocab), range(self.vocabulary)))}
        if (declared := self.library.llama_vocab_eos(vocab)) >= 0:
            found.add(declared)
        return tuple(sorted(found))

    @cached_property
    def template(self) -> str | None:
        """The chat template's source; None without one."""
        found: bytes | None = self.library.llama_model_chat_template(self.handle, None)
        return None if found is None else found.decode("utf-8", "replace")

    def metadata(self, key: str) -> str | None:
        """A value of the file's metadata as text; None where it has none, or an array."""
        name, read = key.encode(), self.library.llama_model_meta_val_str
        size = read(self.handle, name, create_string_buffer(1), 1)
        if size < 0:
            return None
        buffer = create_string_buffer(size + 1)
        read(self.handle, name, buffer, size + 1)
        return buffer.value.decode("utf-8", "replace")

    @cached_property
    def cached_values(self) -> int:
        """The number of keys and values that all layers cache for a token; an estimate, 0 if unknown."""
        kind = self.metadata("general.architecture")
        width, heads, sets = (
            int(self.metadata(f"{kind}.{name}") or 0)
            for name in ("embedding_length", "attention.head_count", "attention.head_count_kv")
        )
        sets = sets or self.library.llama_model_n_head_kv(self.handle)
        size = width // heads if heads else 0
        sizes = (int(self.metadata(f"{kind}.attention.{name}_length") or size) for name in ("key", "value"))
        return self.layers * sets * sum(sizes)

    @cached_property
    def state_bytes(self) -> int:
        """The size of a sequence's recurrent states, as if all layers had them; an estimate, 0 if unknown."""
        kind = self.metadata("general.architecture")
        width, inner, size, groups, places, short = (
            int(self.metadata(f"{kind}.{name}") or 0)
            for name in (
                "embedding_length",
                "ssm.inner_size",
                "ssm.state_size",
                "ssm.group_count",
                "ssm.conv_kernel",
                "shortconv.l_cache",
            )
        )
        convolved = max(0, places - 1) * (inner + 2 * groups * size) + max(0, short - 1) * width
        return 4 * self.layers * (inner * size + convolved)


def file_bytes(path: Path) -> int:
    """The size of a file, or of all parts of a split one that are there."""
    return sum(part.stat().st_size for part in parts_of(path) if part.exists())


def cards_of(lib: Library) -> list[Card]:
    """The accelerators of the installed build; integrated ones, which share the host's memory, only without others."""
    found = []
    for number in range(lib.ggml_backend_dev_count()):
        handle = lib.ggml_backend_dev_get(number)
        free, total = c_size_t(), c_size_t()
        lib.ggml_backend_dev_memory(handle, free, total)
        name = lib.ggml_backend_dev_name(handle).decode()
        found.append(Card(name, handle, lib.ggml_backend_dev_type(handle), free.value))
    own = [card for card in found if card.kind == GPU]
    return own or [card for card in found if card.kind == IGPU][:1]


def cards_for(lib: Library, device: str, needed: int) -> list[Card]:
    """The accelerators that are to hold a model's layers; empty for the CPU.

    Args:
        lib: llama.cpp's functions.
        device: as in profiles.
        needed: the model's size in bytes.

    Raises:
        ModelError: the build has no such device.
    """
    if device == "cpu":
        return []
    cards = cards_of(lib)
    if device in ALL:
        return cards if sum(card.free for card in cards) >= SPARED * needed else []
    kind, _, number = device.partition(":")
    named = [card for card in cards if card.name.startswith(CARDS.get(kind, ()))]
    index = int(number or 0)
    if index < len(named):
        return [named[index]]
    there = ", ".join(["cpu", *(card.name for card in cards)])
    raise ModelError(
        f"The installed {lib.package.name} has no device {device} (it has {there}).",
        'Set device = "auto", or install a build for that device.',
    )


def _load(lib: Library, path: Path, cards: Sequence[Card], *, repack: bool, vocab_only: bool) -> int:
    parameters = lib.llama_model_default_params()
    devices = (c_void_p * (len(cards) + 1))(*(card.handle for card in cards), None)
    parameters.devices = addressof(devices)
    parameters.n_gpu_layers = -1 if cards else 0
    parameters.vocab_only, parameters.use_extra_bufts, parameters.load_mtp = vocab_only, repack, True
    with lib.logged() as lines:
        handle: int | None = lib.llama_model_load_from_file(os.fsencode(path), parameters)
    if handle is not None:
        return handle
    found = [match[1] for line in lines if (match := REASON.match(line.strip()))]
    reason = one_line((found or [line.strip() for line in lines] or ["no reason is given"])[0])
    raise ModelError(f"llama.cpp cannot load {path}: {reason.rstrip('.')}.")
