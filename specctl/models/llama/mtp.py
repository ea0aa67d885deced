"""The MTP layers of a GGUF file as a draft head, on llama.cpp."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specctl.errors import ModelError
from specctl.models.draft_heads.verifier_states import HeadInputs
from specctl.models.llama.context import AHEAD, Context, free_with
from specctl.models.llama.library import BF16, Rows
from specctl.models.llama.model import LlamaModel
from specctl.models.llama.rounding import Rounding
from specctl.models.passes.forward import Forward, joined_numbers
from specctl.models.passes.inference import HOST
from specctl.models.passes.watching import LAST, States
from specctl.models.running.passes import Passes, Request

PIECE = 64  # The most tokens of a call
CAPACITY = 256  # Initial number of tokens that fit; it doubles when full
DECODE = 1  # llama.cpp's number of a call that reads tokens

Array = npt.NDArray[np.float32]


class _Batch:
    """Tokens with a row of numbers each, for calls of a context; freed with the last reference."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._handle: int = context.library.llama_batch_ext_init(context.handle)
        free_with(self, context.library.llama_batch_ext_free, self._handle, context)

    def read(self, tokens: Sequence[int], rows: Array, start: int, keep: int) -> int:
        """Read tokens from position ``start`` on with their rows ``(T, D)``, and compute logits of the last ``keep``;
        returns llama.cpp's code.
        """
        library, handle = self._context.library, self._handle
        library.llama_batch_ext_clear(handle)
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        for place, token in enumerate(tokens):
            library.llama_batch_ext_add_token(handle, 0, token)
            library.llama_batch_ext_set_pos(handle, place, positions[place:].ctypes.data)
            row = Rows(rows[place].ctypes.data, 1, rows.shape[1])
            if not library.llama_batch_ext_set_embd_state(handle, place, row):  # as since version 0.6
                library.llama_batch_ext_set_embd_token(handle, place, row)
            library.llama_batch_ext_set_output_logits(handle, place, place >= len(tokens) - keep)
        code: int = library.llama_process(self._context.handle, DECODE, handle)
        return code


class MtpPasses(Passes):
    """Passes of the MTP layers in a file over one sequence.

    They read a token with the model's state of the token before it, or with their own where that is not known yet, and
    predict the next token.

    Args:
        model: the target, which has `LlamaModel.ahead` layers.
        vocabulary: V, the pair's shared vocabulary; logits beyond it are cut off.
        context: the most tokens of a sequence.
        threads: of a pass on the CPU.

    Raises:
        ModelError: llama.cpp cannot make a context of the layers.
    """

    engine = "llama.cpp"
    runs_model = False
    verifies = False
    multiplies = True
    layers = (LAST,)

    def __init__(self, model: LlamaModel, vocabulary: int, context: int, threads: int) -> None:
        self.model, self.vocabulary, self.context, self.threads = model, vocabulary, context, threads
        self.device, self.state_size = HOST, model.width
        self._blank = np.zeros((1, model.width), np.float32)
        self._rows = HeadInputs(self._blank, lambda states: np.asarray(states[LAST]))
        self._cells = 0  # how many tokens llama.cpp's memory holds
        try:
            self._open(min(CAPACITY, context))
        except MemoryError as error:
            raise ModelError(f"{error}.") from error

    def _open(self, capacity: int) -> None:
        rounding = Rounding(most=PIECE, cache=BF16)  # as in `Rounding` of a target
        self._context = Context(self.model, 1, capacity, PIECE, rounding, self.threads or 1, AHEAD)
        self._context.show_states()
        self._batch = _Batch(self._context)

    def fresh(self) -> "MtpPasses":
        return MtpPasses(self.model, self.vocabulary, self.context, self.threads or 1)

    @property
    def observed(self) -> int:
        return self._rows.observed

    def observe_states(self, start: int, states: States) -> None:
        self._rows.observe_states(start, states)

    def rollback(self, slot: int, length: int) -> int:  # noqa: ARG002 - there is one
        return self._rows.rollback(length)

    def forward(self, requests: Sequence[Request]) -> list[Forward]:
        (request,) = requests
        tokens, keep, length = request.tokens, request.keep, request.after
        self._reserve(length + len(tokens))
        if self._cells > length:
            self.model.library.llama_memory_seq_rm(self._context.memory, 0, length, -1)
            self._cells = length
        self._rows.take_pending()
        columns: list[Array] = []
        hidden: list[Array] = []
        left = len(tokens)
        for some in self._rows.pieces(length, tokens):
            for start in range(0, len(some), PIECE):
                part = some[start : start + PIECE]
                left -= len(part)
                wanted = min(max(0, keep - left), len(part))
                logits, states = self._read(part, wanted)
                columns.append(logits.copy() if left else logits)
                if request.hidden:
                    hidden.append(states.copy())
        found = joined_numbers(columns) if len(columns) > 1 else columns[0]
        if not request.hidden:
            return [Forward(found)]
        import torch  # a caller that reads states is a torch network

        return [Forward(found, torch.from_numpy(np.concatenate(hidden)))]

    def _read(self, tokens: Sequence[int], keep: int) -> tuple[Array, Array]:
        """Logits ``(keep, V)`` and states ``(keep, D)`` of the last tokens, where llama.cpp has them."""
        library, context, count = self.model.library, self._context, len(tokens)
        shown = max(keep, 1)  # at least the last one, whose state the next token is read with
        rows = np.ascontiguousarray(self._rows.next(self._cells, count), np.float32)
        code = self._batch.read(tokens, rows, self._cells, shown)
        if code:
            library.llama_memory_clear(context.memory, False)
            self._cells = 0
            self._rows.rollback(0)
            raise RuntimeError(f"llama.cpp could not read {count} tokens (code {code}): {library.last_line}")
        first = count - shown
        states = context.seen(first, shown)
        logits = context.floats(library.llama_get_logits_ith(context.handle, first), shown, self.model.vocabulary)
        self._rows.advance(self._cells, count, states[-1:].copy())
        self._cells += count
        return logits[shown - keep :, : self.vocabulary], states[shown - keep :]

    def _reserve(self, tokens: int) -> None:
        """Make room for this many tokens."""
        old = self._context
        if tokens <= old.capacity:
            return
        self._open(max(tokens, 2 * old.capacity))
        if self._cells:
            self._context.set_state(0, old.state(0))
