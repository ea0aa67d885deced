"""What a small round takes with torch and with onnxruntime, measured once for each machine and kept with a graph."""

import json
import os
import platform
from importlib.util import find_spec
from math import isfinite
from pathlib import Path

PACKAGES = ("onnxruntime", "onnx", "onnxscript")
MAKING = 1.5
"""Bytes of memory that making and checking a graph takes at its peak, beside the weights, for each byte of them.
Measured: 1.04 for 135 million weights, 1.09 in the shape of Gemma 3 270M, 1.48 where tied embeddings of 262,144 tokens
are nearly all of the weights: onnxruntime reads them from the file and copies them for the output layer."""
EAGER, ONNX = "eager", "onnx"


def packages_there() -> bool:
    """Whether all is installed that makes and runs graphs."""
    return all(find_spec(package) is not None for package in PACKAGES)


class Times:
    """A file with the times of engines by machine and number of threads. What cannot be read or written is not there.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def _all(self) -> dict[str, dict[str, float]]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            return {str(place): {str(k): float(v) for k, v in times.items()} for place, times in found.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def here(self, threads: int) -> dict[str, float] | None:
        """Milliseconds by engine, measured on this machine with so many threads; None if nothing is known."""
        found = self._all().get(_place(threads))
        if found is None or (found and {EAGER, ONNX} - found.keys()) or not all(map(isfinite, found.values())):
            return None
        return found

    def onnx_is_faster(self, threads: int | None) -> bool:
        """Whether onnxruntime is known to be the faster on this machine.

        Args:
            threads: how many torch has; None for all numbers that were measured, if there are any.
        """
        most = os.cpu_count() or 1
        found = [one for n in ([threads] if threads else range(1, most + 1)) if (one := self.here(n)) is not None]
        return bool(found) and all(one and one[ONNX] < one[EAGER] for one in found)

    def note(self, times: dict[str, float], threads: int) -> None:
        """Keep the times of this machine with so many threads; empty if onnxruntime cannot run the model."""
        new = self._path.with_name(f".{self._path.name}-{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(self._all() | {_place(threads): times}), encoding="utf-8")
            new.replace(self._path)
        except OSError:
            new.unlink(missing_ok=True)


def _place(threads: int) -> str:
    return f"{platform.node()}, {threads} threads"
