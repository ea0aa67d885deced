"""Graphs made of others, kept with these: making them takes a third of a second of imports."""

import os
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Literal
from zlib import crc32

from specctl.models.onnx.store import MANIFEST, Store
from specctl.outputs.locks import ABANDONED

FORM = 2
"""Of the graphs that are made; those of another form are made anew."""
NUMBER_OF_SIGNALS = 0xFFFF
"""What stands for ``signals`` where other graphs have their number of sequences."""


def kept_packed(path: Path, rows: int | Literal["signals"] | None) -> bytes:
    """`packed_graph` or `signals_graph` of a graph, out of a file where that is of this graph, form and number.

    The file stands beside the graph's folder in its `Store`; of a graph that is in none nothing is kept.

    Args:
        path: of the graph.
        rows: as of `packed_graph`, or ``signals``.
    """
    number = NUMBER_OF_SIGNALS if rows == "signals" else rows or 0
    own = crc32(path.read_bytes(), FORM << 16 | number)  # of what it is made from, and how
    kept = Store(path.parent.parent).packed(path.parent.name, rows)
    with suppress(OSError):
        told = kept.read_bytes()
        made = told[8:]
        if told[:8] == _sums(own, made):
            return made
    if rows == "signals":
        from specctl.models.onnx.packed.signals_graph import signals_graph

        made = signals_graph(path)
    else:
        from specctl.models.onnx.packed.packed_graph import packed_graph

        made = packed_graph(path, rows)
    if (path.parent / MANIFEST).exists():
        new = kept.with_name(f".{kept.name}-{os.getpid()}")
        try:
            for left in kept.parent.glob(f".{kept.name}-*"):  # of processes that were killed
                if left.stat().st_mtime < time() - ABANDONED:
                    left.unlink(missing_ok=True)
            new.write_bytes(_sums(own, made) + made)
            new.replace(kept)
        except OSError:  # a store that is only read
            with suppress(OSError):
                new.unlink(missing_ok=True)
    return made


def _sums(own: int, made: bytes) -> bytes:
    return own.to_bytes(4, "little") + crc32(made).to_bytes(4, "little")
