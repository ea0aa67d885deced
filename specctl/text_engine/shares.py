"""What of this machine each replica gets: processor threads and GPUs. No torch here."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specctl.errors import UsageError
from specctl.models.placing.memory import nvidia_smi
from specctl.processes.cores import usable_cores
from specctl.profile.schema import Profile

VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SPREAD = ("balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica gets.

    Attributes:
        threads: of its passes on the CPU.
        gpus: as CUDA_VISIBLE_DEVICES names them; None where the replica uses none, or there are none.
        alone: whether no other replica has one of these GPUs.
    """

    threads: int
    gpus: tuple[str, ...] | None = None
    alone: bool = True

    @property
    def environment(self) -> dict[str, str]:
        """Variables that must be set before torch is imported."""
        visible = {} if self.gpus is None else {VISIBLE: ",".join(self.gpus)}
        return {**dict.fromkeys(THREADS, str(self.threads)), **visible}


def gpus_here(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE in environ:
        return [name for name in map(str.strip, environ[VISIBLE].split(",")) if name not in ("", "-1")]
    return nvidia_smi("index").split()


def gpus_needed(profile: Profile, there: int) -> int:
    """How many of so many GPUs a replica of a profile's pair uses: as many as its devices name or its models have
    shards, all for models that are spread, one for ``auto``, none on the CPU."""
    tables = (profile.target, *(profile.draft.levels if profile.draft else ()))
    needed = max((table.shards or 0 for table in tables if table.device != "cpu"), default=0) if there else 0
    for device in _devices(profile):
        kind, _, index = device.partition(":")
        if device in _SPREAD:
            needed = there
        elif device == "auto":
            needed = max(needed, min(1, there))
        elif kind == "cuda" or device.isdecimal():
            needed = max(needed, int(device if device.isdecimal() else index or 0) + 1)
    return needed


def shares(
    workers: int | Literal["auto"],
    profile: Profile,
    gpus: Sequence[str] | None = None,
    cores: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[Share]:
    """A share of this machine for each replica.

    GPUs are dealt out whole, as many to each replica; where there are fewer than replicas they are shared. ``auto`` is
    one replica for as many GPUs as the profile's devices need, or without GPUs one for each core.

    Args:
        workers: number of replicas.
        profile: says which devices the pair uses, and how many threads.
        gpus: names of the GPUs; by default those of this machine.
        cores: that may be used; by default those of this machine.
        environ: environment variables; a smaller OMP_NUM_THREADS is kept.

    Raises:
        UsageError: the profile names GPUs that a replica could not have.
    """
    there = list(gpus_here(environ) if gpus is None else gpus)
    cores = usable_cores() if cores is None else cores
    needed = gpus_needed(profile, len(there))
    if not needed:
        there = []
    count = workers if workers != "auto" else max(1, len(there) // needed) if there else cores
    asked = [int(environ[name]) for name in THREADS if environ.get(name, "").isdecimal()]
    threads = min([max(1, cores // count), *asked]) if profile.threads == "auto" else profile.threads
    if not there:
        return [Share(threads)] * count
    each = needed if workers == "auto" else len(there) // count
    spread = any(device in _SPREAD for device in _devices(profile))
    if each >= needed or (each and spread):
        return [Share(threads, tuple(there[index * each : (index + 1) * each])) for index in range(count)]
    if needed > 1:
        raise UsageError(
            f"{count} replicas of {needed} GPUs each do not fit on {len(there)}",
            f"use --workers {max(1, len(there) // needed)}, or name other devices in the profile",
        )
    return [Share(threads, (there[index % len(there)],), alone=False) for index in range(count)]


def require_gpus(profile: Profile, there: int) -> None:
    """Raise UsageError unless replicas of a profile's pair compute on GPUs alone, of which so many are there.

    Cores are never one replica's own: memory and caches are everyone's.
    """
    if "cpu" in _devices(profile) or not gpus_needed(profile, there):
        raise UsageError(
            "replicas on the CPU share its cores and memory, and times would be those of sharing",
            "leave out --workers, or name GPUs in the profile",
        )


def _devices(profile: Profile) -> list[str]:
    """The devices that a profile names for the models that have weights."""
    found: list[str] = []
    for table in (profile.target, *(profile.draft.levels if profile.draft is not None else ())):
        if not table.is_lookup:
            found += [str(one) for one in table.device.values()] if isinstance(table.device, dict) else [table.device]
    return found
