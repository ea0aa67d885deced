"""Contexts of llama.cpp: the memory and the buffers of a number of sequences."""

from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

from specctl.models.llama.model import LlamaModel
from specctl.models.llama.rounding import Rounding

FLASH = 1  # Flash attention is always used: without it a single row rounds otherwise than several
AHEAD = 1  # llama.cpp's number of a context of MTP layers


class Context:
    """A context of llama.cpp; freed with the last reference, also of the logits read from it.

    Args:
        model: with its weights.
        slots: the number of sequences.
        capacity: the most tokens of each.
        rows: the most tokens of a call with logits.
        rounding: how the model is read.
        threads: of a call on the CPU.
        kind: `AHEAD` for the model's MTP layers, else 0.
        kept: how many states before the last one llama.cpp keeps of each sequence, if it does for this architecture.

    Raises:
        MemoryError: llama.cpp cannot make it; the message has its reason.
    """

    def __init__(
        self,
        model: LlamaModel,
        slots: int,
        capacity: int,
        rows: int,
        rounding: Rounding,
        threads: int,
        kind: int = 0,
        kept: int = 0,
    ) -> None:
        lib = model.library
        parameters = lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = capacity * slots, slots
        parameters.n_batch = parameters.n_ubatch = rounding.most
        parameters.n_outputs_max, parameters.n_outputs_max_per_seq = rows, 0
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = rounding.cache
        parameters.flash_attn_type = FLASH
        parameters.swa_full, parameters.kv_unified = True, False
        parameters.n_rs_seq, parameters.ctx_type = kept, kind
        parameters.no_perf = True
        if not model.cards:
            parameters.offload_kqv = parameters.op_offload = False
        with lib.logged() as lines:
            handle: int | None = lib.llama_init_from_model(model.handle, parameters)
        if handle is None:
            why = lines[0].strip() if lines else "llama.cpp gives no reason"
            raise MemoryError(f"no context of {capacity * slots} tokens could be made for {model.path.name}: {why}")
        self.library, self.handle, self._width = lib, handle, model.width
        free_with(self, lib.llama_free, handle, model)
        self.memory: int = lib.llama_get_memory(handle)
        self.capacity: int = lib.llama_n_ctx_seq(handle)

    def floats(self, address: int, rows: int, columns: int) -> npt.NDArray[np.float32]:  # (rows, columns)
        """Numbers of this context, which lives as long as they are used."""
        return np.asarray(_Floats(self, address, (rows, columns)))

    def show_states(self) -> None:
        """Let later calls keep the states that MTP layers read, of all tokens.

        With a mask llama.cpp shows the first tokens' states in place of those of the tokens with logits.
        """
        self.library.llama_set_embeddings_nextn(self.handle, True, False)

    def seen(self, first: int, count: int) -> npt.NDArray[np.float32]:  # (count, D)
        """The last call's states of tokens from its ``first`` on; see `show_states`."""
        return self.floats(self.library.llama_get_embeddings_nextn_ith(self.handle, first), count, self._width)

    def state(self, slot: int, kind: int = 0) -> npt.NDArray[np.int8]:
        """What a sequence's memory holds; with `PARTIAL` only what cannot be rolled back. Empty if it cannot be had."""
        lib, handle = self.library, self.handle
        found = np.empty(lib.llama_state_seq_get_size_ext(handle, slot, kind), np.int8)
        return found[: lib.llama_state_seq_get_data_ext(handle, found.ctypes.data, len(found), slot, kind)]

    def set_state(self, slot: int, state: npt.NDArray[np.int8], kind: int = 0) -> bool:
        """Let a sequence hold what `state` gave, of this context or another; whether it does."""
        lib = self.library
        return bool(lib.llama_state_seq_set_data_ext(self.handle, state.ctypes.data, len(state), slot, kind))


class _Floats:
    """Memory of a context as numpy takes it."""

    def __init__(self, context: Context, address: int, shape: tuple[int, int]):
        self._context = context
        self.__array_interface__ = {"version": 3, "typestr": "<f4", "shape": shape, "data": (address, False)}


def free_with(user: object, free: Any, handle: int, needed: object) -> None:
    """Free llama.cpp's handle with the last reference to its user; what it needs lives as long."""
    finalize(user, _free, free, handle, needed)


def _free(free: Any, handle: int, _: object) -> None:
    free(handle)
