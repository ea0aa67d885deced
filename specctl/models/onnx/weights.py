"""Where a graph's weights come from, and how they get into its file: one at a time, each of them once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from specctl.models.onnx.blocks import Blocks
from specctl.models.passes.weights import page_out

if TYPE_CHECKING:
    from torch import nn

EXTERNAL = 256  # Constants of at least this many bytes are outside of the graph's own file
LINE = 64  # Constants start at multiples of it, the size of a cache line
PAGE = 4096  # Large constants start at multiples of it, so that their pages can be mapped and dropped alone


class Weights(ABC):
    """A model's parameters by torch's names, read when they are needed."""

    @abstractmethod
    def array(self, name: str) -> "np.ndarray":
        """A parameter in torch's shape, ``(N, K)`` for N outputs of a linear layer; float32. It must not be changed."""

    def blocks(self, name: str) -> Blocks | None:  # noqa: ARG002 - most have none
        """A parameter of two dimensions as its file has it rounded; None where it is not rounded in blocks."""
        return None

    def done(self, name: str) -> None:  # noqa: B027 - most have nothing to do
        """Called when a parameter's numbers are not needed for now."""


class LoadedWeights(Weights):
    """The parameters of a loaded module.

    Args:
        module: names are relative to it.
    """

    def __init__(self, module: "nn.Module") -> None:
        self._parameters = dict(module.named_parameters(remove_duplicate=False))

    def array(self, name: str) -> "np.ndarray":
        found: np.ndarray = self._parameters[name].detach().float().cpu().numpy()
        return found

    def done(self, name: str) -> None:
        page_out([self._parameters[name].data])


class Lazy(ir.LazyTensor):
    """A constant of a graph whose numbers are computed whenever they are needed.

    Args:
        key: identifies its bytes; in the graph's file constants with the same key are stored once.
        fetch: returns the numbers, of this shape and type.
    """

    def __init__(
        self, name: str, key: Hashable, fetch: "Callable[[], np.ndarray]", shape: Sequence[int], dtype: ir.DataType
    ) -> None:
        super().__init__(lambda: ir.tensor(fetch(), dtype=dtype), dtype, ir.Shape(shape), name=name)
        self.key = key


class Weight(Lazy):
    """A graph's weight: parameters of a model, joined along their outputs.

    Args:
        source: has the parameters.
        names: of parameters with the same K.
        shape: of the constant in the graph.
        turned: whether the graph has the transpose of what torch has.
        dtype: of the constant in the graph.
    """

    def __init__(
        self, source: Weights, names: Sequence[str], shape: Sequence[int], dtype: ir.DataType, *, turned: bool = False
    ) -> None:
        self.source, self.names, self.turned = source, tuple(names), turned
        super().__init__("+".join(names), (source, self.names, turned), self._fetched, shape, dtype)

    def _fetched(self) -> "np.ndarray":
        whole = self.array()
        return (whole.T if self.turned else whole).astype(self.dtype.numpy(), order="C", copy=False)

    def array(self) -> "np.ndarray":
        """The parameters as torch has them, joined along the first dimension; float32."""
        found = [self.source.array(name) for name in self.names]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def by_output(self) -> "np.ndarray":
        """``(N, K)`` float32 of a product that reads the constant as ``(K, N)``."""
        whole = self.array()
        return whole if self.turned else whole.T

    def blocks(self) -> list[Blocks]:
        """`by_output` as the model's file has it rounded, its outputs one after the other; empty where some are not
        rounded. Neighbours of the same kind are joined.
        """
        found = [self.source.blocks(name) for name in self.names] if self.turned else []
        known = [part for part in found if part is not None]
        return Blocks.joined(known) if len(known) == len(found) else []

    @classmethod
    def joined(cls, weights: "Sequence[Weight]") -> "Weight":
        """One weight with the outputs of several, which have the same K and are all turned, or none is."""
        first, axis = weights[0], 1 if weights[0].turned else 0
        shape = list(first.shape.numpy())
        shape[axis] = sum(weight.shape.numpy()[axis] for weight in weights)
        names = [name for weight in weights for name in weight.names]
        return cls(first.source, names, shape, first.dtype, turned=first.turned)

    def transposed(self) -> "Weight":
        """The transpose, ``(K, N)`` of ``(N, K)`` and the other way round."""
        return Weight(self.source, self.names, self.shape.numpy()[::-1], self.dtype, turned=not self.turned)

    def done(self) -> None:
        """Called when the numbers are not needed for now."""
        for name in self.names:
            self.source.done(name)


def weight_of(value: ir.Value | None) -> Weight | None:
    """The weight that a value of a graph is; None for what is computed, and for small constants."""
    found = None if value is None else value.const_value
    return found if isinstance(found, Weight) else None


def save(model: ir.Model, path: Path, name: str) -> None:
    """Write a graph to a file, and its large constants to another one next to it.

    Constants that no node uses are left out. Those with the same key or the same memory are stored once. Numbers are
    read one constant at a time.

    Args:
        model: afterwards its large constants are read from the file.
        path: of the graph's file.
        name: of the other one.
    """
    places: dict[Hashable, tuple[int, int]] = {}
    kept: list[object] = []  # so that no memory is used again
    graph = model.graph
    with (path.parent / name).open("wb") as file:
        for value in list(graph.initializers.values()):
            tensor = value.const_value
            if tensor is None or not (value.uses() or value.is_graph_output()):
                del graph.initializers[str(value.name)]
                continue
            if tensor.nbytes < EXTERNAL:
                continue
            key = tensor.key if isinstance(tensor, Lazy) else _place(tensor)
            kept.append(tensor)
            if key not in places:
                file.write(bytes(-file.tell() % (PAGE if tensor.nbytes >= PAGE else LINE)))
                start = file.tell()
                numbers = np.ascontiguousarray(tensor.numpy())
                file.write(numbers.reshape(-1).view(np.uint8).data)
                places[key] = start, numbers.nbytes
                if isinstance(tensor, Weight):
                    tensor.done()
            start, length = places[key]
            value.const_value = ir.ExternalTensor(
                name,
                start,
                length,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=str(value.name),
                base_dir=path.parent,
            )
    ir.save(model, path)


def _place(tensor: ir.TensorProtocol) -> Hashable:
    """What identifies a constant's bytes: their place in memory, where they have one."""
    raw = tensor.raw if isinstance(tensor, ir.Tensor) else None
    if isinstance(raw, np.ndarray) and raw.flags.c_contiguous:
        return raw.ctypes.data, raw.nbytes
    return id(tensor)
