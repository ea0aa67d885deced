"""One thread a process, tests sorted into tiers, and what they cost.

Shared helpers are in `tests/support/`.
"""

import gc
import importlib.metadata
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import hypothesis
import pytest
from durations import Durations, budgets
from tiers import LOST, sort_into_tiers

# Before torch is imported, and for every process that a test starts: two workers of pytest-xdist on two cores would
# otherwise fight with four threads.
os.environ["OMP_NUM_THREADS"] = "1"
# Who starts the suite in the background of a shell (`make test &`) has interrupts ignored, and so would all that the
# tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _own_policies_alone() -> None:
    """Hide the policies and drafters that other distributions of this environment register.

    Tests that are made for each policy would be made for theirs too. What a test puts on the path itself is seen.
    """
    usual, environment = importlib.metadata.entry_points, {str(Path(folder).resolve()) for folder in sys.path}

    def entry_points(**asked: Any) -> Any:
        found = usual(**asked)
        if not asked.get("group", "").startswith("specctl."):
            return found
        return [one for one in found if one.dist and str(Path(one.dist.locate_file("")).resolve()) not in environment]

    importlib.metadata.entry_points = entry_points


_own_policies_alone()
# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")
# Imports and collection only add objects: looking through all of them again and again took a third of the time.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-to", type=Path, help="a file that gets the CPU seconds of each test")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # reports of all workers come together in the process that started them
        config.pluginmanager.register(Durations(config.getoption("--durations-to")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[LOST] = sort_into_tiers(items)
    if hasattr(config, "workerinput"):  # the longest modules first, so that none is left over at the end
        allowed = budgets()
        items.sort(key=lambda item: -allowed.get(item.nodeid.partition("::")[0], 0.0))


def pytest_collection_finish() -> None:
    """What is there now stays: no collection of a test's own garbage looks at it again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def quick_machine() -> Iterator[None]:
    """However slow the machine, no command takes so long that it begins to write how far it is."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("specctl.terminal.progress.PATIENCE", 1e6)
        yield


@pytest.fixture(autouse=True, scope="session")
def command_line_built_once() -> Iterator[None]:
    """typer makes all commands anew for each call, which takes longer than most of them."""
    main, testing = sys.modules.get("typer.main"), sys.modules.get("typer.testing")
    with pytest.MonkeyPatch.context() as monkeypatch:
        if main is not None:
            usual, made = main.get_command, WeakKeyDictionary()

            def get_command(app: Any) -> Any:
                known, command = made.get(app, (None, None))
                parts = len(app.registered_commands), len(app.registered_groups)
                if known != parts:
                    made[app] = parts, (command := usual(app))
                return command

            monkeypatch.setattr(main, "get_command", get_command)
            if testing is not None:
                monkeypatch.setattr(testing, "_get_command", get_command)
        yield


@pytest.fixture(scope="module")
def undrawn() -> Iterator[None]:
    """Figures of reports are named, and not drawn."""
    from specctl.reporting import document

    def render(picture: document.Picture) -> document._Drawn:
        return document._Drawn(picture.name, picture.title, picture.caption, b"png", b"svg")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(document, "render", render)
        yield


@pytest.fixture(scope="module")
def drafts_at_will() -> Iterator[None]:
    """`cost-optimal` drafts from the first round on as after having saved time: laws hold for its long drafts too."""
    from specctl.policies import cost_optimal
    from specctl.policies.draft_account import MOST, DraftAccount

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cost_optimal, "DraftAccount", lambda: DraftAccount(MOST))
        yield


@pytest.fixture(autouse=True, scope="session")
def shipped_models_read_once() -> Iterator[None]:
    """Where a test reads models; else nothing that takes seconds is imported."""
    with nullcontext() if "specctl.models.loading.model" not in sys.modules else _shipped_models().read_once():
        yield


def _shipped_models() -> Any:
    from tests.support import shipped_models

    return shipped_models


@pytest.fixture(autouse=True, scope="session")
def shared_exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every model is exported for onnxruntime once, by whichever worker comes first."""
    # Importing it takes seconds, so only tests that need it do.
    models = sys.modules.get("tests.support.onnx_models")
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
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu", cpu_seconds() - before))  # reports carry it, from a worker too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from measured(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from measured(item))
