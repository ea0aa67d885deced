"""A copy of the project into which faults are put, one at a time, and forks that run tests of it."""

import json
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.faults.code_faults import CodeFault
from tests.faults.reached import Reached, ReachPlugin

ROOT = Path(__file__).parents[2]
PACKAGE = "specctl"
OWN = ("tests", "tools", PACKAGE)
APART = ("ray", "xdist", "execnet", "_pytest", "_hypothesis_pytestplugin")
"""Plugins of pytest's, which it imports itself, and what starts threads."""
PATIENCE = 600.0
"""Seconds after which a fork that waits for something that never comes is ended."""
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")


def in_fork(work: Callable[[], Any], log: Path) -> Any:
    """What a fork of this process answers, which JSON can hold, or None if it was killed, which it is after `PATIENCE`;
    what it writes is logged."""
    answer = log.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            os.setsid()
            with log.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
                del sys.modules[name]
            answer.write_text(json.dumps(work()), encoding="utf-8")
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(0)
    until, ended = monotonic() + PATIENCE, 0
    try:
        while not ended and monotonic() < until:
            ended, _ = os.waitpid(child, os.WNOHANG)
            if not ended:
                sleep(0.02)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)  # what its tests have started
        if not ended:
            os.waitpid(child, 0)
    return json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else None


def preload(log: Path) -> None:
    """Import whatever the first tier's modules import from elsewhere, so that no fork does; it takes seconds."""

    def imported() -> list[str]:
        before = set(sys.modules)
        pytest.main([*OPTIONS, "--collect-only", str(ROOT / "tests")])
        return [name for name in sys.modules if name not in before and name.partition(".")[0] not in (*OWN, *APART)]

    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("torch", *(in_fork(imported, log) or [])):
        with suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(name)


@dataclass(eq=False)
class Trial:
    """A copy of the project into which faults are put.

    Attributes:
        copy: folder of the copy.
        log: gets what the tests of the last fault wrote.
        budgets: CPU seconds of each test module.
        reached: what is known of tests.
    """

    copy: Path
    log: Path
    budgets: dict[str, float]
    reached: Reached
    _puts: int = 0
    _anyway: dict[str, bool] = field(default_factory=dict)

    def learn(self, module: str) -> None:
        """Run the tests of a module without a fault, unless it is known what they call."""
        if self.reached.tests_of(module) is None and (failed := self._first_failure([[module]])):
            print(f"{failed} fails without a fault")

    def seen_by(self, fault: CodeFault, tests: Sequence[Sequence[str]]) -> str | None:
        """The first test that fails with this fault in, what else tells of it, or None.

        Args:
            fault: what to put in.
            tests: to try, as `Reached.plan` orders them.
        """
        path = self.copy / PACKAGE / fault.module
        source = path.read_text(encoding="utf-8")
        left = list(tests)
        while left:
            self._put(path, fault.put_into(source))
            try:
                failed = self._first_failure(left)
            finally:
                self._put(path, source)
            module = (failed or "").partition("::")[0]
            if not failed or not any(group[0].startswith(module) for group in left):
                return failed
            if failed not in self._anyway:
                self._anyway[failed] = self._first_failure([[failed]]) is not None
            if not self._anyway[failed]:
                return failed
            print(f"{failed} fails without a fault and is left out")
            while not left[0][0].startswith(module):
                del left[0]
        return None

    def _first_failure(self, groups: Sequence[Sequence[str]]) -> str | None:
        """The first test of these groups, each of one module, that fails, what else tells of a fault, or None."""
        ended = in_fork(lambda: self._tests(groups), self.log)
        if ended is None:
            return "hangs or is killed"
        failed, found = ended
        for module, tests in found.items():
            self.reached.learn(module, tests)
        return str(failed) if failed else None

    def _tests(self, groups: Sequence[Sequence[str]]) -> tuple[str | None, dict[str, Any]]:
        """Run tests of the copy in this process, a fork: the first that failed, and what modules called."""
        os.chdir(self.copy)
        os.environ["PYTHONPATH"] = str(self.copy)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # pytest rewrites each module once
        sys.dont_write_bytecode = False
        sys.path[:] = [str(self.copy), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        left_out = [f"--deselect={name}" for name, fails in self._anyway.items() if fails]
        found = {}
        for group in groups:  # one at a time: to collect many takes as long as to run some
            module = group[0].partition("::")[0]
            plugin = ReachPlugin(self.copy / PACKAGE)
            cpu = 15 + 4 * self.budgets.get(module, 1.0)
            signal.setitimer(signal.ITIMER_PROF, cpu)  # either ends the process
            signal.setitimer(signal.ITIMER_REAL, 60 + 5 * cpu)
            unknown = group == [module]
            if unknown:
                plugin.start()  # takes as long again
            status = pytest.main([*OPTIONS, *left_out, *group], plugins=[plugin])
            plugin.stop()
            if plugin.failed or status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                return plugin.failed or f"pytest ends with {status}", found
            if unknown:
                found[module] = plugin.found()
        return None, found

    def _put(self, path: Path, source: str) -> None:
        """Write a module. Its time is one that no compiled file of it was made from."""
        self._puts += 1
        path.write_text(source, encoding="utf-8")
        os.utime(path, (self._puts, self._puts))


def copied(folder: Path) -> Path:
    """What tests need, in a folder of its own."""
    copy = folder / "copy"
    skipped = shutil.ignore_patterns(".git", ".venv", ".ci-venv", "build", "*_cache", "__pycache__", ".hypothesis")
    shutil.copytree(ROOT, copy, ignore=skipped, symlinks=True)
    return copy
