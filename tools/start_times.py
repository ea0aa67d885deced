"""How long commands take in a fresh process, from its start to its end, and their memory.

``python -m tools.start_times`` prints a table. All take turns, so that what else the machine does slows them alike. One
turn before the first fills caches and is not counted.
"""

import os
import subprocess
import sys
from statistics import median
from time import perf_counter
from typing import Annotated

import typer

from specctl.reporting.table import Table, as_text

SPECCTL = ("-m", "specctl")
ONE_TOKEN = ("generate", "-p", "embedded", "-n", "1", "--threads", "1", "Once upon a time", "--engine")
PROCESSES: dict[str, tuple[str, ...]] = {
    "import numpy, onnxruntime, tokenizers": ("-c", "import numpy, onnxruntime, tokenizers"),
    "import torch": ("-c", "import torch"),
    "specctl --help": (*SPECCTL, "--help"),
    "specctl profiles list": (*SPECCTL, "profiles", "list"),
    "specctl generate -n 1 --engine onnx": (*SPECCTL, *ONE_TOKEN, "onnx"),
    "specctl generate -n 1 --engine eager": (*SPECCTL, *ONE_TOKEN, "eager"),
    "specctl doctor": (*SPECCTL, "doctor", "-p", "embedded"),
}


def once(arguments: tuple[str, ...]) -> tuple[float, float, float]:
    """Wall seconds, processor seconds and the most memory in MiB of one process.

    Raises:
        SystemExit: it failed.
    """
    began = perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}: {said.decode(errors='replace')}")
    return perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main(repeats: Annotated[int, typer.Option(min=1, help="Processes of each kind that count.")] = 7) -> None:
    """Print the medians of some fresh processes, with the least and the most."""
    for arguments in PROCESSES.values():
        once(arguments)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in PROCESSES}
    for _ in range(repeats):
        for name, arguments in PROCESSES.items():
            found[name].append(once(arguments))
    rows = tuple(
        (
            name,
            *(f"{median(column):.2f} ({min(column):.2f} to {max(column):.2f})" for column in columns[:2]),
            f"{median(columns[2]):.0f}",
        )
        for name, measured in found.items()
        if (columns := [*zip(*measured, strict=True)])
    )
    note = f"Medians of {repeats}, the least and the most."
    print(as_text([Table("Fresh processes", ("process", "seconds", "processor seconds", "MiB"), rows, note=note)]))


if __name__ == "__main__":
    typer.run(main)
