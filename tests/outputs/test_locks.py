"""Folders that killed processes left behind are removed, and no others."""

import errno
import fcntl
import os
from pathlib import Path
from time import time

import pytest

from specctl.outputs.locks import ABANDONED, locked, remove_abandoned


def folder_of(path: Path, age: float = 2 * ABANDONED) -> Path:
    """A folder with a file in a folder, all of them so many seconds old, and a lock."""
    (path / "inner").mkdir(parents=True)
    for file in (path / "inner" / "file", path / "lock"):
        file.touch()
    for each in (*path.rglob("*"), path):
        os.utime(each, (time() - age,) * 2)
    return path


def test_an_abandoned_folder_is_removed(tmp_path: Path) -> None:
    for number, lock in enumerate(("0/lock", "1/none", "apart")):
        folder = folder_of(tmp_path / str(number))
        remove_abandoned(folder, tmp_path / lock)
        assert not folder.exists()


@pytest.mark.parametrize("newest", [".", "inner", "inner/file"])
def test_one_with_anything_new_in_it_stays(tmp_path: Path, newest: str) -> None:
    folder = folder_of(tmp_path / "it")
    os.utime(folder / newest)
    remove_abandoned(folder, folder / "lock")
    assert (folder / "inner" / "file").exists()


def test_one_that_is_locked_stays(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "it")
    with (folder / "lock").open("rb") as file:
        assert locked(file.fileno())
        remove_abandoned(folder, folder / "lock")
        assert folder.exists()
    remove_abandoned(folder, folder / "lock")
    assert not folder.exists()


def test_where_there_are_no_locks_everything_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    folder = folder_of(tmp_path / "it")
    with (folder / "lock").open("rb") as file, monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refused)
        assert locked(file.fileno())
        remove_abandoned(folder, folder / "lock")
    assert folder.exists()


def test_links_and_files_and_what_is_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, link, file = folder_of(tmp_path / "it"), tmp_path / "link", tmp_path / "file"
    link.symlink_to(folder)
    file.touch()
    os.utime(file, (0, 0))
    for each in (link, file, tmp_path / "nothing"):
        remove_abandoned(each, tmp_path / "lock")
    (folder / "lock").unlink()
    (folder / "lock").symlink_to(file)
    os.utime(folder, (0, 0))
    remove_abandoned(folder, folder / "lock")
    (folder / "lock").unlink()
    os.utime(folder, (0, 0))
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    remove_abandoned(folder, folder / "lock")
    assert folder.is_dir()
    assert link.is_symlink()
    assert file.exists()
