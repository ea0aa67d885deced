"""Signals, child processes, limits and usable cores. This module does not import torch."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import CodeType, FrameType
from typing import NoReturn

STAT = Path("/proc/stat")
TOPOLOGY = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")

_BUSY = (1, 2, 3, 6, 7, 8)
"""Columns of a line of /proc/stat: user, nice, system, irq, softirq, steal. Guests are in the first two already."""


def allowed_cpus() -> frozenset[int]:
    """The logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores(topology: Path = TOPOLOGY, quota: Path = QUOTA) -> int:
    """The number of cores this process can keep busy: its allowed physical cores, limited by its quota.

    Args:
        topology: maps logical processors to cores; without it, each counts as a core.
        quota: the process's share of the machine, as Linux writes it for a control group: microseconds of processor
            time in each period, then the period.
    """
    cpus = allowed_cpus()
    cores = len({_siblings(topology, cpu) for cpu in cpus})
    try:
        share, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, -(-int(share) // int(period))))
    except (OSError, ValueError):  # not Linux, no control group, or "max": no limit
        return max(1, cores)


def cores_text(cores: int) -> str:
    """A number of cores in words."""
    return f"{cores} core{'s'[: cores != 1]}"


def _siblings(topology: Path, cpu: int) -> str:
    try:
        return (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Processor times at one moment, of the processors that this process may use, in seconds."""

    at: float  # the moment, on a clock of no particular start
    busy: float  # processor time of all processes, summed over these processors
    own: float  # processor time of this process

    @classmethod
    def now(cls, stat: Path = STAT) -> "CoreTime | None":
        """The times now; None if the system does not report them."""
        try:
            lines = stat.read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        spent = os.times()
        return cls(perf_counter(), busy_seconds(lines, allowed_cpus()), spent.user + spent.system)

    def others_until(self, later: "CoreTime") -> float | None:
        """The number of cores that other processes kept busy until ``later``; None if too little time passed."""
        elapsed = later.at - self.at
        if elapsed < 0.2:  # clock ticks are 10 ms
            return None
        return max(0.0, (later.busy - self.busy) - (later.own - self.own)) / elapsed


def busy_seconds(lines: list[str], cpus: Set[int]) -> float:
    """Busy time of some processors since boot, from the lines of /proc/stat."""
    ticks = 0
    for columns in map(str.split, lines):
        if columns and columns[0][:3] == "cpu" and columns[0][3:].isdecimal() and int(columns[0][3:]) in cpus:
            ticks += sum(int(columns[index]) for index in _BUSY if index < len(columns))
    return ticks / os.sysconf("SC_CLK_TCK")


class Arrivals:
    """Reports every signal that Python handles from a separate thread, even while the main thread is blocked.

    It does nothing outside the main thread, or if another wakeup descriptor is set.

    Args:
        report: called with a signal's number, in that thread.
    """

    def __init__(self, report: Callable[[int], None]) -> None:
        self._ear: int | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        other = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other, warn_on_full_buffer=False)
            os.close(ear)
            os.close(self._mouth)
            return
        self._ear = ear
        threading.Thread(target=_listen, args=(ear, report), name="signals", daemon=True).start()

    def close(self) -> None:
        """Stop reporting. Outside the main thread this does nothing, because only the main thread can change it."""
        if self._ear is not None and threading.current_thread() is threading.main_thread():
            current = signal.set_wakeup_fd(-1)
            if current != self._mouth:  # another wakeup descriptor was set since
                signal.set_wakeup_fd(current, warn_on_full_buffer=False)
            os.close(self._mouth)
            self._ear = None


def _listen(ear: int, report: Callable[[int], None]) -> None:
    while arrived := os.read(ear, 64):
        for number in arrived:
            report(number)
    os.close(ear)


def child_command(module: str) -> list[str]:
    """The command of a child process that runs a module's ``main``; further words are its arguments.

    The child gets this process's ``sys.path``.
    """
    paths = [os.path.abspath(path) for path in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; from {module} import main; main()"]


class Interrupt:
    """Handles Ctrl-C as Python does, and remembers the calls that were running.

    Native code may replace a KeyboardInterrupt raised in a callback by another error: torch does so when it reads an
    object's first item.
    """

    def __init__(self) -> None:
        self._calls: set[tuple[CodeType, int]] = set()

    def __call__(self, _signal: int, frame: FrameType | None) -> NoReturn:
        self._calls.clear()
        while frame is not None:
            self._calls.add((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        raise KeyboardInterrupt

    def became(self, error: BaseException) -> bool:
        """Whether an error or one of its causes came from a call that was running at the last Ctrl-C."""
        cause: BaseException | None = error
        while cause is not None:
            at = cause.__traceback__
            while at is not None and at.tb_next is not None:
                at = at.tb_next
            if at is not None and (at.tb_frame.f_code, at.tb_lasti) in self._calls:
                return True
            cause = cause.__context__
        return False


interrupt = Interrupt()


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Only note the first Ctrl-C while the block runs; a second one raises KeyboardInterrupt.

    Yields a function that returns whether there was one.
    """
    pressed = False

    def press(_signal: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def exceeded(error: BaseException) -> tuple[str, str] | None:
    """The system limit that caused an exception, and how to raise it; None for other exceptions."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            "too many files are open: this process may open no more",
            "Raise the limit with `ulimit -n 4096`, or use fewer --workers, each of which takes three.",
        )
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return (
            "no more threads can be started: the system limits memory or processes",
            "Raise the limit (`ulimit -u`, `ulimit -v`, or the container's), or use fewer --workers or --threads.",
        )
    return None
