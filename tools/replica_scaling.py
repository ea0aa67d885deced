"""One process and several replicas on the same records: throughput, start, memory and processor time.

python -m tools.replica_scaling --records 400 --workers 2 --ray

Each way runs `specctl generate` with one thread for each pair, greedy, and its texts are compared with one process's.
Throughput is that of the records between the first one's line and the last one's, so it leaves the start out. Memory
and processor time are of all processes that the command started, Ray's own among them, looked at every second.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tools.replica_kills import WORDS

LOOKS = 0.1
"""Seconds between two looks at the output."""
WEIGHINGS = 1.0
"""Seconds between two looks at memory and processor time, which cost some themselves."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of answering all records.

    Attributes:
        name: of the way.
        total: seconds from the command's start to its end.
        first: seconds from the command's start to the first line of output.
        rate: records per second from the first line to the last.
        memory: most bytes of all its processes together, shared pages counted in parts.
        cpu: processor seconds of all its processes.
        texts: by id.
    """

    name: str
    total: float
    first: float
    rate: float
    memory: int
    cpu: float
    texts: Mapping[str, str]


def measure(name: str, folder: Path, more: Sequence[str], options: argparse.Namespace) -> Measured:
    """Run the command once and look at it while it runs."""
    output = folder / f"{name.replace(' ', '-')}.jsonl"
    pair = ["-p", options.profile] if options.profile else []
    files = ["-i", str(folder / "in.jsonl"), "-o", str(output), "-q"]
    command = [sys.executable, "-m", "specctl", "generate", *pair, *files, "-n", str(options.tokens), "-t", "0", *more]
    began = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    first = last = began
    memory, lines, due = 0, 0, began
    cpu: dict[int, float] = {}
    while process.poll() is None:
        now = output.read_bytes().count(b"\n") if output.exists() else 0
        if now > lines:
            first = time.monotonic() if not lines else first
            lines, last = now, time.monotonic()
        if time.monotonic() >= due:
            memory, due = max(memory, _look(process.pid, cpu)), time.monotonic() + WEIGHINGS
        time.sleep(LOOKS)
    ended = time.monotonic()
    if process.returncode:
        raise SystemExit(f"{name} ended with exit code {process.returncode}")
    found = list(map(json.loads, output.read_text(encoding="utf-8").splitlines()))
    rate = (len(found) - 1) / max(1e-9, last - first)
    texts = {str(line["id"]): line["completion"] for line in found}
    return Measured(name, ended - began, first - began, rate, memory, sum(cpu.values()), texts)


def _look(command: int, cpu: dict[int, float]) -> int:
    """The memory in bytes that a command and its descendants use; ``cpu`` is brought up to date by process."""
    memory = 0
    with suppress(psutil.Error):
        whole = psutil.Process(command)
        for process in (whole, *whole.children(recursive=True)):
            with suppress(psutil.Error):
                spent = process.cpu_times()
                cpu[process.pid] = spent.user + spent.system
                memory += process.memory_full_info().pss
    return memory


HEAD = "| way | records/s | ratio | first record s | whole run s | MiB | CPU s a record | texts that differ |"


def row(way: Measured, first: Measured) -> str:
    """A measurement as a row of a Markdown table, compared with the first one."""
    count = len(first.texts)
    cells = (
        way.name,
        f"{way.rate:.2f}",
        f"{way.rate / first.rate:.2f}",
        f"{way.first:.1f}",
        f"{way.total:.1f}",
        f"{way.memory / 2**20:.0f}",
        f"{way.cpu / count:.3f}",
        f"{sum(way.texts.get(key) != text for key, text in first.texts.items())} of {count}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each way in turn, as often as asked, and print a table for each turn, row by row."""
    parser = argparse.ArgumentParser(description="Measures one process and several replicas.")
    parser.add_argument("--records", type=int, default=400, help="number of records")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each")
    parser.add_argument("--workers", type=int, default=2, help="replicas")
    parser.add_argument("--ray", action="store_true", help="on Ray too, on a cluster that the command starts")
    parser.add_argument("--profile", help="profile of the pair; default: the embedded pair")
    parser.add_argument("--repeats", type=int, default=1, help="how often")
    options = parser.parse_args(arguments)
    replicas = ["--workers", str(options.workers)]
    ways = {"one process": ["--threads", "1"], "1 replica": ["--workers", "1"], f"{options.workers} replicas": replicas}
    if options.ray:
        ways[f"{options.workers} replicas on Ray"] = [*replicas, "--cluster", "auto"]
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            prompts = (
                f"The {WORDS[number % 10]} and the {WORDS[number // 10 % 10]} of {WORDS[number // 100 % 10]}"
                for number in range(options.records)
            )
            lines = (json.dumps({"id": number, "prompt": prompt}) for number, prompt in enumerate(prompts))
            (folder / "in.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(HEAD, "| --- " * (HEAD.count("|") - 1) + "|", sep="\n")
            found: list[Measured] = []
            for way, more in ways.items():
                found.append(measure(way, folder, more, options))
                print(row(found[-1], found[0]), flush=True)


if __name__ == "__main__":
    main()
