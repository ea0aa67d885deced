"""ONNX graphs opened by onnxruntime, and the memory that their passes read and write.

Only graphs on a device use torch: there buffers are torch tensors, on the host numpy arrays.
"""

import os
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime

from specctl.models.passes.inference import HOST
from specctl.models.passes.watching import LAST
from specctl.models.passes.weights import drop_pages

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
ELEMENTS = {
    "float32": 1,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "bfloat16": 16,
}  # ONNX's numbers for element types
NARROWEST = "narrowest"  # Name of a number in a graph's file; see `OnnxGraph`
IN_TILES = "ORT_GQA_DISABLE_FLASH_ATTENTION"
"""While this is "1", new sessions compute attention on a CPU as a whole and not in tiles. In tiles of 16 to 128 rows,
which depend on the processor's cache, a single row at the end rounds otherwise than in the midst of others, and so do
scores of heads wider than 128 where a tile is cut off. As a whole takes as long: 0.8 to 1.2 times for 1 to 64 tokens
after 100 to 3,000."""
LINE = 64  # Size of a cache line of the processor in bytes, to which buffers are aligned


def state_name(layer: int) -> str:
    """The output that holds a layer's states, numbered as `Slot.watch` numbers them."""
    return "state.last" if layer == LAST else f"state.{layer}"


def element_type(kind: str) -> str:
    """An element type as numpy and torch name it, such as ``float32`` for onnxruntime's ``tensor(float)``."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return "float32" if name == "float" else name


class Memory(Protocol):
    """Memory that passes read and write.

    Attributes:
        device: where it is.
    """

    @property
    def device(self) -> "torch.device": ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """A buffer; for ``dtype`` see `element_type`."""

    def place(self, buffer: Any) -> tuple[str, int, int, Sequence[int], int]:
        """A buffer's location in the form that an `IOBinding` takes: device and its index, element type, shape and
        address.
        """

    def copied(self, rows: Any) -> Any:
        """A copy of rows in new memory."""

    def like(self, numbers: Array) -> Any:
        """A buffer for integers, filled on the host by numpy, which takes a tenth of torch's time."""

    def send(self, numbers: Iterable[tuple[Array, Any]]) -> None:
        """Copy integers to the buffers made by `like`, and wait until the device has finished all its work."""


class HostMemory:
    """`Memory` of the host."""

    device = HOST

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        size = prod(shape) * np.dtype(dtype).itemsize
        whole = np.zeros(size + LINE, dtype=np.uint8)
        start = -whole.ctypes.data % LINE
        found: Array = whole[start : start + size].view(dtype).reshape(shape)
        return found

    def place(self, buffer: Array) -> tuple[str, int, int, Sequence[int], int]:
        return "cpu", 0, ELEMENTS[buffer.dtype.name], buffer.shape, buffer.ctypes.data

    def copied(self, rows: Array) -> Array:
        return rows.copy()

    def like(self, numbers: Array) -> Array:
        return numbers

    def send(self, numbers: Iterable[tuple[Array, Any]]) -> None:
        pass


class DeviceMemory:
    """`Memory` of a device, as tensors of torch.

    Buffers that each pass fills again must not be inference tensors.

    Args:
        device: where the graph runs.
    """

    def __init__(self, device: "torch.device") -> None:
        import torch

        self.device, self._torch = device, torch

    def zeros(self, shape: Sequence[int], dtype: str) -> "torch.Tensor":
        with self._torch.inference_mode(False):
            return self._torch.zeros(*shape, dtype=getattr(self._torch, dtype), device=self.device)

    def place(self, buffer: "torch.Tensor") -> tuple[str, int, int, Sequence[int], int]:
        element = ELEMENTS[str(buffer.dtype).removeprefix("torch.")]
        return self.device.type, self.device.index or 0, element, tuple(buffer.shape), buffer.data_ptr()

    def copied(self, rows: "torch.Tensor") -> "torch.Tensor":
        return rows.clone()

    def like(self, numbers: Array) -> "torch.Tensor":
        with self._torch.inference_mode(False):
            return self._torch.tensor(numbers, device=self.device)

    def send(self, numbers: Iterable[tuple[Array, Any]]) -> None:
        for host, there in numbers:
            there.copy_(self._torch.from_numpy(host))
        if self.device.type == "cuda":
            self._torch.cuda.current_stream(self.device).synchronize()


ON_HOST = HostMemory()


def open_session(path: Path, device: "torch.device", threads: int) -> onnxruntime.InferenceSession:
    """Make a graph ready to run.

    Args:
        path: of a graph as `export.exported` describes it.
        device: a CPU, or a CUDA device for which onnxruntime has its provider.
        threads: for one pass on a CPU.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors are raised anyway
    # A pass's threads synchronise after each of its many nodes, and waking up would take longer than the node itself.
    # Between passes, spinning threads would take a core from other work, such as the other model's.
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    providers: list[Any] = ["CPUExecutionProvider"]
    if device.type == "cuda":
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": device.index or 0}))
    usual = os.environ.get(IN_TILES)
    os.environ[IN_TILES] = "1"
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    finally:
        if usual is None:
            del os.environ[IN_TILES]
        else:
            os.environ[IN_TILES] = usual
    drop_pages(path.parent)  # of most weights it has made copies that suit its kernels
    return session


class OnnxGraph:
    """A model's open graph.

    Args:
        path: of a graph from `export.exported`, after the rewrites of `sequences`.
        device, threads: see `open_session`.

    Attributes:
        session: runs it.
        dtype: of logits, states and caches.
        columns, width: of logits and of states.
        layers: the number of decoder layers with states.
        caches: heads and head size of each cache, by input name.
        placed: whether it reads positions.
        trees: whether it reads trees.
        tells: whether it computes signals where they are wanted.
        narrowest: the fewest tokens of a pass; see `rewriting.round_alike`.
    """

    def __init__(self, path: Path, device: "torch.device", threads: int) -> None:
        self.device, self.threads = device, threads
        self.session = open_session(path, device, threads)
        inputs = {given.name: given for given in self.session.get_inputs()}
        outputs = {made.name: made for made in self.session.get_outputs()}
        self.dtype = element_type(outputs["logits"].type)
        self.columns, self.width = int(outputs["logits"].shape[2]), int(outputs["state.last"].shape[2])
        self.layers = sum(name.startswith("state.") for name in outputs) - 1
        self.caches = {
            name: (int(given.shape[1]), int(given.shape[3]))
            for name, given in inputs.items()
            if name.startswith("past.")
        }
        self.placed, self.trees, self.tells = "positions" in inputs, "bias" in inputs, "signals" in inputs
        self.narrowest = int(self.session.get_modelmeta().custom_metadata_map.get(NARROWEST, 1))
        assert device.type == "cpu" or not self.trees, "trees are read on a CPU"
