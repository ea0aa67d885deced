"""CUDA graphs: what is recorded on a stream and done again at the same addresses.

After aten/src/ATen/cuda/CUDAGraph.cpp. A capture runs nothing, so it leaves NaN where its results will be. Memory that
a graph does not own is held weakly: a replay that reaches memory given back since is an error, not an accident.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.support.pretend_cuda.memory import Workspace
from tests.support.pretend_cuda.operations import each_changed, leaves
from tests.support.pretend_cuda.streams import Stream

if TYPE_CHECKING:
    from tests.support.pretend_cuda.devices import Devices

REFUSED = "CUDA error: operation not permitted when stream is capturing"


class Address:
    """Where a tensor lies."""

    def __init__(self, tensor: torch.Tensor, owned: bool) -> None:
        self.owned = owned
        self._kept = tensor if owned else None
        self._weak = None if owned else tensor.untyped_storage()._weak_ref()
        self._form = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self, what: str) -> torch.Tensor:
        if self._kept is not None:
            return self._kept
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        if storage is None:
            raise RuntimeError(f"use after free: a replayed {what} reaches memory given back after the capture")
        with torch.inference_mode(False):
            return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, *self._form)


class Node:
    """A kernel in a graph.

    Args:
        function: what it computes, of plain tensors.
        given: its arguments and named arguments.
        results: tensors that its results are written to; None where it writes to its arguments.
        owned: whether the graph owns a tensor's memory.
        seconds: on the device.
    """

    def __init__(
        self, function: Any, given: Any, results: Any, owned: Callable[[torch.Tensor], bool], seconds: float
    ) -> None:
        self.name, self.seconds = str(function), seconds
        self._function = function
        self._given = each_changed(lambda x: Address(x, owned(x)) if isinstance(x, torch.Tensor) else x, given)
        tensors = [x for x in leaves(results) if isinstance(x, torch.Tensor)]
        self._results = [Address(x, owned(x)) for x in tensors]

    def run(self) -> None:
        args, named = each_changed(lambda x: x.tensor(self.name) if isinstance(x, Address) else x, self._given)
        found = [x for x in leaves(self._function(*args, **named)) if isinstance(x, torch.Tensor)]
        for place, value in zip(self._results, found, strict=False):  # none for one that writes to its arguments
            place.tensor(self.name).copy_(value)

    def outside(self) -> list[torch.Tensor]:
        """What it reads or writes of memory that the graph does not own."""
        addresses = [x for x in (*leaves(self._given), *self._results) if isinstance(x, Address)]
        return [address.tensor(self.name) for address in addresses if not address.owned]

    def spoil(self) -> None:
        """Nothing has run: whatever reads a result before the first replay gets nonsense."""
        for place in self._results:
            tensor = place.tensor(self.name)
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            elif tensor.dtype != torch.bool:
                tensor.fill_(torch.iinfo(tensor.dtype).max)


@dataclass(eq=False)
class Captured:
    """What there is to know of a capture, also when its graph is gone.

    Attributes:
        stream, pool: on which, and into which memory.
        nodes: how many kernels were recorded.
        replays: how often the graph was launched.
        alive: whether the graph is still there.
    """

    stream: Stream
    pool: Any
    nodes: int = 0
    replays: int = 0
    alive: bool = True


class CUDAGraph:
    """In the place of `torch.cuda.CUDAGraph`, below torch's own `torch.cuda.graph`."""

    devices: "Devices | None" = None

    def __init__(self, keep_graph: bool = False) -> None:  # noqa: ARG002 - torch's signature
        assert CUDAGraph.devices is not None
        self._at = CUDAGraph.devices
        self.nodes: list[Node] = []
        self.stream: Stream | None = None
        self.pool_id: Any = None
        self.broken: str | None = None
        self._memory: list[torch.Tensor] = []
        self._owned: set[int] = set()
        self._workspaces: set[Workspace] = set()
        self._ready = False

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        at = self._at
        self.stream = at.streams.current()
        if not self.stream.number:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.pool_id = object() if pool is None else pool
        if at.memory.pools.get(self.pool_id) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED (CUDACachingAllocator.cpp)")
        at.memory.pools[self.pool_id] = at.memory.pools.get(self.pool_id, 0) + 1
        at.memory.underway.append(self)
        at.capturing = self
        self._known = Captured(self.stream, self.pool_id)
        at.captures.append(self._known)

    def capture_end(self) -> None:
        at = self._at
        at.capturing = None
        if self.broken:
            # Up to torch 2.12 the allocator is not told and believes in the capture for ever (pytorch #180395).
            if at.torch >= (2, 13):
                at.memory.underway.remove(self)
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        at.memory.underway.remove(self)
        if not self.nodes:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong "
                "device or stream.",
                stacklevel=2,
            )
        self._ready = True
        self._known.nodes = len(self.nodes)
        at.clock.host(at.clock.costs.capture)
        for node in self.nodes:
            node.spoil()

    def refuse(self, what: str) -> RuntimeError:
        """What cannot be captured ends the capture; the error to raise."""
        self.broken = what
        return RuntimeError(REFUSED)

    def record(self, function: Any, given: Any, results: Any, mutates: bool, seconds: float) -> None:
        self.own(() if mutates else results)
        self.nodes.append(Node(function, given, () if mutates else results, self.owns, seconds))

    def own(self, results: Any) -> None:
        """Memory that is asked for while capturing comes from the graph's pool."""
        for tensor in leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._owned.add(tensor.untyped_storage()._cdata)
                self._memory.append(tensor)
                self._at.memory.lay(tensor, self.pool_id)

    def multiplies(self) -> None:
        """A matrix product takes the stream's workspace."""
        assert self.stream is not None
        self._workspaces.add(self._at.memory.workspace(self.stream, self.pool_id))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory was asked for while capturing."""
        return tensor.untyped_storage()._cdata in self._owned

    def replay(self) -> None:
        at, stream = self._at, self.stream
        assert stream is not None, "a graph that was not captured"
        assert self._ready, "a graph that was reset"
        if not all(workspace.alive for workspace in self._workspaces):
            raise RuntimeError("use after free: the graph's cuBLAS workspace went with another graph of its stream")
        at.ledger.note("replay", f"{len(self.nodes)} nodes", stream.device)
        at.clock.host(at.clock.costs.replay)
        at.clock.work(stream.device, sum(node.seconds for node in self.nodes))
        launched = at.streams.current(stream.device)
        at.streams.issue(launched)
        for node in self.nodes:
            for tensor in node.outside():
                at.memory.require_ordered(tensor, launched, f"a replayed {node.name}")
                at.memory.write(tensor, launched)
            node.run()
        self._known.replays += 1

    def reset(self) -> None:
        self.nodes.clear()
        self._memory.clear()
        if not self._ready:
            return
        self._ready = self._known.alive = False
        at = self._at
        if at.torch >= (2, 12):  # clearCublasWorkspacesForStream (pytorch #175276, #193402)
            assert self.stream is not None
            gone = at.memory.workspaces.pop(self.stream, None)
            if gone is not None:
                gone.alive = False
        at.memory.pools[self.pool_id] = max(at.memory.pools.get(self.pool_id, 1) - 1, 0)

    def pool(self) -> Any:
        return self.pool_id

    __del__ = reset
