"""Weights rounded in blocks to 4 or 8 bits, in the layout of onnxruntime's MatMulNBits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, Self

import numpy as np

BLOCK = 32  # Number of weights of one output that share a scale by default
BITS = {"int8": 8, "int4": 4}
WIDE_BLOCK = 64
"""Weights of 8 bits that share a scale, where K is a multiple: passes of 5 tokens take two thirds of the time of blocks
of 32. In 4 bits, a lone row rounds otherwise than several with blocks of 64 and AVX-512."""
OUTPUT_BITS = 8  # Of the output layer, as in files of llama.cpp: rounded to 4 bits, it costs more than other layers
SCALE_BYTES = 4  # Of a scale in float32
Form = Literal["symmetric", "zeros", "minima"]
"""What a block has besides its codes and its scale: nothing, an integer zero, or a float minimum."""
PIECE = 1 << 22  # Weights are rounded, and rounded weights are read, at most this many at a time


class NotFinite(ValueError):  # noqa: N818 - it is a finding
    """Weights contain NaN or infinity; the message is the end of a sentence."""

    def __init__(self) -> None:
        super().__init__("its weights contain NaN or infinity")


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Rounded weights of N outputs and K inputs. The inputs are in B blocks, the last one padded.

    A weight is ``scale * (code - zero) + minimum``.

    Attributes:
        codes: ``(N, B, block * bits / 8)`` uint8; of two 4-bit codes in a byte, the low half comes first.
        scales: ``(N, B)`` float32.
        zeros: ``(N, B)`` uint8; None for `middle` everywhere.
        minima: ``(N, B)`` float32; None for 0 everywhere.
        bits: 4 or 8.
        inputs: K.
    """

    codes: "np.ndarray"
    scales: "np.ndarray"
    zeros: "np.ndarray | None"
    minima: "np.ndarray | None"
    bits: int
    inputs: int

    def __post_init__(self) -> None:
        outputs, blocks = self.scales.shape
        assert self.codes.shape[:2] == (outputs, blocks), "one scale for each block"
        assert -(-self.inputs // self.block) == blocks, "as many blocks as the inputs fill"
        for part in (self.zeros, self.minima):
            assert part is None or part.shape == (outputs, blocks), "one for each block"

    @classmethod
    def of(cls, weight: "np.ndarray", bits: int, *, block: int = BLOCK, form: Form = "zeros") -> Self:
        """Round weights to the nearest codes.

        Args:
            weight: ``(N, K)``, any float dtype and any strides.
            bits: 4 or 8.
            block: 16, 32, 64 or 128.
            form: what each block has besides its codes and its scale.

        Raises:
            NotFinite: a weight is NaN or infinite.
        """
        outputs, inputs = weight.shape
        count, most = -(-inputs // block), (1 << bits) - 1
        codes = np.empty((outputs, count, block * bits // 8), dtype=np.uint8)
        scales = np.empty((outputs, count), dtype=np.float32)
        zeros = np.empty((outputs, count), dtype=np.uint8) if form == "zeros" else None
        minima = np.empty((outputs, count), dtype=np.float32) if form == "minima" else None
        for part in _pieces(outputs, count * block):
            groups = _grouped(weight[part], count, block)  # (n, B, block)
            low, high = groups.min(-1), groups.max(-1)
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                raise NotFinite
            middle = np.full(low.shape, _middle(bits), dtype=np.float32)
            if form == "symmetric":
                found = np.where(high > -low, -high, -low) / _middle(bits)  # the extreme value gets the code 0
            else:
                if form == "zeros":
                    low, high = np.minimum(low, 0), np.maximum(high, 0)
                found = high / most - low / most  # the difference itself may overflow
            divisor = np.where(found == 0, 1, found)
            if zeros is not None:
                middle = np.clip(np.rint(-low / divisor), 0, most)
                zeros[part] = middle
            if minima is not None:
                minima[part] = low + _middle(bits) * found
                groups -= minima[part][..., None]
            groups /= divisor[..., None]
            np.rint(groups, out=groups)
            groups += middle[..., None]
            scales[part] = found
            codes[part] = _packed(np.clip(groups, 0, most, out=groups).astype(np.uint8), bits)
        return cls(codes, scales, zeros, minima, bits, inputs)

    @classmethod
    def from_codes(
        cls,
        codes: "np.ndarray",
        scales: "np.ndarray",
        zeros: "np.ndarray | None" = None,
        minima: "np.ndarray | None" = None,
        *,
        bits: int,
    ) -> Self:
        """Blocks of codes ``(N, B, block)`` uint8, one in each byte; the rest as in the class. K is ``B * block``."""
        _, blocks, block = codes.shape
        return cls(_packed(codes, bits), scales, zeros, minima, bits, blocks * block)

    @classmethod
    def joined(cls, parts: "Sequence[Blocks]") -> "list[Blocks]":
        """The outputs of all parts, one after the other; neighbours of the same kind as one."""
        return [cls._joined(list(same)) for _, same in groupby(parts, key=lambda part: part.kind)]

    @classmethod
    def _joined(cls, parts: "Sequence[Blocks]") -> "Blocks":
        first = parts[0]
        if len(parts) == 1:
            return first

        def whole(arrays: "Sequence[np.ndarray | None]") -> "np.ndarray | None":
            known = [each for each in arrays if each is not None]
            return np.concatenate(known) if known else None

        return replace(
            first,
            codes=np.concatenate([part.codes for part in parts]),
            scales=np.concatenate([part.scales for part in parts]),
            zeros=whole([part.zeros for part in parts]),
            minima=whole([part.minima for part in parts]),
        )

    @property
    def outputs(self) -> int:
        """N."""
        return len(self.scales)

    @property
    def block(self) -> int:
        """The number of weights that share a scale."""
        return int(self.codes.shape[2]) * 8 // self.bits

    @property
    def middle(self) -> int:
        """The zero of blocks that have none of their own."""
        return _middle(self.bits)

    @property
    def kind(self) -> tuple[int, int, int, bool, bool]:
        """What blocks that are joined have in common."""
        return self.bits, self.block, self.inputs, self.zeros is None, self.minima is None

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.minima)
        return sum(part.nbytes for part in parts if part is not None)

    def packed_zeros(self) -> "np.ndarray | None":
        """Zeros ``(N * ceil(B * bits / 8),)`` uint8 as MatMulNBits takes them; None without zeros."""
        if self.zeros is None or self.bits == 8:
            return None if self.zeros is None else self.zeros.reshape(-1)
        even = np.pad(self.zeros, ((0, 0), (0, self.zeros.shape[1] % 2)))
        return _packed(even, self.bits).reshape(-1)

    def rows(self, order: "np.ndarray | slice") -> "Blocks":
        """Some outputs, in this order."""
        return replace(
            self,
            codes=self.codes[order],
            scales=self.scales[order],
            zeros=None if self.zeros is None else self.zeros[order],
            minima=None if self.minima is None else self.minima[order],
        )

    def values(self) -> "np.ndarray":
        """The weights ``(N, K)`` float32."""
        outputs, blocks = self.scales.shape
        found = np.empty((outputs, self.inputs), dtype=np.float32)
        for part in _pieces(outputs, blocks * self.block):
            groups = unpacked(self.codes[part], self.bits).astype(np.float32)  # (n, B, block)
            groups -= self.middle if self.zeros is None else self.zeros[part][..., None]
            groups *= self.scales[part][..., None]
            if self.minima is not None:
                groups += self.minima[part][..., None]
            found[part] = groups.reshape(len(groups), -1)[:, : self.inputs]
        return found


def rounded(weight: "np.ndarray", bits: int) -> Blocks:
    """Weights ``(N, K)`` in the form that graphs take.

    Raises:
        NotFinite: a weight is NaN or infinite.
    """
    return Blocks.of(weight, bits, block=_block_of(weight.shape[1], bits), form="symmetric")


def rounded_nbytes(shape: Sequence[int], bits: int) -> int:
    """The size in bytes of `rounded` weights of this shape ``(N, K)``."""
    outputs, inputs = shape
    block = _block_of(inputs, bits)
    return outputs * -(-inputs // block) * (block * bits // 8 + SCALE_BYTES)


def _block_of(inputs: int, bits: int) -> int:
    return WIDE_BLOCK if bits == 8 and inputs % WIDE_BLOCK == 0 else BLOCK


def _middle(bits: int) -> int:
    return 1 << bits - 1


def _pieces(outputs: int, size: int) -> Iterator[slice]:
    """Slices of outputs with ``size`` weights each."""
    step = max(1, PIECE // max(1, size))
    for start in range(0, outputs, step):
        yield slice(start, start + step)


def _grouped(weight: "np.ndarray", blocks: int, block: int) -> "np.ndarray":
    """A copy of weights ``(n, K)`` as ``(n, B, block)`` float32. Padding repeats each output's last weight, so that it
    does not widen a block's range.
    """
    outputs, inputs = weight.shape
    groups = np.empty((outputs, blocks * block), dtype=np.float32)
    groups[:, :inputs] = weight
    groups[:, inputs:] = groups[:, inputs - 1 : inputs]
    return groups.reshape(outputs, blocks, block)


def _packed(codes: "np.ndarray", bits: int) -> "np.ndarray":
    """Codes, one in each byte, as ``bits`` bits each; the last dimension shrinks."""
    return np.ascontiguousarray(codes) if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4


def unpacked(codes: "np.ndarray", bits: int) -> "np.ndarray":
    """Codes of ``bits`` bits each, the low bits first, as one in each byte; the last dimension grows."""
    return codes if bits == 8 else np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1)
