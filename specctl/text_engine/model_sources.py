"""The models that a command means, so that its replicas load the very same."""

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.errors import ModelError
from specctl.models.loading.contents import Contents
from specctl.profile.schema import EMBEDDED, DraftTable, Profile

_SHARE = "Replicas read models from the command's paths. Put them on a file system that all machines share, the same "


@dataclass(frozen=True, slots=True)
class Sources:
    """What a command found under the names of its models.

    Attributes:
        folder: the command's current folder, from which relative paths count.
        profiles: name the models.
        paths: of each model or head that is a local folder, the absolute path, by what messages call it.
        relative: whether one of them is named by a relative path.
        identities: of each model or head `Contents.identities`.
    """

    folder: str
    profiles: tuple[Profile, ...]
    paths: Mapping[str, str]
    relative: bool
    identities: Mapping[str, str]

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
        """Make relative paths mean what they mean to the command, and find the same files there; gives their `state`.

        Raises:
            ModelError: a folder is not there, or holds something else.
        """
        here = socket.gethostname()
        for subject, path in self.paths.items():
            if not Path(path).is_dir():
                raise ModelError(
                    f"{subject}: {here}, where a replica runs, has no folder {path}.",
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
        """Cheap to find, and another as soon as a file is written again, with whatever contents, or a commit moves."""
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
    """The files of all models, and the models' names, by what messages call each."""
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
    """Of the hub's, the commit alone: their files never change, and loading downloads more of them."""
    local = {subject: files for subject, files in contents.files.items() if subject not in contents.commits}
    return [contents.commits, Contents(local).changes()]


def _name(profile: Profile, key: str) -> str:
    """What a profile calls the model or head that `Contents` has under a key."""
    *_, table = (profile.target, *(profile.draft.levels if profile.draft is not None else ()))[: key.count("draft") + 1]
    head = table.head if isinstance(table, DraftTable) and key.endswith(".head") else None
    return table.model if head is None else head
