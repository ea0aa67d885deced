"""Puts one small fault at a time into a copy of the package and counts those that the first tier's tests see.

python -m tests.faults.mutants --count 2

A fault is tried with the test modules that import its module, those of the mirrored folder first, then with those that
import what imports it. Results are kept: a run that was interrupted goes on, and faults that no test has seen are tried
again when other tests would be.
"""

import argparse
import ast
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.faults.code_faults import EQUIVALENT, CodeFault, faults_in, known_faults, some_of
from tests.faults.reached import Reached
from tests.faults.trials import PACKAGE, ROOT, Trial, copied, preload

ROOMS = (
    "decoding", "policies", "models/running", "models/passes", "models/translation", "replay",
    "calibration", "api", "text_engine",
)  # fmt: skip
NEEDED = {"text_engine/on_ray.py": "ray"}
"""Packages without which the tests of a module skip."""
ENOUGH = 0.95
"""The share of faults that must be seen."""
FAREST = 2
"""Imports between a test and a module that is still near it."""


@cache
def dotted_imports(path: Path) -> frozenset[str]:
    """Full names that a file imports, of modules or of what is in them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def near(module: str, seconds: float, budgets: dict[str, float]) -> list[str]:
    """Test modules near a module of the package, nearest first, of at most so many seconds of CPU together (or one)."""
    names = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
             for path in (ROOT / PACKAGE).rglob("*.py")}  # fmt: skip
    reached = {f"{PACKAGE}.{module}".removesuffix(".py").replace("/", ".")}
    tests = sorted(path for path in (ROOT / "tests").rglob("test_*.py"))
    folders = (ROOT / "tests" / module).parents  # the nearest that there is mirrors the module's own
    home = next(folder for folder in folders if folder.is_dir()).relative_to(ROOT).as_posix()
    distances = dict[str, int]()
    for distance in range(FAREST + 1):
        for path in tests:
            if dotted_imports(path) & reached:
                distances.setdefault(path.relative_to(ROOT).as_posix(), distance)
        reached |= {name for name, path in names.items() if dotted_imports(path) & reached}

    for path in sorted((ROOT / home).glob("test_*.py")):  # rooms may import their modules by their names
        distances.setdefault(path.relative_to(ROOT).as_posix(), FAREST + 1)

    def order(test: str) -> tuple[bool, int, bool, float]:
        at_home = test.startswith(home + "/")
        mirrored = at_home and Path(test).stem.removeprefix("test_") in (Path(module).stem, f"{Path(module).stem}s")
        return not mirrored, distances[test] - at_home, not at_home, budgets.get(test, 1.0)

    chosen, spent = list[str](), 0.0
    for test in sorted(distances, key=order):
        spent += budgets.get(test, 1.0)
        if chosen and spent > seconds:
            break
        chosen.append(test)
    return chosen


def chosen_faults(count: int, seed: int, only: str | None) -> tuple[list[CodeFault], list[str]]:
    """Hand-written faults and ``count`` of each module, and a line for each hand-written one that fits nowhere.

    Those of modules are in a random order, so that a run that is interrupted has tried a sample of all.
    """
    package = ROOT / PACKAGE
    faults, gone = known_faults(package)
    drawn = []
    for room in ROOMS:
        for path in sorted((package / room).rglob("*.py")) or [package / f"{room}.py"]:
            module = path.relative_to(package).as_posix()
            if find_spec(NEEDED.get(module, "torch")) is None:
                continue
            found = [fault for fault in faults_in(module, path.read_text(encoding="utf-8")) if not _is_equal(fault)]
            drawn += some_of(found, count, random.Random(f"{seed} {module}"))
    random.Random(seed).shuffle(drawn)
    return [fault for fault in faults + drawn if only is None or fault.module.startswith(only)], gone


def _is_equal(fault: CodeFault) -> bool:
    return any(line in fault.line and after == fault.after for line, after in EQUIVALENT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2, help="number of faults in each module")
    parser.add_argument("--seed", type=int, default=0, help="seed of their choice")
    parser.add_argument("--module", help="only modules whose path below the package begins so: decoding/round")
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU of the test modules tried with one fault")
    parser.add_argument("--learn", help="first run test modules whose path begins so, to know what they call: tests/")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "mutants", help="folder of what is found out")
    options = parser.parse_args()
    faults, gone = chosen_faults(options.count, options.seed, options.module)
    options.kept.mkdir(parents=True, exist_ok=True)
    results = options.kept / "results.jsonl"
    lines = list(_lines(results))
    seen = {line["key"]: line["seen"] for line in lines if line["seen"]}
    missed = {(line["key"], line.get("tried")) for line in lines}
    preload(options.kept / "last.log")
    allowed = budgets()
    counts: Counter[str] = Counter()
    unseen = []
    with tempfile.TemporaryDirectory() as folder, results.open("a", encoding="utf-8") as file:
        trial = Trial(copied(Path(folder)), options.kept / "last.log", allowed, Reached(options.kept / "reached", ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py")) if options.learn else []:
            if (test := path.relative_to(ROOT).as_posix()).startswith(options.learn):
                trial.learn(test)
        for number, fault in enumerate(faults, 1):
            key = fault.key((ROOT / PACKAGE / fault.module).read_text(encoding="utf-8"))
            if key not in seen:
                function, close = f"{fault.module} {fault.function}", near(fault.module, options.seconds, allowed)
                tests = trial.reached.plan(function, close, options.seconds, allowed)
                tried = trial.reached.told(tests)
                seen[key] = None
            if not seen[key] and (key, tried) not in missed:
                began = time.monotonic()
                seen[key] = trial.seen_by(fault, tests)
                line = {"key": key, "fault": str(fault), "seen": seen[key], "tried": tried}
                line["seconds"] = time.monotonic() - began
                file.write(json.dumps(line) + "\n")
                file.flush()
            print(f"{number}/{len(faults)} {fault}: {seen[key] or 'NOT SEEN'}", flush=True)
            counts["seen" if seen[key] else "unseen"] += 1
            if not seen[key]:
                unseen.append(fault)
    for fault in unseen:
        print(f"not seen: {fault}")
    for text in gone:
        print(f"no longer a fault: it {text}")
    share = counts["seen"] / max(1, counts.total())
    print(f"{counts.total()} faults: {counts['seen']} seen, {counts['unseen']} unseen, {share:.1%}")
    sys.exit(1 if share < ENOUGH or gone else 0)


def budgets() -> dict[str, float]:
    file = ROOT / "tests" / "durations.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def _lines(file: Path) -> Iterable[dict[str, Any]]:
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


if __name__ == "__main__":
    main()
