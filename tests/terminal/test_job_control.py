import importlib
import os
import signal

import pytest

from specctl.terminal import display


class Picture:
    def hide(self) -> None: ...

    def show(self) -> None: ...

    def resized(self) -> None: ...


@pytest.fixture
def without_job_control(monkeypatch):
    """The module as a system has it whose Python knows nothing of job control, such as Windows."""
    for module, names in ((signal, ("SIGTSTP", "SIGCONT", "SIGWINCH")), (os, ("tcgetpgrp", "getpgrp", "getsid"))):
        for name in names:
            monkeypatch.delattr(module, name)
    yield importlib.reload(display)
    monkeypatch.undo()
    importlib.reload(display)


def test_a_system_without_job_control_draws_all_the_same(without_job_control):
    assert without_job_control.in_foreground(0)
    with without_job_control.obeyed(Picture()):
        assert signal.set_wakeup_fd(-1) == -1  # no thread reads signals
