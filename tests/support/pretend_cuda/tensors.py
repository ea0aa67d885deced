"""Tensors and generators that say they are on a CUDA device."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


class CudaTensor(torch.Tensor):
    """Says it is on a device; the numbers are in ``inner``, on the CPU, or on meta where there are shapes alone."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device, requires_grad: bool = False) -> "CudaTensor":
        with torch.inference_mode(False):  # views of tensors of one kind must not be of the other
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=device,
                requires_grad=requires_grad,
            )
        made.inner = inner
        return made

    def __init__(self, inner: torch.Tensor, device: torch.device, requires_grad: bool = False) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a pretended CUDA tensor outside of the pretence")

    # torch's own indexing guards the device, which a build without CUDA does not know.

    def __getitem__(self, key: Any) -> torch.Tensor:
        found: torch.Tensor = self
        dim, indices = 0, {}
        for part in _without_ellipsis(key if isinstance(key, tuple) else (key,), self.dim()):
            if part is None:
                found = aten.unsqueeze(found, dim)
            elif isinstance(part, slice):
                if part != slice(None):
                    found = aten.slice(found, dim, part.start, part.stop, part.step or 1)
            elif isinstance(part, torch.Tensor | list):
                indices[dim] = torch.tensor(part) if isinstance(part, list) else part
            else:
                found = aten.select(found, dim, int(part))
                continue
            dim += 1
        if indices:
            return aten.index(found, [indices.get(place) for place in range(max(indices) + 1)])
        return aten.alias(self) if found is self else found

    def __setitem__(self, key: Any, value: Any) -> None:
        place = self[key]
        # Of a number torch makes a tensor of the host, which is copied and waited for if it has the place's shape.
        there = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=self.dtype)
        if there.device.type == "cpu" and not there.dim() and place.dim():
            aten.fill_(place, there.item())
        else:
            aten.copy_(place, there)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return aten.copy_(self, source, non_blocking)

    def contiguous(self, memory_format: Any = torch.contiguous_format) -> torch.Tensor:
        there = self.is_contiguous(memory_format=memory_format)
        return self if there else aten.clone(self, memory_format=memory_format)

    def new_tensor(self, data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def nonzero(self, *, as_tuple: bool = False) -> Any:
        found = aten.nonzero(self)
        return tuple(found.unbind(1)) if as_tuple else found

    def __invert__(self) -> torch.Tensor:
        return aten.bitwise_not(self)

    def __int__(self) -> int:
        return int(self.item())

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.item())

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


def _without_ellipsis(key: tuple[Any, ...], dims: int) -> tuple[Any, ...]:
    place = next((number for number, part in enumerate(key) if part is Ellipsis), None)
    if place is None:
        return key
    taken = sum(part is not None for part in key) - 1
    return (*key[:place], *[slice(None)] * (dims - taken), *key[place + 1 :])


class Generator(torch.Generator):
    """A generator of the CPU that says where it lives."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls, "cpu")
        named = torch.device(device)
        made._device = torch.device("cuda", 0) if named.type == "cuda" and named.index is None else named
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


def drawing(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """In the place of a function such as `torch.rand`: a generator draws on its own device only."""

    def drawn(*size: Any, generator: torch.Generator | None = None, device: Any = "cpu", **named: Any) -> torch.Tensor:
        if generator is not None and generator.device != Generator(device).device:
            raise RuntimeError(f"Expected a generator on {device} but found one on {generator.device}")
        return draw(*size, generator=generator, device=device, **named)

    return drawn


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention with numbers, or with shapes alone."""
    if query.is_meta:
        return torch.empty_like(query)
    return REAL_ATTENTION(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


REAL_ATTENTION = torch.nn.functional.scaled_dot_product_attention


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """In the place of `torch.Tensor.pin_memory`, for which a build without CUDA has no memory."""
    if isinstance(tensor, CudaTensor):
        raise RuntimeError(f"cannot pin a tensor on {tensor.device}: only dense CPU tensors can be pinned")
    copy = tensor.clone()
    copy.untyped_storage().pretended_pinned = True  # type: ignore[attr-defined]
    return copy


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor is such memory, or a view of it."""
    return getattr(tensor.untyped_storage(), "pretended_pinned", False)
