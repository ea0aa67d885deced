"""The weights of a GGUF file by torch's names, with its blocks as they stand."""

from typing import TYPE_CHECKING, Any

import numpy as np

from specctl.errors import ModelError
from specctl.models.files.gguf import CONVERT, GgufFile, unpacking
from specctl.models.files.gguf_header import Tensor
from specctl.models.onnx.blocks import Blocks
from specctl.models.onnx.gguf_blocks import TYPES, of_type
from specctl.models.onnx.weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOATS = ("F32", "F16", "BF16")


class GgufWeights(Weights):
    """A GGUF file's weights, read when they are needed.

    transformers' tables say which tensor is which parameter, and what to undo of the conversion to GGUF: the order of a
    Llama's queries and keys, and the 1 added to Gemma's norms.

    Args:
        file: as it was opened.
        model: its skeleton, for names and shapes.
        role: the model's, for hints.

    Raises:
        ModelError: the file lacks a parameter, has one of another shape, or one in a form without a reader.
    """

    def __init__(self, file: GgufFile, model: "PreTrainedModel", role: str) -> None:
        self.file, self._role = file, role
        with file.read():
            from transformers.modeling_gguf_pytorch_utils import (
                TENSOR_PROCESSORS,
                TensorProcessor,
                get_gguf_hf_weights_map,
            )

            kind: Any = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
            self._undone = kind(config=model.config.to_dict())
            names = get_gguf_hf_weights_map(model, self._undone)
        self._tensors = {theirs: file.tensors[mine] for mine, theirs in names.items() if mine in file.tensors}
        parameters: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            first = parameters.setdefault(id(parameter), name)
            if name not in self._tensors and first in self._tensors:  # tied
                self._tensors[name] = self._tensors[first]
            self._require(name, tuple(parameter.shape))

    def _require(self, name: str, shape: tuple[int, ...]) -> None:
        unpack = unpacking(self.file.path, self._role)
        if len(shape) > 2:  # experts
            raise ModelError(f"{self.file.path} has experts or convolutions, which no graph runs.", unpack)
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.file.path} lacks the weight {name}.", f"Download it again. {CONVERT}")
        found = tensor.shape[::-1]
        if found != shape:
            raise ModelError(
                f"{self.file.path} does not match its own settings: {name} is {found}, not {shape}.",
                f"Download it again. {CONVERT}",
            )
        if (kind := tensor.type) not in (*FLOATS, *TYPES):
            raise ModelError(
                f"{self.file.path} has weights of the type {kind}, which specctl does not run as they are.",
                f"Use a file whose weights are {', '.join(TYPES)}. Or: {unpack}",
            )

    def array(self, name: str) -> "np.ndarray":
        from gguf import GGMLQuantizationType, dequantize

        tensor = self._tensors[name]
        rows = dequantize(self.file.rows(tensor), GGMLQuantizationType[tensor.type])
        found: np.ndarray = self._as_torch(tensor, rows)
        return np.ascontiguousarray(found, dtype=np.float32)

    def blocks(self, name: str) -> Blocks | None:
        tensor = self._tensors[name]
        if tensor.type not in TYPES or (order := self._order(tensor)) is None:
            return None
        found = of_type(tensor.type, self.file.rows(tensor))
        return found if np.array_equal(order, np.arange(len(order))) else found.rows(order)

    def _order(self, tensor: Tensor) -> "np.ndarray | None":
        """Which row of a tensor each output of torch's weight is ``(N,)``; None where torch does not have its rows."""
        rows = np.repeat(np.arange(tensor.shape[-1], dtype=np.int64)[:, None], 2, axis=1)
        try:
            moved = self._as_torch(tensor, rows)
        except ValueError:  # it depends on the inputs too
            return None
        same = moved.shape == rows.shape and np.array_equal(np.sort(moved, axis=0), rows)
        return moved[:, 0] if same and np.array_equal(moved[:, 0], moved[:, 1]) else None

    def _as_torch(self, tensor: Tensor, weights: "np.ndarray") -> "np.ndarray":
        found: np.ndarray = self._undone.process(weights=weights, name=tensor.name).weights
        return found
