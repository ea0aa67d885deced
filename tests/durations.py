"""What the test modules of the first tier may cost, and what they do.

python -m tests.durations          # runs the first tier; fails where a module takes half as much again as it may
python -m tests.durations --write  # makes the budgets what it took

Budgets are seconds of CPU, of the tests' own processes and their children. A machine that is slower, or busy with other
things, makes all modules dearer alike; so a module is compared with what the others took of theirs. One that seems too
dear is run again by itself, and the least of three counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
"""Seconds by module. One that is not in it may take `LEAST`."""
LEAST = 2.0
"""Seconds of CPU that no module is asked to save."""
TOO_MUCH = 1.5
"""What a module may take of its budget."""
SHOWN = 40
"""Tests that are listed."""
ENOUGH = 20
"""Modules with a budget that tell how fast the machine is."""


def budgets() -> dict[str, float]:
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def pace(taken: Mapping[str, float], allowed: Mapping[str, float]) -> float | None:
    """How much dearer everything is here and now than on the machine of the budgets; None if too little was run."""
    known = [taken[module] / allowed[module] for module in allowed if taken.get(module)]
    return statistics.median(known) if len(known) >= ENOUGH else None


def too_dear(taken: Mapping[str, float], allowed: Mapping[str, float]) -> dict[str, float]:
    """The modules that took too much, and what they took, as seconds of the machine of the budgets."""
    here = pace(taken, allowed)
    if here is None:
        return {}
    asked = {module: seconds / here for module, seconds in taken.items()}
    return {module: own for module, own in asked.items() if own > TOO_MUCH * max(LEAST, allowed.get(module, LEAST))}


@dataclass(eq=False)
class Durations:
    """A pytest plugin that adds up what tests took; a module's fixtures are paid by the test that comes first.

    Attributes:
        file: gets seconds by test, if any.
        taken: CPU seconds of each test.
    """

    file: Path | None
    taken: dict[str, float] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and not report.skipped:
            spent = [float(str(seconds)) for name, seconds in report.user_properties if name == "cpu"]
            self.taken[report.nodeid] = sum(spent)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{len(self.taken)} tests took {sum(self.taken.values()):.0f} s of CPU")
        if self.file:
            self.file.write_text(json.dumps(self.taken), encoding="utf-8")


def by_module(tests: Mapping[str, float]) -> dict[str, float]:
    found = defaultdict[str, float](float)
    for test, seconds in tests.items():
        found[test.partition("::")[0]] += seconds
    return dict(found)


def first_tier(*modules: str, workers: str = "auto") -> dict[str, float]:
    """What the first tier's tests of these modules, or all of them, took; ends the program if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "taken.json")
        spread = [] if modules else ["-n", workers, "--dist", "loadscope", "--no-loadscope-reorder"]
        command = [sys.executable, "-m", "pytest", "-q", *spread, "--durations-to", str(file), *modules]
        if status := subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            sys.exit(status)
        return dict(json.loads(file.read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="make the budgets what the modules take now")
    parser.add_argument("--workers", default="auto", help="test processes")
    options = parser.parse_args()
    tests = first_tier(workers=options.workers)
    print(f"{sum(tests.values()):.0f} s of CPU, of which the dearest tests took:")
    for test, seconds in sorted(tests.items(), key=lambda entry: -entry[1])[:SHOWN]:
        print(f"{seconds:6.1f} s  {test}")
    taken = by_module(tests)
    if options.write:
        kept = {module: round(seconds, 1) for module, seconds in sorted(taken.items()) if seconds >= LEAST / 4}
        FILE.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")
        return
    allowed = budgets()
    dear = too_dear(taken, allowed)
    for module in dear:
        for _ in range(2):
            taken[module] = min(taken[module], by_module(first_tier(module))[module])
    for module, seconds in too_dear(taken, allowed).items():
        print(f"{module} takes {seconds:.1f} s of CPU and may take {TOO_MUCH} times {allowed.get(module, LEAST)} s")
    sys.exit(bool(too_dear(taken, allowed)))


if __name__ == "__main__":
    main()
