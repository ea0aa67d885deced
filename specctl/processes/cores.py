"""The processor cores that this process may use, and how busy other processes keep them. No torch here."""

import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

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
        topology: tells which logical processors are one core; where it does not, each counts.
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
    """What the processors that this process may use had done at one moment, all in seconds.

    Attributes:
        at: the moment, on a clock of no particular start.
        busy: processor time that anyone spent, on all of them together.
        own: processor time that this process spent.
    """

    at: float
    busy: float
    own: float

    @classmethod
    def now(cls, stat: Path = STAT) -> "CoreTime | None":
        """This moment; None where the system does not tell."""
        try:
            lines = stat.read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        spent = os.times()
        return cls(perf_counter(), busy_seconds(lines, allowed_cpus()), spent.user + spent.system)

    def others_until(self, later: "CoreTime") -> float | None:
        """How many cores other processes kept busy in between; None if too little time passed to tell."""
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
