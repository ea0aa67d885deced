"""Kills commands at random moments, starts them again, and compares what they leave with an uninterrupted run.

python -m tests.faults.kills --kills 100

A run is a fork of this process, which has imported torch already; so its own start is never interrupted.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from specctl import __main__ as entry
from specctl.commands import app  # noqa: F401 - imported once here, and not by every run
from specctl.replay.recording import collecting, metering
from specctl.training import epochs, subject
from tests.support.checkpoints import llama_config, save_model

Items = Iterable[tuple[str, Any]]
"""What a run leaves: each item with a key, equal in all runs but for times."""
MOST_IN_A_ROW = 4
"""Kills until a run may end."""
GRACE = 60.0
"""Seconds until a run that does not end counts as uncaught."""


@dataclass(frozen=True)
class Scenario:
    """A command that continues where an earlier run of the same command ended.

    Attributes:
        name: of the command.
        arguments: of the command; ``{}`` is the folder of its outputs.
        items: what is in that folder.
    """

    name: str
    arguments: tuple[str, ...]
    items: Callable[[Path], Items]


@dataclass
class Outcome:
    """Counts over all runs that came to an end, with reports of what is not as it should be."""

    counts: Counter[str] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)

    def add(self, what: str, number: int, report: str) -> None:
        if number:
            self.counts[what] += number
            self.reports.append(f"{what}: {report}"[:2000])

    def compare(self, name: str, expected: Items, found: Items) -> None:
        wanted, there = _grouped(expected), _grouped(found)
        lost = [key for key in wanted if len(there.get(key, ())) < len(wanted[key])]
        doubled = [key for key in there if len(there[key]) > len(wanted.get(key, ()))]
        corrupt = [key for key in wanted if key in there and wanted[key] != there[key] and key not in lost + doubled]
        for what, keys in (("lost", lost), ("doubled", doubled), ("corrupt", corrupt)):
            self.add(what, len(keys), f"{name}: {keys[:5]}")
        self.counts["compared"] += 1

    @property
    def fine(self) -> bool:
        return not any(self.counts[what] for what in ("lost", "doubled", "corrupt", "uncaught"))

    def __str__(self) -> str:
        names = ("kills", "compared", "lost", "doubled", "corrupt", "uncaught")
        return ", ".join(f"{self.counts[name]} {name}" for name in names)


def _grouped(items: Items) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for key, value in items:
        found.setdefault(key, []).append(value)
    return found


def _lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            yield json.loads(line)
        except ValueError:
            yield {"kind": f"line {number} of {path.name} is no JSON", "id": None}


def _generated(folder: Path) -> Items:
    for line in _lines(folder / "out.jsonl"):
        key = line["id"] if line["id"] is not None else line.get("line")
        yield f"result {key}", (line.get("completion"), line.get("error"))
    for line in _lines(folder / "trace.jsonl"):
        step = [each["token"] for each in line["steps"]]
        yield f"round {line['id']} {line['turn']} {line['round']}", (step, line["accepted"], line["extra"])


def _benched(folder: Path) -> Items:
    costs = False
    for line in _lines(folder / "results.jsonl"):
        match line["kind"]:
            case "run":
                key = " ".join(str(line[name]) for name in ("candidate", "prompt", "repeat", "length"))
                yield f"run {key}", [turn["tokens"] for turn in line["turns"]]
            case "costs":
                costs = True  # measured again by every run; the last line counts
            case "oracle" | "skipped":
                yield f"{line['kind']} {line['prompt']}", line.get("passes")
            case kind:
                yield kind, None
    yield "costs", costs


def _traced(folder: Path) -> Items:
    costs = False
    for line in _lines(folder / "trace.jsonl"):
        if line["kind"] == "costs":
            costs = True
        else:
            yield f"{line['kind']} {line.get('prompt')}", [turn["tokens"] for turn in line.get("turns", ())]
    yield "costs", costs


def _trained(folder: Path) -> Items:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            timed = path.name in ("README.md", "config.json", "index.json")
            yield str(path.relative_to(folder)), None if timed else path.read_bytes()


def scenarios(folder: Path) -> list[Scenario]:
    """Two tiny models, prompts, and the commands that run them."""
    _in_a_fork(lambda: _make_models(folder), folder / "models.log")
    (folder / "pair.toml").write_text(
        f'[target]\nmodel = "{folder}/target"\ndevice = "cpu"\n[draft]\nmodel = "{folder}/draft"\ndevice = "cpu"\n'
    )
    records: list[dict[str, Any]] = [{"id": number, "prompt": f"the {number} moons"} for number in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    records[5] = {"id": 3, "prompt": "an id that another has"}
    records[7] = {"id": "bad"}
    records[9] = {"id": "a\u2028\x85\ud800", "turns": ["the first", "the second"]}
    records[11] = {"prompt": "no id"}
    lines = [json.dumps(record) for record in records] + ["not JSON"]
    (folder / "records.jsonl").write_text("".join(line + "\n" for line in lines))
    pair, prompts = ("-p", f"{folder}/pair.toml"), ("-i", f"{folder}/prompts.jsonl")
    generate = ("-i", f"{folder}/records.jsonl", "-n", "16", "-t", "1", "-o", "{}/out.jsonl", "--resume")
    bench = ("--policy", "svip", "--policy", "constant", "-n", "12", "--limit", "8", "--oracle", "-q")
    calibrate = ("--policy", "constant", "--grid", "paper", "--samples", "6", "-n", "12", "--no-verify", "-q")
    train = ("--depth", "1", "--epochs", "4", "--batch-size", "4", "-n", "12", "-q")
    return [
        Scenario("generate", (*pair, *generate, "--trace", "{}/trace.jsonl"), _generated),
        Scenario("bench", (*pair, *prompts, *bench, "-o", "{}/results.jsonl", "--resume"), _benched),
        Scenario("calibrate", (*pair, *prompts, *calibrate, "--trace", "{}/trace.jsonl"), _traced),
        Scenario("train-head", (*pair, *prompts, *train, "-o", "{}/head", "--resume"), _trained),
    ]


def _make_models(folder: Path) -> int:
    for name, layers in (("target", 2), ("draft", 1)):
        save_model(folder / name, llama_config(num_hidden_layers=layers, initializer_range=0.3))
    return 0


def _in_a_fork(run: Callable[[], int], log: Path, kill_after: float = GRACE) -> int:
    """The exit code of a function in a fork of this process, -SIGKILL if it was killed; ``log`` gets its output."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            code = run()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    due = time.monotonic() + kill_after
    while time.monotonic() < due:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(min(0.002, max(0.0, due - time.monotonic())))
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _command(scenario: Scenario, folder: Path) -> Callable[[], int]:
    def run() -> int:
        sys.argv = ["specctl", scenario.name, *(argument.replace("{}", str(folder)) for argument in scenario.arguments)]
        return entry._run()

    return run


