"""One thread a process, and markers that tell the truth about durations.

pytest puts this file's folder on the path, so that every test can import the shared helpers.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter

import pytest
from tiers import names_another

# Before torch is imported, and for every process that a test starts: two workers of pytest-xdist on two cores would
# otherwise fight with four threads.
os.environ["OMP_NUM_THREADS"] = "1"
# Who starts the suite in the background of a shell (`make test &`) has interrupts ignored, and so would all that the
# tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = 10.0
"""Seconds of CPU from which a test is `slow`; children's count too."""
TOO_SLOW, TOO_QUICK = 1.5 * SLOW, SLOW / 5
"""From which on a mark is said to be missing or not deserved: on a busy machine the same work takes more CPU."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-durations", action="store_true", help="fail if a slow test is not marked so, or a marked one is quick"
    )


def pytest_configure(config: pytest.Config) -> None:
    import torch

    torch.set_num_threads(1)
    if not hasattr(config, "workerinput"):  # reports of all workers come together in the process that started them
        config.pluginmanager.register(Durations(config.getoption("--strict-durations")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of modules that are `crossed` with policies that are no representatives as `exhaustive`."""
    for item in items:
        if item.get_closest_marker("crossed") and names_another(item.name):
            item.add_marker("exhaustive")


@pytest.fixture(autouse=True, scope="session")
def quick_machine() -> Iterator[None]:
    """However slow the machine, no command takes so long that it begins to write how far it is."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("specctl.terminal.work_progress.PATIENCE", 1e6)
        yield


@pytest.fixture(autouse=True, scope="session")
def shared_exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every model is exported for onnxruntime once, by whichever worker comes first."""
    models = sys.modules.get("onnx_models")  # where no test needs it, it is not imported: that takes seconds
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exports"  # of all workers
    with nullcontext() if models is None or models.missing else models.exported_once(folder):
        yield


@pytest.fixture
def inference_mode() -> Iterator[None]:
    """The whole test in torch's inference mode, for modules that use it."""
    import torch

    with torch.inference_mode():
        yield


def cpu_seconds() -> float:
    """Of this process and of the children it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def measured(item: pytest.Item) -> Iterator[None]:
    cpu, wall = cpu_seconds(), perf_counter()
    try:
        return (yield)
    finally:
        # Reports carry these, from a worker too.
        item.user_properties.append(("seconds", (cpu_seconds() - cpu, perf_counter() - wall)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from measured(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from measured(item))


@dataclass(eq=False)
class Durations:
    """Compares what tests took with how they are marked; a module's fixtures are paid by the test that comes first.

    Attributes:
        strict: whether a wrong mark fails the run.
        taken: CPU and wall seconds of each test, and whether it is marked slow.
    """

    strict: bool
    taken: dict[str, tuple[float, float, bool]] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown" and not report.skipped:
            phases = [seconds for name, seconds in report.user_properties if name == "seconds"]
            cpu, wall = (sum(column) for column in zip(*phases, strict=True)) if phases else (0.0, 0.0)
            self.taken[report.nodeid] = cpu, wall, "slow" in report.keywords

    def wrong(self) -> list[str]:
        """A line for each mark that is not true."""
        deserving = {_module(test) for test, (cpu, _, slow) in self.taken.items() if slow and cpu > TOO_QUICK}
        lines = []
        for test, (cpu, wall, slow) in sorted(self.taken.items(), key=lambda entry: -entry[1][0]):
            if cpu > TOO_SLOW and not slow:
                lines.append(f"not marked slow: {cpu:.1f} s of CPU ({wall:.1f} s): {test}")
            elif slow and cpu < TOO_QUICK and _module(test) not in deserving:
                lines.append(f"marked slow: {cpu:.1f} s of CPU ({wall:.1f} s): {test}")
        return lines

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        cpu = sum(cpu for cpu, *_ in self.taken.values())
        terminalreporter.write_line(f"{len(self.taken)} tests took {cpu:.0f} s of CPU")
        if lines := self.wrong():
            terminalreporter.section(f"marks that durations do not bear out ({SLOW:.0f} s of CPU are slow)")
            for line in lines:
                terminalreporter.write_line(line)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.strict and self.wrong() and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _module(test: str) -> str:
    return test.partition("::")[0]
