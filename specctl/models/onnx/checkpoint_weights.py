"""The weights of quantised checkpoints (W4A16, GPTQ, AWQ) by torch's names, with their own blocks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specctl.errors import ModelError
from specctl.models.files.checkpoint import Checkpoint
from specctl.models.onnx.blocks import Blocks, unpacked
from specctl.models.onnx.store import Unable
from specctl.models.onnx.weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Read = Callable[[str], "np.ndarray"]  # A tensor of a layer by the end of its name, such as ``qweight``
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # Which of the 8 codes in a number of 32 bits is that of each column
BLOCKS = (128, 64, 32, 16)  # Sizes of blocks; a larger group is several blocks with the same scale


class Format(ABC):
    """How a quantised checkpoint stores a linear layer.

    Args:
        settings: its ``quantization_config``.
    """

    ends: tuple[str, ...]  # how the names of a quantised layer's tensors end; the first one has the codes
    bits: int

    @abstractmethod
    def __init__(self, settings: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def codes(self, read: Read, inputs: int) -> "tuple[np.ndarray, np.ndarray, np.ndarray | None]":
        """Codes ``(N, K)`` uint8, scales ``(N, G)`` float32, and zeros ``(N, G)``, None for the middle of the range."""

    def blocks(self, read: Read, inputs: int) -> Blocks:
        """A layer's weights.

        Args:
            read: returns its tensors.
            inputs: K.
        """
        codes, scales, zeros = self.codes(read, inputs)
        group = inputs // scales.shape[1]
        block = next(size for size in BLOCKS if group % size == 0)
        if zeros is not None and (zeros == 1 << self.bits - 1).all():
            zeros = None
        spread = group // block
        scales = np.repeat(scales, spread, axis=1)
        zeros = None if zeros is None else np.repeat(zeros, spread, axis=1).astype(np.uint8)
        return Blocks.from_codes(codes.reshape(len(codes), -1, block), scales, zeros, bits=self.bits)


class PackQuantized(Format):
    """compressed-tensors' ``pack-quantized``, such as W4A16 and W8A16."""

    ends = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        groups = list((settings.get("config_groups") or {}).values())
        if settings.get("format") != "pack-quantized" or len(groups) != 1:
            raise Unable("its compressed-tensors format is not pack-quantized with one group")
        how = groups[0].get("weights") or {}
        if groups[0].get("input_activations") or how.get("type", "int") != "int" or how.get("actorder") == "group":
            raise Unable("it rounds activations too, or orders its inputs by their activations")
        self.bits = int(how.get("num_bits") or 0)
        self._symmetric = bool(how.get("symmetric", True))

    def codes(self, read: Read, inputs: int) -> "tuple[np.ndarray, np.ndarray, np.ndarray | None]":
        scales = read("weight_scale")
        zeros = None
        if not self._symmetric:
            zeros = _unpacked(read("weight_zero_point").T, self.bits).T[: len(scales)]
        return _unpacked(read("weight_packed"), self.bits)[:, :inputs], scales, zeros


