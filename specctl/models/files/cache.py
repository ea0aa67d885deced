"""Small files that are made once and kept: where, how they are written, and for which machine."""

import os
import platform
from contextlib import suppress
from pathlib import Path
from time import time

from specctl.outputs import ABANDONED

CPUINFO = Path("/proc/cpuinfo")


def cache_home() -> Path:
    """specctl's folder in ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specctl"


def processor(path: Path = CPUINFO) -> list[str]:
    """The kind of this machine's processor and its features.

    Args:
        path: Linux's description of the processor; without this file, the processor's name is used.
    """
    able = features(path)
    return [platform.machine(), platform.processor() if able is None else " ".join(sorted(able))]


def features(path: Path) -> list[str] | None:
    """The processor's features as Linux names them, or None if they are unknown; those of the first core."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    able = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    found = next(able, None)
    return None if found is None else found.split()


def write_small(path: Path, content: str | bytes) -> None:
    """Write a small file completely or not at all. A failure is silent; an earlier file then stays."""
    new = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}-*"):  # left by processes that were killed
            if left.stat().st_mtime < time() - ABANDONED:
                left.unlink(missing_ok=True)
        new.write_bytes(content.encode() if isinstance(content, str) else content)
        new.replace(path)
    except OSError:  # a folder without write permission
        with suppress(OSError):
            new.unlink(missing_ok=True)