def kill(kills: int, seed: int, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """Kill each command in turn until there were this many kills, and compare what the runs leave."""
    outcome, draw = Outcome(), random.Random(seed)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rough = {"LENGTHS": (0, 1, 4, 40), "IN_A_ROW": 2, "PASSES": metering.WARM_UPS + 1}
        stack.enter_context(patch.multiple(metering, **rough))
        stack.enter_context(patch.object(collecting, "PASSES", rough["PASSES"]))
        stack.enter_context(patch.object(epochs, "SAVE_SECONDS", 0.02))
        stack.enter_context(patch.object(subject, "PROMPTS_PER_SHARD", 4))
        for name in [name for name in os.environ if name.startswith("SPECCTL_")]:
            stack.enter_context(patch.dict(os.environ))
            del os.environ[name]
        wholes = []
        for scenario in scenarios(base):
            folder, log = base / f"{scenario.name}-whole", base / f"{scenario.name}.log"
            folder.mkdir()
            began = time.monotonic()
            code = _in_a_fork(_command(scenario, folder), log)
            seconds = time.monotonic() - began
            if code not in (0, 1) or "SPECCTL_DEBUG" in log.read_text():
                raise RuntimeError(f"{scenario.name} does not even run: {log.read_text()}")
            wholes.append((scenario, list(scenario.items(folder)), code, seconds))
            say(f"{scenario.name}: {len(wholes[-1][1])} items in {seconds:.1f} s uninterrupted")
        trial = 0
        while outcome.counts["kills"] < kills:
            scenario, expected, code, seconds = wholes[trial % len(wholes)]
            folder = base / f"trial-{trial}"
            folder.mkdir()
            _trial(scenario, folder, expected, code, seconds, kills, draw, outcome)
            say(f"{scenario.name}: {outcome}")
            trial += 1
    return outcome


def _trial(
    scenario: Scenario,
    folder: Path,
    expected: Items,
    code: int,
    seconds: float,
    kills: int,
    draw: random.Random,
    outcome: Outcome,
) -> None:
    """Kill a command a few times, then let it end, and compare."""
    log = folder.with_suffix(".log")
    left = min(draw.randint(1, MOST_IN_A_ROW), kills - outcome.counts["kills"])
    while True:
        patience = draw.uniform(0, seconds) if left else GRACE
        found = _in_a_fork(_command(scenario, folder), log, patience)
        if found != -signal.SIGKILL:
            break
        if not left:
            outcome.add("uncaught", 1, f"{scenario.name} did not end")
            return
        outcome.counts["kills"] += 1
        left -= 1
    said = log.read_text(errors="replace")
    if found != code or "SPECCTL_DEBUG" in said or "Traceback" in said:
        outcome.add("uncaught", 1, f"{scenario.name} ended with {found}: {said}")
    outcome.compare(scenario.name, expected, scenario.items(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills commands and compares what they leave.")
    parser.add_argument("--kills", type=int, default=12, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options = parser.parse_args()
    outcome = kill(options.kills, options.seed, print)
    print(*outcome.reports, outcome, sep="\n")
    sys.exit(0 if outcome.fine else 1)


if __name__ == "__main__":
    main()
