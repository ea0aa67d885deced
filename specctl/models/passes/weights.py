"""The size and the location of a model's weights."""

import ctypes
import mmap
import sys
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

PAGE_OUT, DO_NOT_NEED = 21, 4  # ``MADV_PAGEOUT`` and ``MADV_DONTNEED`` of Linux


def weight_bytes(model: "nn.Module") -> int:
    """The memory of a model's parameters in bytes, wherever they are."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def page_out(weights: "Iterable[torch.Tensor]") -> None:
    """Free the memory of weights that are mapped from files, until they are read again.

    This is a hint to Linux. It preserves the contents, even modified ones. Weights outside of files are unaffected.
    """
    mapped = [(start, end) for start, end, _ in _mapped_files()]
    starts = [start for start, _ in mapped]
    for weight in weights:
        if weight.device.type != "cpu":
            continue
        start, end = weight.data_ptr(), weight.data_ptr() + weight.numel() * weight.element_size()
        place = bisect_right(starts, start) - 1
        if place >= 0 and end <= mapped[place][1]:
            _advise(start, end, PAGE_OUT)


def drop_pages(folder: Path) -> None:
    """Free the memory of a folder's files that libraries have mapped and never write to, until they are read again.

    Linux keeps what it has read of the files, so that they are read again without the disk.
    """
    place = f"{folder.resolve()}/"
    for start, end, file in _mapped_files():
        if file.startswith(place):
            _advise(start, end, DO_NOT_NEED)


def _advise(start: int, end: int, what: int) -> None:
    """Tell Linux about the whole pages within an address range."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        advise(first, last - first, what)


def _mapped_files() -> list[tuple[int, int, str]]:
    """The files mapped in this process, by ascending address: first address, the one after the last, and path."""
    found = []
    if sys.platform != "linux":
        return []
    try:
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                span, _, _, _, file, *path = line.rstrip("\n").split(maxsplit=5)
                if file != "0":
                    start, end = span.split("-")
                    found.append((int(start, 16), int(end, 16), "".join(path)))
    except (OSError, ValueError):
        return []
    return sorted(found)


def device_of(model: "nn.Module") -> "torch.device":
    """The device for a model's ids: that of its first weight.

    Between passes, weights that accelerate offloads to main memory or disk are on meta; they are used on the first of
    the other devices.
    """
    import torch

    return next((weight.device for weight in model.parameters() if not weight.is_meta), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Where:
    """The location and form of a model's weights, loaded or not yet."""

    devices: tuple[str, ...]  # their names, at least one
    weights: int  # bytes of the weights
    # the method that quantises the weights in torch, such as ``bitsandbytes``; None without one
    quantised: str | None = None
    # how the model is split over processes; None for a whole model
    sharded: Literal["tensor", "pipeline"] | None = None

    @classmethod
    def of(cls, model: "PreTrainedModel", sharded: Literal["tensor", "pipeline"] | None = None) -> "Where":
        """The location of a loaded model; for a sharded one, of this process's share."""
        spread = set(map(str, getattr(model, "hf_device_map", {}).values()))
        there = dict.fromkeys(str(parameter.device) for parameter in model.parameters())
        method = getattr(model, "quantization_method", None)
        quantised = None if method is None else str(getattr(method, "value", method))
        return cls(tuple(sorted(spread) if len(spread) > 1 else there), weight_bytes(model), quantised, sharded)

    @property
    def device(self) -> "torch.device":
        """The device that decides about the passes: the first one that is not the CPU."""
        import torch

        return torch.device(next((name for name in self.devices if name not in ("cpu", "disk", "meta")), "cpu"))

    @property
    def no_compiler(self) -> str | None:
        """Why none of the model's passes is compiled, as the end of a sentence; None if they can be."""
        from specctl.models.passes.compilation import missing_compiler

        if self.sharded == "pipeline":
            return "the stages of a pipeline wait for one another within a pass"
        return missing_compiler(self.device)
