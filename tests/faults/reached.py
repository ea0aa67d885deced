"""Which functions of the package each test calls, learnt from runs of its module."""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import pytest


@dataclass(frozen=True)
class TestReach:
    """What one test did.

    Attributes:
        seconds: of CPU.
        functions: path below the package's folder and qualified name of each function that it called; what is called in
            its setup, every test of its module has called, because fixtures are shared.
    """

    __test__ = False

    seconds: float
    functions: frozenset[str]


@dataclass(eq=False)
class ReachPlugin:
    """A pytest plugin that notes what the tests of one module call, and the first that failed.

    Calls in processes that a test starts are not seen.

    Args:
        package: the package's folder.
    """

    package: Path
    failed: str | None = None
    _called: dict[int, CodeType] = field(default_factory=dict)
    _shared: set[str] = field(default_factory=set)
    _tests: dict[str, tuple[float, set[str]]] = field(default_factory=dict)

    def found(self) -> dict[str, tuple[float, list[str]]]:
        """Of each test that passed, what `TestReach` has."""
        return {test: (seconds, sorted(own | self._shared)) for test, (seconds, own) in self._tests.items()}

    def start(self) -> None:
        called = self._called

        def trace(frame: Any, _event: str, _arg: object) -> None:
            called[id(frame.f_code)] = frame.f_code

        sys.settrace(trace)
        threading.settrace(trace)

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._shared |= self.taken()  # and what was called while modules were collected

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = time.process_time()
        try:
            return (yield)
        finally:
            self._tests[item.nodeid] = time.process_time() - before, self.taken()

    def _note(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid

    def taken(self) -> set[str]:
        """What was called since it was last asked."""
        top = f"{self.package}/"
        codes = list(self._called.values())  # what follows is called too
        self._called.clear()
        return {f"{code.co_filename.removeprefix(top)} {code.co_qualname}"
                for code in codes if code.co_filename.startswith(top)}  # fmt: skip


@dataclass(eq=False)
class Reached:
    """What is known of test modules, kept in a folder.

    Attributes:
        folder: of the files.
        root: the project's; what was learnt of a module counts as long as its text stays.
    """

    folder: Path
    root: Path
    _modules: dict[str, dict[str, TestReach] | None] = field(default_factory=dict)

    def learn(self, module: str, tests: dict[str, tuple[float, list[str]]]) -> None:
        """Keep what all tests of a module did."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {"text": self._text(module), "tests": tests}
        self._file(module).write_text(json.dumps(kept), encoding="utf-8")
        self._modules.pop(module, None)

    def tests_of(self, module: str) -> dict[str, TestReach] | None:
        """The tests of a module by their names, or None where nothing is known."""
        if module not in self._modules:
            self._modules[module] = self._read(module)
        return self._modules[module]

    def plan(self, function: str, near: Sequence[str], seconds: float, budgets: dict[str, float]) -> list[list[str]]:
        """What to run to see a fault of a function: lists of tests of one module each.

        First come tests of near modules that are known to call it, cheap modules before dear ones; then near modules of
        which nothing is known, whole; then other tests that are known to call it. Where there are none, all near ones.

        Args:
            function: as in `TestReach`.
            near: modules near it, nearest first.
            seconds: CPU of all, or of one test.
            budgets: CPU seconds of modules.
        """
        groups = list[tuple[tuple[bool, bool, float], list[tuple[float, str]]]]()
        for module in dict.fromkeys([*near, *self._known()]):
            tests = self.tests_of(module)
            if tests is not None:
                calling = sorted((reach.seconds, test) for test, reach in tests.items() if function in reach.functions)
                groups.append(((module not in near, False, sum(cost for cost, _ in calling)), calling))
            elif module in near:
                groups.append(((False, True, budgets.get(module, 1.0)), [(budgets.get(module, 1.0), module)]))
        chosen, spent = list[list[str]](), 0.0
        for _, tests_by_cost in sorted(groups):
            taken = []
            for cost, test in tests_by_cost:
                if not spent or spent + cost <= seconds:
                    taken.append(test)
                    spent += cost
            if taken:
                chosen.append(taken)
        return chosen or [[module] for module in near]

    def told(self, tests: Sequence[Sequence[str]]) -> str:
        """A name for what `plan` chose, another one where a test of it has changed."""
        texts = [(group, self._text(group[0].partition("::")[0])) for group in tests]
        return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]

    def _known(self) -> list[str]:
        """Modules of which something was learnt, and that there are."""
        names = (file.name.removesuffix(".py.json").replace(".", "/") + ".py" for file in self.folder.glob("*.json"))
        return sorted(name for name in names if (self.root / name).exists())

    def _read(self, module: str) -> dict[str, TestReach] | None:
        file = self._file(module)
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if kept.get("text") != self._text(module):
            return None
        return {test: TestReach(seconds, frozenset(map(sys.intern, functions)))
                for test, (seconds, functions) in kept["tests"].items()}  # fmt: skip

    def _file(self, module: str) -> Path:
        return self.folder / f"{module.replace('/', '.')}.json"

    def _text(self, module: str) -> str:
        return hashlib.sha256((self.root / module).read_bytes()).hexdigest()[:16]
