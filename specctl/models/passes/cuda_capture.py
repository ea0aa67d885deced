"""Passes captured as CUDA graphs."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Runs a pass over fixed tensors; returns a function that runs it again and leaves its results in the same tensors."""

CAPTURE_ERRORS = range(900, 909)  # CUDA's error codes for operations that a capture forbids


class CudaCapture:
    """Captures passes of one model as CUDA graphs that share a memory pool and a stream, both used by no other model.

    cuBLAS has a workspace for each stream, and torch (from 2.12) frees it when the first graph of that stream is
    destroyed. So no other model may be captured on this stream, and all graphs of a model must be dropped together. The
    first passes, which are not captured, run on the same stream, so that the workspace is outside the pool. After all
    graphs are dropped, the next ones get a new pool: torch rejects captures into a pool that has lost its graphs while
    a tensor in it is still referenced, such as the numbers of the last draft step.

    Args:
        device: the model's, with its number.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool: Any = None

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a pass, after running it twice.

        Raises:
            RuntimeError: it cannot be captured; the attempt leaves nothing allocated.
            torch.OutOfMemoryError: the same, for lack of memory.
        """
        with torch.cuda.device(self._device):
            self._warm_up(step)
            usual = torch.cuda.current_stream()
            graph = torch.cuda.CUDAGraph()
            if not self._graphs:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                with warnings.catch_warnings():
                    # Raised for a pass that ran on another stream and was not captured: replays would do nothing.
                    warnings.filterwarnings("error", message="The CUDA Graph is empty", category=UserWarning)
                    with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                        results = step()
            except BaseException:
                # If ending a capture fails, torch.cuda.graph leaves its stream current. Before 2.13 torch also leaves
                # the pool open, and then no cache can be emptied.
                torch.cuda.set_stream(usual)
                with suppress(AttributeError, RuntimeError):
                    torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                raise

        self._graphs.add(graph)

        def replay() -> Any:
            graph.replay()
            return results

        return replay

    def _warm_up(self, step: Callable[[], Any]) -> None:
        """Run the pass before its capture. Libraries initialise in their first calls, which cannot be captured. A pass
        that waits is rejected here, since a failed capture cannot be undone completely.
        """
        usual = torch.cuda.current_stream()
        self._stream.wait_stream(usual)
        try:
            with torch.cuda.stream(self._stream):
                step()
                with _waits_refused():
                    step()
        finally:
            usual.wait_stream(self._stream)


@contextmanager
def _waits_refused() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def why_uncaptured(error: RuntimeError | UserWarning) -> str:
    """Why a pass failed to be captured; raises the error again if the capture was not the reason."""
    if isinstance(error, RuntimeError) and not _prevents_capture(error):
        raise error
    return _reason_of(error)


def _prevents_capture(error: RuntimeError) -> bool:
    """Whether a pass failed only because of its capture, and so works uncaptured.

    False for a lack of memory, and for errors of a device's kernels, after which the device is unusable.
    """
    code = getattr(error, "error_code", None)  # of torch.AcceleratorError
    return not isinstance(error, torch.OutOfMemoryError) and (code is None or code in CAPTURE_ERRORS)


def _reason_of(error: BaseException) -> str:
    """The first line of the original error: the error at a capture's end only says that there was one before."""
    while isinstance(error.__context__, RuntimeError | UserWarning):
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
