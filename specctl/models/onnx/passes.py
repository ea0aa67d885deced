"""Passes of an ONNX graph over one key-value buffer, whose inputs and outputs are torch's own memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import torch

from specctl.models.running.cache import gather_path
from specctl.models.running.watching import LAST

NUMBERS: dict[str, torch.dtype] = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(bfloat16)": torch.bfloat16,
}
ELEMENTS = {torch.float32: 1, torch.int32: 6, torch.int64: 7, torch.float16: 10, torch.bfloat16: 16}
"""ONNX's numbers for torch's dtypes."""
KEPT = 64
"""Passes at most this wide keep their inputs bound for the next of the same kind."""


def state_name(layer: int) -> str:
    """The output that holds a layer's states, numbered as `Runner.watch` numbers them."""
    return "state.last" if layer == LAST else f"state.{layer}"


def open_session(path: Path, device: torch.device, threads: int) -> onnxruntime.InferenceSession:
    """A graph made ready to run.

    Args:
        path: of a graph as `export.exported` describes it.
        device: a CPU, or a CUDA device for which onnxruntime has its provider.
        threads: for one pass on a CPU.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised as well
    # A waiting thread that spins takes a core from whoever has work for it.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device.type == "cuda":
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0}))
    return onnxruntime.InferenceSession(str(path), options, providers=providers)


class _Kind(NamedTuple):
    """What passes must have in common to share what is bound: T, R, the layers whose states they give, and whether
    their results may be overwritten."""

    width: int
    rows: int
    layers: tuple[int, ...]
    passing: bool


@dataclass(slots=True)
class _Bound:
    """A kind of pass with its inputs bound: only their contents and the place of its results change."""

    binding: onnxruntime.IOBinding
    ids: torch.Tensor  # (1, T) int64
    positions: torch.Tensor | None  # (1, T) int64; None where the graph does not read them
    rows: torch.Tensor  # (R,) int64
    results: "Results | None" = None  # which every pass of this kind overwrites


@dataclass(frozen=True, slots=True)
class Results:
    """What a pass gave: logits ``(R, V)`` and the states ``(T, D)`` that were asked for, by layer."""

    logits: torch.Tensor
    states: dict[int, torch.Tensor]


class Passes:
    """Runs a graph over buffers that it owns; every pass says after how many tokens it comes.

    Args:
        session: of `open_session`.
        device: where the graph runs and its buffers lie.
        capacity: tokens to make room for at first.

    Attributes:
        vocabulary: V, the length of a row of logits.
        layers: how many decoder layers have states.
        trees: whether the graph reads trees.
    """

    def __init__(self, session: onnxruntime.InferenceSession, device: torch.device, capacity: int) -> None:
        self._session = session
        self._device = device
        inputs = {given.name: given for given in session.get_inputs()}
        outputs = {made.name: made for made in session.get_outputs()}
        self.vocabulary = int(outputs["logits"].shape[2])
        self.layers = sum(name.startswith("state.") for name in outputs) - 1
        self._width = int(outputs["state.last"].shape[2])
        self._dtype = NUMBERS[outputs["logits"].type]
        self._placed = "positions" in inputs
        self.trees = "bias" in inputs
        self._nothing = torch.zeros(0, dtype=self._dtype, device=device)  # the bias of a chain
        self._caches = [(name, given.shape) for name, given in inputs.items() if name.startswith("past.")]
        self.capacity = capacity
        self._buffers = self._allocated()
        # Attention on a GPU wants the number of tokens on the host and the one before on the device.
        self._before = torch.zeros(1, dtype=torch.int32, device=device)
        self._total = torch.zeros(1, dtype=torch.int32)
        self._bound: dict[_Kind, _Bound] = {}

    @torch.inference_mode(False)
    def _allocated(self) -> dict[str, torch.Tensor]:
        # Zeros: what lies behind the sequence is multiplied by 0, and uninitialised memory may hold NaN.
        return {
            name: torch.zeros(1, shape[1], self.capacity, shape[3], dtype=self._dtype, device=self._device)
            for name, shape in self._caches
        }

    def fresh(self) -> "Passes":
        """The same graph over buffers of its own."""
        return Passes(self._session, self._device, self.capacity)

    def grow(self, capacity: int, filled: int) -> None:
        """Move the first ``filled`` tokens to larger buffers."""
        old, self.capacity = self._buffers, capacity
        self._buffers = self._allocated()
        for name, buffer in self._buffers.items():
            buffer[:, :, :filled] = old[name][:, :, :filled]
        self._bound.clear()

    def keep_path(self, start: int, path: Sequence[int]) -> None:
        """As `gather_path` does, with the buffers."""
        gather_path(self._buffers.values(), start, path)

    def run(
        self,
        tokens: Sequence[int],
        after: int,
        keep: int,
        layers: Sequence[int] = (),
        *,
        passing: bool = False,
        seen: torch.Tensor | None = None,
    ) -> Results:
        """One pass over tokens that come after so many cached ones.

        Args:
            tokens: T ids; there is room for them.
            after: how many of the cached tokens they follow; later ones are overwritten.
            keep: R, logits of the last so many.
            layers: whose states are wanted.
            passing: whether the results are read before the next pass, which may overwrite them.
            seen: of a tree, which of its tokens each of them sees ``(T, T)`` bool on the CPU; None for a chain.
        """
        width, rows = len(tokens), max(keep, 1)  # onnxruntime takes no empty tensors
        kind = _Kind(width, rows, tuple(layers), passing)
        bound = self._bound.get(kind) or self._bind(kind)
        self._before.fill_(after + width - 1)
        self._total.fill_(after + width)
        if width == 1:
            bound.ids.fill_(tokens[0])
        else:
            bound.ids.copy_(torch.tensor(tokens))
        if bound.positions is not None:
            if seen is None:
                torch.arange(after, after + width, out=bound.positions[0])
            else:
                bound.positions[0].copy_(after + seen.sum(1) - 1)
        if self.trees:
            bias = self._bias(width, after, seen)  # until the pass has run
            self._bind_input(bound.binding, "bias", bias)
        results = bound.results or self._bind_results(bound.binding, kind)
        if self._device.type != "cpu":
            torch.cuda.current_stream(self._device).synchronize()
        self._session.run_with_iobinding(bound.binding)
        return Results(results.logits[:keep], results.states)

    @torch.inference_mode(False)  # what is filled anew in each pass must not be an inference tensor
    def _bind(self, kind: _Kind) -> _Bound:
        def numbers(start: int, end: int) -> torch.Tensor:
            return torch.arange(start, end, device=self._device)

        bound = _Bound(
            self._session.io_binding(),
            numbers(0, kind.width)[None],
            numbers(0, kind.width)[None] if self._placed else None,
            numbers(kind.width - kind.rows, kind.width),
        )
        given = {"ids": bound.ids, "rows": bound.rows, "before": self._before, "total": self._total, **self._buffers}
        if bound.positions is not None:
            given["positions"] = bound.positions
        for name, tensor in given.items():
            self._bind_input(bound.binding, name, tensor)
        for name, buffer in self._buffers.items():
            self._bind_output(bound.binding, name.replace("past", "present"), buffer)
        if kind.passing:
            bound.results = self._bind_results(bound.binding, kind)
        if kind.width <= KEPT:
            self._bound[kind] = bound
        return bound

    def _bind_results(self, binding: onnxruntime.IOBinding, kind: _Kind) -> Results:
        """New memory for the results of the next pass."""
        settings: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        results = Results(
            torch.empty(kind.rows, self.vocabulary, **settings),
            {layer: torch.empty(kind.width, self._width, **settings) for layer in kind.layers},
        )
        self._bind_output(binding, "logits", results.logits)
        for layer, states in results.states.items():
            self._bind_output(binding, state_name(layer), states)
        return results

    @torch.inference_mode(False)
    def _bias(self, width: int, after: int, seen: torch.Tensor | None) -> torch.Tensor:
        """``(1, 1, T, S)``: zeros, but for what a token of a tree does not see."""
        shape = 1, 1, width, after + width
        if seen is not None:
            bias = torch.zeros(shape, dtype=self._dtype)
            bias[0, 0, :, after:].masked_fill_(~seen, torch.finfo(self._dtype).min)
            return bias.to(self._device)
        if self._nothing.numel() < width * (after + width):
            self._nothing = torch.zeros(2 * width * (after + width), dtype=self._dtype, device=self._device)
        return self._nothing[: width * (after + width)].view(shape)

    def _bind_input(self, binding: onnxruntime.IOBinding, name: str, tensor: torch.Tensor) -> None:
        where = tensor.device.type, tensor.device.index or 0
        binding.bind_input(name, *where, ELEMENTS[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())

    def _bind_output(self, binding: onnxruntime.IOBinding, name: str, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape) if tensor.dim() == 4 else (1, *tensor.shape)
        binding.bind_output(
            name, self._device.type, self._device.index or 0, ELEMENTS[tensor.dtype], shape, tensor.data_ptr()
        )
