"""Hashes of models' files, used as keys of data derived from a model."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import time_ns

from specctl.models.files.cache import write_small
from specctl.models.files.checkpoint import SMALL_FILES, Checkpoint, files_hash, locate, stored_weights
from specctl.models.files.library_calls import ADAPTER
from specctl.models.onnx.store import cache_folder
from specctl.models.predictors.predictor_checkpoint import CONFIG, PUBLISHED_WEIGHTS, WEIGHTS, locate_predictor, on_hub
from specctl.profile.schema import IN_TARGET, DraftTable, Profile


@dataclass(frozen=True, slots=True)
class Contents:
    """The files that determine what a profile's models compute, including tokenizer and templates."""

    # local files of each model, draft head and acceptance head by its key in the profile, sorted
    files: dict[str, list[Path]] = field(default_factory=dict)
    # for hub models, the current commit of their revision
    commits: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, profile: Profile) -> "Contents":
        """Find the files; from the hub, only small ones are downloaded. Raises ModelError if there is no such model."""
        checkpoints: dict[str, Checkpoint] = {}
        found: dict[str, list[Path]] = {}
        commits: dict[str, str] = {}
        for key, table in profile.models:
            if table.has_files and table.model != IN_TARGET:
                checkpoints[key] = locate(table, key)
            if not isinstance(table, DraftTable):
                continue
            if table.token_counts is not None:
                found[f"{key}.token_counts"] = [Path(table.token_counts)]
            if table.head is not None:
                folder = locate_predictor(table.head).folder
                names = (CONFIG, WEIGHTS, PUBLISHED_WEIGHTS)
                found[f"{key}.head"] = [folder / name for name in names if (folder / name).is_file()]
                if on_hub(table.head):
                    commits[f"{key}.head"] = folder.name
        for key, checkpoint in checkpoints.items():
            found[key] = _of_checkpoint(checkpoint)
            if checkpoint.source == "hub":
                commits[key] = checkpoint.folder.name
                if (adapter := checkpoint.adapter) is not None:
                    commits[key] += f" with {adapter.commit or files_hash(adapter.files)}"
        return cls(found, commits)

    def hashes(self) -> dict[str, str]:
        """`files_hash` of each with its files' names; equal for every copy."""
        return {key: _with_names(files_hash(files), files) for key, files in self.files.items()}

    def identities(self) -> dict[str, str]:
        """The commit of each hub model, even if files are missing here; else its hash."""
        local = Contents({key: files for key, files in self.files.items() if key not in self.commits})
        return {**local.hashes(), **{key: f"commit {commit}" for key, commit in self.commits.items()}}

    def changes(self) -> dict[str, list[tuple[str, int, int, int]]]:
        """Path, size, time and inode of every file, which change whenever a file is rewritten."""
        return {key: [_state(file) for file in files] for key, files in self.files.items()}


STORED = 64 << 20  # The hash of files of this many bytes is stored
SETTLED = 2_000_000_000  # Nanoseconds after which another change of a file has another time, on any file system
States = tuple[tuple[str, int, int, int], ...]  # Path, size, time and inode of files


def model_states(checkpoint: Checkpoint) -> States | None:
    """The states of all files that determine what a model computes; None if weights are missing."""
    return tuple(map(_state, _of_checkpoint(checkpoint))) if checkpoint.has_weights() else None


def model_hash(checkpoint: Checkpoint, trust_remote_code: bool, *, whole: bool = True) -> str | None:
    """A hash of all files that determine what a model computes and its tokenizer; cached for unchanged files.

    Args:
        checkpoint: the model's files.
        trust_remote_code: whether the model may run its own code.
        whole: whether every byte is read; samples of large files may miss changes of single weights.

    Returns:
        None if the files do not determine the model: it has its own code, an adapter is in its folder, or files are
            missing.
    """
    if trust_remote_code or (checkpoint.weights is None and (checkpoint.folder / ADAPTER).exists()):
        return None
    states = model_states(checkpoint)
    return None if states is None else _hash(states, whole=whole)


@lru_cache(maxsize=16)
def _hash(states: States, *, whole: bool) -> str:
    """`files_hash` with the files' names. That of large files is stored with those files' states: where graphs are
    stored, a start should not read all weights of a model that it does not load.
    """
    files = [Path(path) for path, *_ in states]
    folder = cache_folder()
    if sum(size for _, size, *_ in states) < STORED or not folder.is_dir():
        return _with_names(files_hash(files, whole=whole), files)
    # No program can set the time of a file's last change, unlike that of its contents.
    changed = [path.stat().st_ctime_ns for path in files]
    of = json.loads(json.dumps([states, changed]))
    name = hashlib.sha256(json.dumps([list(map(str, files)), whole]).encode()).hexdigest()[:32]
    place = folder / f"{name}.files.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(place.read_text(encoding="utf-8"))
        if known["of"] == of:
            return str(known["hash"])
    began = time_ns()
    found = _with_names(files_hash(files, whole=whole), files)
    if max(changed) < began - SETTLED:
        write_small(place, json.dumps({"of": of, "hash": found}))
    return found


def _with_names(contents: str, files: Sequence[Path]) -> str:
    return hashlib.sha256("\n".join([contents, *(file.name for file in files)]).encode()).hexdigest()


def _of_checkpoint(checkpoint: Checkpoint) -> list[Path]:
    small = set[Path]()
    if checkpoint.weights is None:  # whose other files are made of it
        small = {path for pattern in SMALL_FILES for path in checkpoint.folder.glob(pattern)}
        small.discard(checkpoint.folder / "README.md")
    found = sorted(path for path in {*small, *stored_weights(checkpoint)} if path.is_file())
    return found if checkpoint.adapter is None else [*found, *checkpoint.adapter.files]


def _state(file: Path) -> tuple[str, int, int, int]:
    found = file.stat()
    return str(file), found.st_size, found.st_mtime_ns, found.st_ino
