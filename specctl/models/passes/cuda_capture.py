"""Passes captured as CUDA graphs."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Runs a pass over fixed tensors; returns a function that runs it again and leaves its results in the same tensors."""

CAPTURE_ERRORS = range(900, 909)  # CUDA's codes for what a capture does not allow


class CudaCapture:
    """Captures passes of one model as CUDA graphs that share one pool of memory and one stream, which are its own.

    cuBLAS keeps a workspace for each stream, and torch (from 2.12) gives it back with the first graph of that stream
    that is destroyed. So no other model may be captured on it, and all graphs of a model are to be dropped together.
    The first passes, which are not captured, run on the same stream, so that the workspace lies outside of the pool.
    When all graphs are gone, the next ones have a new pool: torch takes no capture into one that has lost its graphs
    while a tensor that was made in it is still held, such as the numbers of the last draft step.

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
        """Capture a pass, which runs twice before.

        Raises:
            RuntimeError: it cannot be captured; nothing is left of the attempt.
            torch.OutOfMemoryError: neither.
        """
        with torch.cuda.device(self._device):
            self._warm_up(step)
            usual = torch.cuda.current_stream()
            graph = torch.cuda.CUDAGraph()
            if not self._graphs:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                with warnings.catch_warnings():
                    # Of a pass that ran somewhere else and was not captured: its replays would do nothing.
                    warnings.filterwarnings("error", message="The CUDA Graph is empty", category=UserWarning)
                    with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                        results = step()
            except BaseException:
                # Where ending a capture fails, torch.cuda.graph leaves its stream current, and torch before 2.13
                # leaves the pool open, after which no cache can be emptied.
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
        """Libraries initialise in their first calls, which cannot be captured; and a pass that waits is rejected here,
        because a capture that has failed cannot be undone completely."""
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
    """Why a pass that failed while it was captured cannot be; raises the error if it failed for another reason."""
    if isinstance(error, RuntimeError) and not _prevents_capture(error):
        raise error
    return _reason_of(error)


def _prevents_capture(error: RuntimeError) -> bool:
    """Whether a pass failed because it was captured, and so works uncaptured.

    Not so: memory that has run out, and errors of a device's kernels, after which the device does nothing any more.
    """
    code = getattr(error, "error_code", None)  # of torch.AcceleratorError
    return not isinstance(error, torch.OutOfMemoryError) and (code is None or code in CAPTURE_ERRORS)


def _reason_of(error: BaseException) -> str:
    """The first line of what went wrong first: the error at a capture's end says only that there was one before."""
    while isinstance(error.__context__, RuntimeError | UserWarning):
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
