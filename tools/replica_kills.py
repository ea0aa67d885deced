"""Kills replicas and the command that started them at random moments, and compares what they leave with one process.

python -m tools.replica_kills --kills 20 --command-kills 10
python -m tools.replica_kills --workers 0 --batch 8 --records 64 --command-kills 20

First one process answers the records. Then replicas do, while they are killed (SIGKILL) one after the other, each once
the output has grown since the last kill; then the command is killed and resumed time and again. Without workers the
command itself answers several records at once, and it alone is killed. What must be 0: records that are lost, doubled
or out of order, texts and rounds that differ, and replicas that outlive their command.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

WORDS = ("river", "engine", "winter", "garden", "signal", "harbour", "letter", "market", "forest", "mirror")
GRACE = 30.0
"""Seconds that replicas may outlive a command that was killed."""


def records(count: int) -> list[dict[str, Any]]:
    """Records of several kinds: drawn and greedy, chains of turns, ids that occur twice, and one that is bad."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        first, second = WORDS[number % len(WORDS)], WORDS[number // len(WORDS) % len(WORDS)]
        record: dict[str, Any] = {"id": number, "prompt": f"The {first} and the {second}"}
        if number % 7 == 3:
            record["sampling"] = {"temperature": 0}
        if number % 11 == 5:
            record = {"id": number, "turns": [f"The {first}", f"And the {second}?"]}
        found.append(record)
    if count > 20:
        found[17]["id"] = 4
        found[19] = {"id": 19}
    return found


class Campaign:
    """The command, its files and what was counted.

    Args:
        folder: of the files.
        options: as `main` reads them.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.counts: Counter[str] = Counter()
        self.draw = random.Random(options.seed)
        (folder / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records(options.records)))

    def start(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        files = ["-i", "in.jsonl", "-o", f"{name}.jsonl", "--trace", f"{name}.trace", "--no-progress"]
        sampling = ["-n", str(self.options.tokens), "-t", "1", "--top-k", "50"]
        pair = ["-p", self.options.profile] if self.options.profile else []
        command = [sys.executable, "-m", "specctl", "generate", *pair, *files, *sampling, *more]
        return subprocess.Popen(command, cwd=self.folder)

    def replicated(self) -> list[str]:
        """The flags by which several records are answered at once."""
        workers = ["--workers", str(self.options.workers)] if self.options.workers else []
        batch = ["--batch", str(self.options.batch)] if self.options.batch else []
        return [*workers, *batch, *(["--cluster", "auto"] if self.options.ray else [])]

    def written(self, name: str) -> int:
        path = self.folder / f"{name}.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def kill_replicas(self, kills: int) -> None:
        """Kill replicas, a run after the other, until there were so many kills; compare each run."""
        run = 0
        while self.counts["replicas killed"] < kills:
            name, began = f"replicas-{run}", time.monotonic()
            process, seen, due = self.start(name, *self.replicated()), 0, began
            while process.poll() is None:
                time.sleep(0.05)
                now = self.written(name)
                left = kills - self.counts["replicas killed"]
                if left > 0 and now > seen and time.monotonic() > due and (alive := replicas_of(process.pid)):
                    self.draw.choice(alive).kill()
                    self.counts["replicas killed"] += 1
                    seen, due = now, time.monotonic() + self.draw.uniform(0, self.options.seconds)
            self.compare(name, process.returncode)
            run += 1

    def kill_commands(self, kills: int) -> None:
        """Kill one run of the command time and again, let it end, and begin anew until there were so many kills."""
        run = 0
        while self.counts["commands killed"] < kills:
            name, in_a_row = f"command-{run}", self.draw.randint(1, 5)
            while True:
                seen = self.written(name)
                process = self.start(name, *self.replicated(), "--resume")
                patience = self.draw.uniform(0, self.options.seconds)
                last = not in_a_row or self.counts["commands killed"] >= kills
                while process.poll() is None and (last or self.written(name) == seen):
                    time.sleep(0.05)
                if not last:
                    time.sleep(patience)
                if last or process.poll() is not None:
                    break
                alive = replicas_of(process.pid)
                process.send_signal(signal.SIGKILL)
                process.wait()
                self.counts["commands killed"] += 1
                in_a_row -= 1
                _, outliving = psutil.wait_procs(alive, timeout=GRACE)
                self.counts["replicas that outlived"] += len(outliving)
            self.compare(name, process.returncode)
            run += 1

    def compare(self, name: str, code: int) -> None:
        """Count what differs from the one process's files."""
        self.counts["runs compared"] += 1
        self.counts["exit codes that differ"] += code != self.code
        for kind in ("jsonl", "trace"):
            expected, found = (_lines(self.folder / f"{each}.{kind}") for each in ("one", name))
            keys = [[key for key, _ in part] for part in (expected, found)]
            wanted, there = map(Counter, keys)
            self.counts["lost"] += (wanted - there).total()
            self.counts["doubled"] += (there - wanted).total()
            self.counts["out of order"] += wanted == there and keys[0] != keys[1]
            self.counts["that differ"] += sum(a != b for a, b in zip(expected, found, strict=False)) * (wanted == there)

    def reference(self) -> None:
        """Let one process answer the records; its exit code is expected of all runs."""
        self.code = self.start("one", "--batch", "1").wait()
        if self.written("one") != self.options.records:
            raise SystemExit("one process does not answer the records either")


def replicas_of(command: int) -> list[psutil.Process]:
    """The replicas of a command, which are among the processes that it has started, and of those Ray's actors."""
    found = []
    for process in psutil.Process(command).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "specctl.text_engine.child" in words or words.startswith("ray::Replica"):
                found.append(process)
    return found


def _lines(path: Path) -> list[tuple[str, Any]]:
    """The lines of a results file or a trace: a key, and what must be the same in all runs."""
    found: list[tuple[str, Any]] = []
    for line in map(json.loads, path.read_bytes().splitlines()):
        if line.get("kind") == "round":
            steps = [(step["token"], step["accepted"]) for step in line["steps"]]
            found.append((f"{line['id']} {line['turn']} {line['round']}", (steps, line["extra"])))
        else:
            found.append((f"{line['id']}", (line.get("completion"), line.get("error"), line.get("finish_reason"))))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign and print what was counted; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description="Kills replicas and commands, and compares what they leave.")
    parser.add_argument("--kills", type=int, default=20, help="how many replicas to kill")
    parser.add_argument("--command-kills", type=int, default=10, help="how many times to kill the command")
    parser.add_argument("--records", type=int, default=120, help="number of records")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each")
    parser.add_argument("--workers", type=int, default=2, help="replicas; 0 for the command's own process")
    parser.add_argument("--batch", type=int, help="records that each answers at once")
    parser.add_argument("--ray", action="store_true", help="actors of a Ray cluster that the command starts")
    parser.add_argument("--profile", help="profile of the pair; default: the embedded pair")
    parser.add_argument("--seconds", type=float, default=6.0, help="longest pause before a kill")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options = parser.parse_args(arguments)
    options.profile = options.profile and os.path.abspath(options.profile)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), options)
        campaign.reference()
        if options.workers:
            campaign.kill_replicas(options.kills)
        campaign.kill_commands(options.command_kills)
    faults = ("lost", "doubled", "out of order", "that differ", "replicas that outlived", "exit codes that differ")
    for name in ("replicas killed", "commands killed", "runs compared", *faults):
        print(f"{campaign.counts[name]:5} {name}")
    return int(any(campaign.counts[name] for name in faults))


if __name__ == "__main__":
    sys.exit(main())
