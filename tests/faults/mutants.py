"""Puts one small fault at a time into a copy of the package and counts those that the first tier's tests see.

python -m tests.faults.mutants --count 2

A fault is tried with the test modules that import its module, those of the mirrored folder first, then with those that
import what imports it. Results are kept: a run that was interrupted goes on, and faults that no test has seen are tried
again.
"""

import argparse
import ast
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.faults.code_faults import EQUIVALENT, CodeFault, faults_in, known_faults, some_of

ROOT = Path(__file__).parents[2]
PACKAGE = "specctl"
ROOMS = (
    "decoding", "policies", "models/running", "models/passes", "replay", "calibration", "api", "replicas",
)  # fmt: skip
ENOUGH = 0.95
"""The share of faults that must be seen."""
FAREST = 2
"""Imports between a test and a module that is still near it."""
PRELOADED = ("torch", "numpy", "scipy.stats", "transformers")
"""Imported once, before the forks that run tests; nothing of the package is, nor any plugin of pytest's."""


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
        mirrored = at_home and Path(module).stem in test
        return not mirrored, distances[test] - at_home, not at_home, budgets.get(test, 1.0)

    chosen, spent = list[str](), 0.0
    for test in sorted(distances, key=order):
        spent += budgets.get(test, 1.0)
        if chosen and spent > seconds:
            break
        chosen.append(test)
    return chosen


@dataclass(eq=False)
class Watch:
    """A pytest plugin that notes the first test, or module that was collected, that failed."""

    failed: str | None = None

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def in_fork(work: Callable[[], Any], cpu: float, log: Path) -> Any:
    """What a fork of this process answers, or None if it did not end in time or was killed.

    Args:
        work: gives something that JSON can hold.
        cpu: seconds of CPU that it may use; on a busy machine these may take long.
        log: gets all that it writes.
    """
    answer = log.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu) + 1, int(cpu) + 2))
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            answer.write_text(json.dumps(work()), encoding="utf-8")
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(0)
    try:
        deadline = time.monotonic() + 60 + 10 * cpu
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what its tests have started
    return json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else None


@dataclass(eq=False)
class Trial:
    """A copy of the project into which faults are put.

    Attributes:
        copy: folder of the copy.
        log: gets what the tests of the last fault wrote.
        seconds: CPU that the test modules which are tried with one fault may take together.
        budgets: CPU seconds of each test module.
    """

    copy: Path
    log: Path
    seconds: float
    budgets: dict[str, float]
    _puts: int = 0
    _clean: dict[str, bool] = field(default_factory=dict)

    def seen_by(self, fault: CodeFault) -> str | None:
        """The first test that fails with this fault in; what it means that none could say so; or None."""
        path = self.copy / PACKAGE / fault.module
        source = path.read_text(encoding="utf-8")
        modules = near(fault.module, self.seconds, self.budgets)
        while modules := [module for module in modules if self._clean.get(module, True)]:
            self._put(path, fault.put_into(source))
            try:
                failed = self._first_failure(modules)
            finally:
                self._put(path, source)
            module = (failed or "").partition("::")[0]
            if module not in modules:
                return failed
            if module not in self._clean:
                self._clean[module] = self._first_failure([module]) is None
            if self._clean[module]:
                return failed
            print(f"{module} fails without a fault and is left out")
        return None

    def _first_failure(self, modules: Sequence[str]) -> str | None:
        """The first test of these modules that fails, what else tells that something is wrong, or None."""

        def run() -> Any:
            watch = Watch()
            return [self._tests(modules, watch), watch.failed]

        cpu = 20 + 4 * sum(self.budgets.get(module, 1.0) for module in modules)
        ended = in_fork(run, cpu, self.log)
        if ended is None:
            return "hangs or is killed"
        status, failed = ended
        return failed or (None if status in (0, 5) else f"pytest ends with {status}")

    def _tests(self, modules: Sequence[str], watch: Watch) -> int:
        """Run test modules of the copy in this process, a fork, up to the first that fails."""
        os.chdir(self.copy)
        os.environ["PYTHONPATH"] = str(self.copy)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # pytest rewrites each module once
        sys.dont_write_bytecode = False
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "tools", PACKAGE)]:
            del sys.modules[name]
        sys.path[:] = [str(self.copy), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        options = ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        return int(pytest.main([*options, *modules], plugins=[watch]))

    def _put(self, path: Path, source: str) -> None:
        """Write a module. Its time is one that no compiled file of it was made from."""
        self._puts += 1
        path.write_text(source, encoding="utf-8")
        os.utime(path, (self._puts, self._puts))


def chosen_faults(count: int, seed: int, only: str | None) -> tuple[list[CodeFault], list[str]]:
    """Hand-written faults and ``count`` of each module, and a line for each hand-written one that fits nowhere."""
    package = ROOT / PACKAGE
    faults, gone = known_faults(package)
    for room in ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            module = path.relative_to(package).as_posix()
            found = [fault for fault in faults_in(module, path.read_text(encoding="utf-8")) if not _is_equal(fault)]
            faults += some_of(found, count, random.Random(f"{seed} {module}"))
    return [fault for fault in faults if only is None or fault.module.startswith(only)], gone


def _is_equal(fault: CodeFault) -> bool:
    return any(line in fault.line and after == fault.after for line, after in EQUIVALENT)


def copied(folder: Path) -> Path:
    """What tests need, in a folder of its own."""
    copy = folder / "copy"
    skipped = shutil.ignore_patterns(".git", ".venv", ".ci-venv", "build", "*_cache", "__pycache__", ".hypothesis")
    shutil.copytree(ROOT, copy, ignore=skipped, symlinks=True)
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2, help="number of faults in each module")
    parser.add_argument("--seed", type=int, default=0, help="seed of their choice")
    parser.add_argument("--module", help="only modules whose path below the package begins so: decoding/round")
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU of the test modules tried with one fault")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "mutants", help="folder of what is found out")
    options = parser.parse_args()
    faults, gone = chosen_faults(options.count, options.seed, options.module)
    options.kept.mkdir(parents=True, exist_ok=True)
    results = options.kept / "results.jsonl"
    seen = {line["key"]: line["seen"] for line in _lines(results) if line["seen"]}
    for name in PRELOADED:
        import_module(name)
    counts: Counter[str] = Counter()
    unseen = []
    with tempfile.TemporaryDirectory() as folder, results.open("a", encoding="utf-8") as file:
        trial = Trial(copied(Path(folder)), options.kept / "last.log", options.seconds, budgets())
        for number, fault in enumerate(faults, 1):
            key = fault.key((ROOT / PACKAGE / fault.module).read_text(encoding="utf-8"))
            if key not in seen:
                began = time.monotonic()
                seen[key] = trial.seen_by(fault)
                line = {"key": key, "fault": str(fault), "seen": seen[key], "seconds": time.monotonic() - began}
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
