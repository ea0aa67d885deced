"""Memory as torch's caching allocator keeps it: pools of graphs, workspaces of cuBLAS, and what runs out."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.pretend_cuda.streams import Stream

MOST_KNOWN = 20_000
"""Storages whose last write is known before those that are gone are forgotten."""


@dataclass(eq=False)
class Workspace:
    """cuBLAS's, one for each stream (ATen/cuda/CublasHandlePool.cpp).

    Attributes:
        pool: of the graphs in whose memory it lies, because it was first wanted in a capture; None for ordinary memory.
        alive: until a graph that was captured on the stream is destroyed (torch 2.12 and later).
    """

    pool: Any
    alive: bool = True


@dataclass
class Memory:
    """What is allocated where; numbers are not kept, only what may go wrong.

    Attributes:
        pools: of each pool of graphs, how many of them are left.
        lying: of each pool, the storages that were asked for in it.
        underway: the graphs that the allocator believes to be captured right now.
        workspaces: by stream.
        written: by storage, the stream and the number of the work that wrote it last.
        left: how many allocations still succeed; None for any number.
        least: bytes from which on an allocation counts for ``left``.
        asked: bytes of each allocation that counted since `counts`.
    """

    pools: dict[Any, int] = field(default_factory=dict)
    lying: dict[Any, list[StorageWeakRef]] = field(default_factory=dict)
    underway: list[Any] = field(default_factory=list)
    workspaces: dict[Stream, Workspace] = field(default_factory=dict)
    written: dict[int, tuple[StorageWeakRef, Stream, int]] = field(default_factory=dict)
    left: int | None = None
    least: int = 0
    asked: list[int] = field(default_factory=list)

    def counts(self, least: int, left: int | None = None) -> None:
        """From now on look at allocations of at least so many bytes, and let so many of them succeed."""
        self.least, self.left, self.asked = least, left, []

    def allocate(self, size: int) -> None:
        """Raises OutOfMemoryError once, when it is time."""
        if size < self.least:
            return
        self.asked.append(size)
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            self.left = None
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate what is not there.")

    def workspace(self, stream: Stream, pool: Any) -> Workspace:
        """A stream's workspace; from a pool if a capture wants it first."""
        return self.workspaces.setdefault(stream, Workspace(pool))

    def lay(self, tensor: torch.Tensor, pool: Any) -> None:
        """A tensor is made in a pool, which stays as long as it is held."""
        self.lying.setdefault(pool, []).append(StorageWeakRef(tensor.untyped_storage()))

    def empty_cache(self) -> None:
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED (CUDACachingAllocator.cpp)")
        # Pools without graphs go, but for those in which something lies.
        held = {workspace.pool for workspace in self.workspaces.values() if workspace.alive}
        held |= {pool for pool, lying in self.lying.items() if not all(storage.expired() for storage in lying)}
        for pool in [pool for pool, graphs in self.pools.items() if not graphs and pool not in held]:
            del self.pools[pool]
            self.lying.pop(pool, None)

    def write(self, tensor: torch.Tensor, stream: Stream) -> None:
        storage = StorageWeakRef(tensor.untyped_storage())  # as long as it is held, no other has its address
        self.written[storage.cdata] = storage, stream, stream.issued
        if len(self.written) > MOST_KNOWN:
            self.written = {key: found for key, found in self.written.items() if not found[0].expired()}

    def require_ordered(self, tensor: torch.Tensor, stream: Stream, what: str) -> None:
        """Raise if another stream may still be writing what is now read or written."""
        found = self.written.get(tensor.untyped_storage()._cdata)
        if found is not None and not stream.knows(*found[1:]):
            raise RuntimeError(f"race: {what} does not wait for the stream that writes what it reads")
