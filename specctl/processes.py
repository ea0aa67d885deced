"""This process among others: signals, children, limits, and the cores that it may use. No torch here."""

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
    """How many cores this process can keep busy: physical ones that it may run on, as far as its quota reaches.

    Args:
        topology: says which logical processors are one core; without it, each counts.
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
    """What the processors that this process may use had done at one moment, all in seconds."""

    at: float  # the moment, on a clock of no particular start
    busy: float  # processor time that anyone spent, on all of them together
    own: float  # processor time that this process spent

    @classmethod
    def now(cls, stat: Path = STAT) -> "CoreTime | None":
        """This moment; None where the system does not say."""
        try:
            lines = stat.read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        spent = os.times()
        return cls(perf_counter(), busy_seconds(lines, allowed_cpus()), spent.user + spent.system)

    def others_until(self, later: "CoreTime") -> float | None:
        """How many cores other processes kept busy in between; None if too little time passed."""
        elapsed = later.at - self.at
        if elapsed < 0.2:  # clock ticks are 10 ms
            return None
        return max(0.0, (later.busy - self.busy) - (later.own - self.own)) / elapsed


def busy_seconds(lines: list[str], cpus: Set[int]) -> float:
    """Time that some processors were busy since the machine started, from the lines of /proc/stat."""
    ticks = 0
    for columns in map(str.split, lines):
        if columns and columns[0][:3] == "cpu" and columns[0][3:].isdecimal() and int(columns[0][3:]) in cpus:
            ticks += sum(int(columns[index]) for index in _BUSY if index < len(columns))
    return ticks / os.sysconf("SC_CLK_TCK")


class Arrivals:
    """Reports every signal that Python handles, from its own thread, whatever the main thread does.

    Outside of the main thread, and where something else listens already, it does nothing.

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
        """Report no more. Outside of the main thread this does nothing: only there can it be changed."""
        if self._ear is not None and threading.current_thread() is threading.main_thread():
            current = signal.set_wakeup_fd(-1)
            if current != self._mouth:  # something else listens since
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

    The child imports from where this process does, whatever its own first folder is.
    """
    paths = [os.path.abspath(path) for path in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; from {module} import main; main()"]


class Interrupt:
    """Handles Ctrl-C as Python does, and remembers the calls that were under way.

    Native code may drop a KeyboardInterrupt of a function that it calls and raise another error in its place: torch
    does so where it asks an object for its first item.
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
        """Whether an error, or one that it arose from, came out of a call that was under way at the last Ctrl-C."""
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
    """Note a first Ctrl-C while the block runs, and raise KeyboardInterrupt at a second one only.

    Yields a function that says whether there was one.
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
    """The limit that an exception is about, and how to raise it; None for other exceptions."""
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
