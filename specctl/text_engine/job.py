"""A replica's job, its models, and its share of the machine. This module does not import torch."""

import os
import pickle
import socket
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from specctl.errors import ModelError, SpecctlError, UsageError, reason
from specctl.models.files.library_calls import hush_imports
from specctl.models.loading.contents import Contents
from specctl.models.placing.memory import nvidia_smi
from specctl.processes import usable_cores
from specctl.profile.schema import EMBEDDED, DraftTable, Profile
from specctl.text_engine.engine import Answer, TextEngine


@dataclass(frozen=True, slots=True)
class Job:
    """The job of every replica."""

    # ``package.module:function``, imported in the replica alone, so the command need not import torch. It is called
    # once with the setup and the replica's ``number``, loads the models and returns the function that answers.
    maker: str
    setup: Mapping[str, Any]  # its keyword arguments; they are pickled
    # names of arguments that vary between commands without making a replica unusable
    passing: frozenset[str] = frozenset()
    sources: "Sources | None" = None  # the command's models, which the replica must match; None if it needs none
    # whether an error on a question ends the replica, which is then restarted, instead of ending the command
    restarts: bool = False

    def begin(self, number: int) -> Answer | TextEngine:
        """Load the models; ``number`` is the replica's, from 0, so that only one repeats a common message.

        Returns:
            A function that answers one question at a time, or an engine in the replica, which answers several at once
            and may answer in parts.

        Raises:
            ModelError: the models are not those of the command, or were written while they were loaded.
        """
        hush_imports()
        before = [] if self.sources is None else self.sources.enter()
        module, _, function = self.maker.partition(":")
        answer: Answer | TextEngine = getattr(import_module(module), function)(number=number, **self.setup)
        if self.state() != before:
            raise ModelError("Files of the models were written while a replica loaded them.", "Run the command again.")
        return answer

    def state(self) -> list[Any]:
        """`Sources.state` of its models, from the replica's own folder."""
        return [] if self.sources is None else self.sources.state()


class ReplicaError(SpecctlError):
    """Replicas cannot be used, or no longer."""


def portable(error: Exception) -> Exception:
    """An exception that can be sent to another process: itself, or a ReplicaError if it cannot be pickled.

    With ``SPECCTL_DEBUG`` it carries the traceback as a note.
    """
    if os.environ.get("SPECCTL_DEBUG", "0") not in {"", "0"}:
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # whatever its own code raises
        pass
    return ReplicaError(f"{type(error).__name__}: {reason(error)}")


_SHARE = "Replicas read models from the command's paths. Put them on a file system that all machines share, the same "


@dataclass(frozen=True, slots=True)
class Sources:
    """The files that a command found under its models' names."""

    folder: str  # the command's working directory, the base of relative paths
    profiles: tuple[Profile, ...]  # name the models
    # the absolute path of each local model or head, by its name in messages
    paths: Mapping[str, str]
    relative: bool  # whether one of them is named by a relative path
    identities: Mapping[str, str]  # of each model or head `Contents.identities`

    @classmethod
    def of(cls, profile: Profile, others: Iterable[DraftTable] = ()) -> "Sources":
        """Find the files of a profile's models and of other drafts and heads that are loaded with them.

        Raises:
            ModelError: there is no such model.
        """
        profiles = (profile, *(profile.model_copy(update={"draft": other}) for other in others))
        contents, names = _found(profiles)
        local = {
            subject: Path(name).expanduser()
            for subject, name in names.items()
            if subject not in contents.commits and not name.startswith(EMBEDDED)
        }
        paths = {subject: str(path.absolute()) for subject, path in local.items()}
        relative = not all(path.is_absolute() for path in local.values())
        return cls(str(Path.cwd()), profiles, paths, relative, contents.identities())

    def enter(self) -> list[Any]:
        """Change to the command's working directory, check that its files are there, and return their `state`.

        Raises:
            ModelError: a file or folder is not there, or holds something else.
        """
        here = socket.gethostname()
        for subject, path in self.paths.items():
            if not Path(path).exists():
                raise ModelError(
                    f"{subject}: {here}, where a replica runs, has no {path}.",
                    f"{_SHARE}path on each, or name a model of the hub.",
                )
        try:
            os.chdir(self.folder)
        except OSError as error:
            if self.relative:
                raise ModelError(
                    f"{next(iter(self.paths))}: {here}, where a replica runs, cannot enter {self.folder}, the folder "
                    f"that its path counts from: {error.strerror}.",
                    "Give absolute paths.",
                ) from error
        contents, _ = _found(self.profiles)
        state, found = _state(contents), contents.identities()
        for subject, identity in self.identities.items():
            if found.get(subject) != identity:
                raise self._other(subject, here, found.get(subject, "nothing"))
        return state

    def state(self) -> list[Any]:
        """A cheap fingerprint that changes whenever a file is rewritten or a commit moves."""
        return _state(_found(self.profiles)[0])

    def _other(self, subject: str, here: str, found: str) -> ModelError:
        if (path := self.paths.get(subject)) is not None:
            return ModelError(
                f"{subject}: on {here}, where a replica runs, the files in {path} hold something else than the command "
                "found there.",
                f"If they were replaced in the meantime, run the command again. {_SHARE}files on each.",
            )
        return ModelError(
            f"{subject} is at {found} on {here}, where a replica runs, and at {self.identities[subject]} where the "
            "command runs.",
            "Name the commit with `revision` in its table, or update the older machine's copy.",
        )


def _found(profiles: Iterable[Profile]) -> tuple[Contents, dict[str, str]]:
    """All models' files and the models' names, by name in messages."""
    files: dict[str, list[Path]] = {}
    commits: dict[str, str] = {}
    names: dict[str, str] = {}
    for profile in profiles:
        found = Contents.of(profile)
        for key in found.files:
            name = _name(profile, key)
            subject = f"The acceptance head {name!r}" if key.endswith(".head") else f"The {key} model {name!r}"
            files[subject], names[subject] = found.files[key], name
            if key in found.commits:
                commits[subject] = found.commits[key]
    return Contents(files, commits), names


def _state(contents: Contents) -> list[Any]:
    """For hub models the commit alone: their files never change, and loading may download more of them."""
    local = {subject: files for subject, files in contents.files.items() if subject not in contents.commits}
    return [contents.commits, Contents(local).changes()]


def _name(profile: Profile, key: str) -> str:
    """The profile's name of the model or head that `Contents` has under a key."""
    *_, table = (profile.target, *(profile.draft.levels if profile.draft is not None else ()))[: key.count("draft") + 1]
    head = table.head if isinstance(table, DraftTable) and key.endswith(".head") else None
    return table.model if head is None else head


VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SPREAD = ("balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True, slots=True)
class Share:
    """One replica's share of the machine."""

    threads: int  # for passes on the CPU
    # names as in CUDA_VISIBLE_DEVICES; None if the replica uses no GPU or there is none
    gpus: tuple[str, ...] | None = None
    alone: bool = True  # whether no other replica has one of these GPUs

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
    """The number of GPUs that one replica of a profile's pair uses. Named devices and shards are counted; spread models
    use all GPUs, ``auto`` one, models on the CPU none.
    """
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

    Every replica gets the same number of whole GPUs; with fewer GPUs than replicas, GPUs are shared. ``auto`` starts
    one replica for each set of GPUs that the profile needs, or without GPUs one for each core.

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
    """Raise UsageError unless replicas of a profile's pair use GPUs only; ``there`` is the number of GPUs.

    Cores are never exclusive to a replica: memory and caches are shared.
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