class Gptq(Format):
    """GPTQ, as AutoGPTQ and GPTQModel write it."""

    ends = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.bits = int(settings.get("bits") or 0)
        if settings.get("dynamic") or settings.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
            raise Unable("it is GPTQ of another kind")
        self._less = settings.get("checkpoint_format") != "gptq_v2"  # whether zeros are stored too low by 1

    def codes(self, read: Read, inputs: int) -> "tuple[np.ndarray, np.ndarray, np.ndarray | None]":
        scales = read("scales").T  # (N, G)
        order = read("g_idx").astype(np.int64)
        if not np.array_equal(order, np.arange(inputs) // (inputs // scales.shape[1])):
            raise Unable("its inputs are ordered by their activations (desc_act), so that its groups are not blocks")
        packed = read("qzeros").view(np.uint32)
        if self._less:  # 1 in all zeros of a number at once, as GPTQModel does, so that a borrowed bit is given back
            packed = packed + np.uint32(0x11111111 if self.bits == 4 else 0x01010101)
        zeros = _unpacked(packed, self.bits).T[: len(scales)]
        return _unpacked(read("qweight").T, self.bits)[:, :inputs], scales, zeros


class Awq(Format):
    """AWQ, as AutoAWQ writes it (``gemm``)."""

    ends = ("qweight", "qzeros", "scales")

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.bits = int(settings.get("bits") or 0)
        if self.bits != 4 or str(settings.get("version", "gemm")).lower() != "gemm":
            raise Unable("it is AWQ of another kind than 4 bits and version gemm")

    def codes(self, read: Read, inputs: int) -> "tuple[np.ndarray, np.ndarray, np.ndarray | None]":
        codes, zeros = (
            (rows := _unpacked(read(end), 4)).reshape(len(rows), -1, 8)[..., AWQ_ORDER].reshape(len(rows), -1).T
            for end in ("qweight", "qzeros")
        )  # (N, K) and (N, G)
        return codes[:, :inputs], read("scales").T, zeros


FORMATS: dict[str, type[Format]] = {"compressed-tensors": PackQuantized, "gptq": Gptq, "awq": Awq}
"""By ``quant_method``."""


def format_of(settings: Mapping[str, Any] | None) -> Format:
    """The form of a checkpoint's weights.

    Args:
        settings: its ``quantization_config``; None without one.

    Raises:
        Unable: it has no blocks that onnxruntime can take over.
    """
    method = str((settings or {}).get("quant_method"))
    if settings is None or method not in FORMATS:
        raise Unable("its checkpoint is quantised already")
    found = FORMATS[method](settings)
    if found.bits not in (4, 8):
        raise Unable(f"its weights have {found.bits} bits, and onnxruntime has products for 4 and 8")
    return found


class CheckpointWeights(Weights):
    """A quantised checkpoint's weights, read when they are needed.

    Args:
        checkpoint: its files, on this machine.
        form: of its quantised layers.
        model: its skeleton, for names and shapes.

    Raises:
        Unable: its tensors have other names or shapes than the model's.
        ModelError: a file is damaged.
    """

    def __init__(self, checkpoint: Checkpoint, form: Format, model: "PreTrainedModel") -> None:
        self._checkpoint, self._form = checkpoint, form
        self._files = checkpoint.tensor_files()
        self._shapes = {}
        self._names: dict[str, str] = {}  # of tied parameters, the one that is stored
        first: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            stored = first.setdefault(id(parameter), name)
            self._names[name] = name if self._stored(name) else stored
            self._shapes[name] = tuple(parameter.shape)
            if not self._stored(self._names[name]):
                raise Unable(f"its files have no {name}")

    def _stored(self, name: str) -> bool:
        return name in self._files or self._layer(name) + self._form.ends[0] in self._files

    @staticmethod
    def _layer(name: str) -> str:
        return name.removesuffix("weight")

    def array(self, name: str) -> "np.ndarray":
        blocks = self.blocks(name)
        return self._read(self._names[name]) if blocks is None else blocks.values()

    def blocks(self, name: str) -> Blocks | None:
        stored = self._names[name]
        if stored in self._files:
            return None
        layer, (outputs, inputs) = self._layer(stored), self._shapes[name]

        def read(end: str) -> "np.ndarray":
            return self._read(layer + end)

        try:
            found = self._form.blocks(read, inputs)
        except (KeyError, ValueError, StopIteration, ZeroDivisionError) as error:
            raise ModelError(
                f"{self._checkpoint}: the tensors of {layer}weight do not match its quantization_config.",
                "Copy or download the checkpoint again.",
            ) from error
        if (found.outputs, found.inputs) != (outputs, inputs):
            raise Unable(f"{name} is {(found.outputs, found.inputs)} in its files, not {(outputs, inputs)}")
        return found

    def _read(self, name: str) -> "np.ndarray":
        tensor = self._checkpoint.read([name], self._files)[name]
        found: np.ndarray = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
        return found


def _unpacked(packed: "np.ndarray", bits: int) -> "np.ndarray":
    """Codes ``(M, C * 32 / bits)`` uint8 of numbers ``(M, C)`` int32, the low bits first."""
    return unpacked(np.ascontiguousarray(packed).view(np.uint8), bits)  # of (M, C * 4), the low byte first
