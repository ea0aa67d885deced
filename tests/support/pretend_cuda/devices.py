"""So many pretended devices, put in the place of torch's."""

import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from tests.support.pretend_cuda.captures import Captured, CUDAGraph
from tests.support.pretend_cuda.clock import Clock, Costs
from tests.support.pretend_cuda.kernels import Kernels, Mode
from tests.support.pretend_cuda.ledger import Ledger
from tests.support.pretend_cuda.memory import Memory
from tests.support.pretend_cuda.streams import Event, Stream, Streams
from tests.support.pretend_cuda.tensors import CudaTensor, Generator, drawing, pinned

CAPACITY = 80 << 30
"""Bytes of each device's memory, all free."""


class Devices:
    """A context in which ``cuda:0`` and further devices seem to be there.

    Args:
        count: how many.
        shapes_only: whether tensors hold no numbers; what the host reads then comes from ``answers``.
        clock: modules whose ``perf_counter`` reads the simulated host's clock.
        costs: of that clock.
        torch_like: whose ways around captures to follow, as a version of torch.
        float64: whether they have numbers of 64 bits, which Apple's GPUs and some of Intel's lack.

    Attributes:
        ledger, clock, streams, memory: see their modules.
        capturing: the graph that is being captured; None if none is.
        captures: all that have begun.
        attended: of each attention, the shapes of queries and keys, the keys' strides, and the mask.
        cudnn: whether torch was allowed to choose cuDNN's attention.
        answers: with ``shapes_only``, the numbers that the host reads from a tensor.
    """

    def __init__(
        self,
        count: int = 1,
        *,
        shapes_only: bool = False,
        clock: tuple[str, ...] = (),
        costs: Costs | None = None,
        torch_like: tuple[int, int] = (2, 13),
        float64: bool = True,
    ) -> None:
        self.count, self.shapes_only, self.torch, self.float64 = count, shapes_only, torch_like, float64
        self.ledger, self.memory, self.streams = Ledger(), Memory(), Streams(count)
        self.clock = Clock(costs or Costs(), count)
        self.capturing: CUDAGraph | None = None
        self.captures: list[Captured] = []
        self.attended: list[tuple[Any, ...]] = []
        self.cudnn = True
        self.answers: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.zeros(x.shape, dtype=x.dtype)
        self._watches_waits, self._has_warned = "default", False
        self._clocked = clock
        self._stack = ExitStack()
        self._kernels = Kernels(self)

    def named(self, device: Any) -> torch.device:
        """A device with its number; ``cuda`` alone is the current one."""
        found = torch.device(device)
        return torch.device("cuda", self.streams.index(found)) if found.type == "cuda" else found

    def recording(self, stream: Stream) -> CUDAGraph | None:
        """The graph that records what a stream is given; None if it runs."""
        graph = self.capturing
        return graph if graph is not None and graph.stream is stream else None

    def wait(
        self,
        what: str,
        device: torch.device,
        stream: Stream | None = None,
        work: int | None = None,
        until: float | None = None,
        *,
        copies: bool = False,
    ) -> None:
        """Let the host wait for a device, or for some work of one stream.

        Args:
            what: the reason.
            device: which.
            stream, work, until: one stream, the number of its work and when that is done; else all of the device's.
            copies: whether a number comes to the host by it.
        """
        if self.capturing is not None:
            raise self.capturing.refuse(what)
        if self._watches_waits in ("error", 2):
            raise RuntimeError("called a synchronizing CUDA operation")
        if copies:
            self.ledger.note("down", what, device)
            self.clock.host(self.clock.costs.call)
        self.ledger.note("wait", what, device)
        if until is None:
            self.clock.wait(device)
        else:
            self.clock.now = max(self.clock.now, until) + self.clock.costs.wait
        self.streams.meet(device, stream, work)

    def synchronize(self, device: Any = None) -> None:
        self.wait("torch.cuda.synchronize", torch.device("cuda", self.streams.index(device)))

    def put(self, tensor: torch.Tensor, device: Any) -> CudaTensor:
        """A tensor of the host on a device, without a note of it."""
        plain = tensor.detach() if self.shapes_only else tensor.detach().clone()
        return CudaTensor(plain, self.named(device))

    def move(self, module: Any, device: Any, only: Callable[[str], bool] = lambda _: True) -> Any:
        """A module's parameters and buffers to a device, in place; of some names only."""
        moved: dict[int, torch.Tensor] = {}
        for prefix, part in module.named_modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if tensor is None or isinstance(tensor, CudaTensor) or not only(f"{prefix}.{name}"):
                        continue
                    if id(tensor) not in moved:
                        there: Any = self.put(tensor.data, device)
                        moved[id(tensor)] = torch.nn.Parameter(there, False) if table is part._parameters else there
                    table[name] = moved[id(tensor)]
        return module

    def __enter__(self) -> "Devices":
        streams, memory = self.streams, self.memory
        CUDAGraph.devices = Event.devices = self
        in_cuda = {
            "CUDAGraph": CUDAGraph,
            "Event": Event,
            "Stream": streams.new,
            "current_device": streams.current_device,
            "current_stream": streams.current,
            "device": streams.on_device,
            "device_count": lambda: self.count,
            "empty_cache": memory.empty_cache,
            "get_device_name": lambda _=None: "a pretended device",
            "get_sync_debug_mode": lambda: 2 if self._watches_waits in ("error", 2) else 0,
            "graph_pool_handle": object,
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: self.recording(streams.current()) is not None,
            "set_stream": streams.set,
            "set_sync_debug_mode": self._watch_waits,
            "stream": streams.on_stream,
            "synchronize": self.synchronize,
            "_lazy_init": lambda: None,
        }
        in_c = {
            "_cuda_endAllocateToPool": lambda _device, pool: self._end_pool(pool),
            "_host_emptyCache": lambda: None,
        }
        in_accelerator = {
            "current_accelerator": lambda check_available=False: torch.device("cuda"),  # noqa: ARG005 - torch's name
            "device_count": lambda: self.count,
            "get_memory_info": lambda _=None: (CAPACITY, CAPACITY),
        }
        for place, names in ((torch.cuda, in_cuda), (torch._C, in_c), (torch.accelerator, in_accelerator)):
            for name, value in names.items():
                self._put(place, name, value)
        self._put(torch.cuda.graph, "default_capture_stream", None)
        self._put(torch, "Generator", Generator)
        for draw in (torch.rand, torch.randint, torch.randn):
            self._put(torch, draw.__name__, drawing(draw))
        self._put(torch.Tensor, "pin_memory", pinned)
        self._put(torch.nn.functional, "scaled_dot_product_attention", self._kernels.attention)
        self._put(torch.backends.cuda, "enable_cudnn_sdp", lambda on: setattr(self, "cudnn", on))
        self._put(threading.Thread, "run", _within(self, threading.Thread.run))
        for name in self._clocked:
            self._put(sys.modules[name], "perf_counter", self.clock.read)
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        torch._C._ensureCUDADeviceGuardSet()
        self._stack.enter_context(Mode(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        CUDAGraph.devices = Event.devices = None

    def _put(self, place: Any, name: str, value: Any) -> None:
        self._stack.enter_context(patch.object(place, name, value, create=True))

    def _watch_waits(self, mode: Any) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        self._watches_waits = {0: "default", 1: "warn", 2: "error"}.get(mode, mode)

    def _end_pool(self, pool: Any) -> None:
        if all(graph.pool_id is not pool for graph in self.memory.underway):
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.memory.underway[:] = [graph for graph in self.memory.underway if graph.pool_id is not pool]


def _within(devices: Devices, run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """A thread's ``run`` that knows the devices as well: modes belong to a thread."""

    def run_within(thread: threading.Thread) -> None:
        with Mode(devices):
            run(thread)

    return run_within
