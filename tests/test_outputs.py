"""The rule for outputs: never an input, never replaced unasked, one writer, whole writes."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from time import time

import pytest

from specctl.errors import OutputError, UsageError
from specctl.outputs import ABANDONED, Outputs, locked, remove_abandoned, whole_lines, write_whole


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# Existing files


def test_a_file_with_content_stays_until_the_work_begins():
    Path("out").write_text("old\n")
    with pytest.raises(UsageError, match="out exists already") as refused, Outputs() as outputs:
        outputs.file("output", "out")
    assert "--force" in refused.value.hint
    assert "--resume" not in refused.value.hint
    with pytest.raises(UsageError) as refused, Outputs() as outputs:
        outputs.file("output", "out", resumed=False)
    assert "--resume" in refused.value.hint
    with Outputs(force=True) as outputs:
        file = outputs.file("output", "out")
        assert Path("out").read_text() == "old\n"
        assert file.begin()
        assert Path("out").read_text() == ""
        file.write("new\n")
    assert Path("out").read_text() == "new\n"


def test_a_resumed_file_is_continued_even_with_force():
    Path("out").write_text("whole\ntorn")
    with Outputs(force=True) as outputs:
        file = outputs.file("output", "out", resumed=True)
        assert file.continued
        assert Path("out").read_text() == "whole\ntorn"
        assert not file.begin()
        file.write("more\n")
    assert Path("out").read_text() == "whole\nmore\n"


@pytest.mark.parametrize("path", [os.devnull, "empty", "new"])
def test_what_holds_nothing_needs_no_force(path):
    Path("empty").touch()
    with Outputs() as outputs:
        file = outputs.file("output", path)
        assert file.begin()
        file.write("x\n")


def test_a_pipe_holds_nothing():
    os.mkfifo("pipe")
    with subprocess.Popen(["cat", "pipe"], stdout=subprocess.PIPE) as reader:
        with Outputs() as outputs:
            file = outputs.file("output", "pipe")
            assert file.begin()
            file.write("through\n")
        assert reader.communicate()[0] == b"through\n"


def test_a_failed_run_leaves_a_file_that_was_replaced_whole(here):
    def fail():
        with Outputs() as outputs:
            outputs.file("output", "new").replace("content\n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(here) == ["new"]


def test_a_failed_run_leaves_no_empty_file_or_folder(here):
    with Outputs() as outputs:
        outputs.file("trace", "written").write("kept\n")

    def fail():
        with Outputs() as outputs:
            outputs.file("output", "new")
            outputs.folder("report", Path("a/b"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(here) == ["written"]


def test_a_run_without_results_leaves_an_empty_file(here):
    with Outputs() as outputs:
        outputs.file("output", "new").begin()
    assert names(here) == ["new"]


# Inputs are no outputs


@pytest.mark.parametrize("path", ["in", "./in", "soft", "hard", "../{here}/in"])
@pytest.mark.parametrize("force", [False, True])
def test_an_input_is_no_output_by_any_name(here, path, force):
    Path("in").write_text("precious\n")
    Path("soft").symlink_to("in")
    Path("hard").hardlink_to("in")
    with Outputs(force=force) as outputs:
        outputs.reads("input", "in")
        with pytest.raises(UsageError, match="input and output are the same file"):
            outputs.file("output", path.format(here=here.name))
    assert Path("in").read_text() == "precious\n"


def test_a_file_in_a_spared_folder_is_no_output():
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    with Outputs(force=True) as outputs:
        outputs.protect("model", "model")
        outputs.protect("model", "only/on/the/hub")
        with pytest.raises(UsageError, match="model and output are the same file"):
            outputs.file("output", "model/config.json")
        with pytest.raises(UsageError, match=r"report would replace model/config\.json, the model"):
            outputs.folder("report", Path("model"))
    assert Path("model/config.json").read_text() == "{}"


def test_two_outputs_are_two_files():
    Path("link").symlink_to("out")
    with Outputs() as outputs:
        outputs.file("output", "out")
        with pytest.raises(UsageError, match="output and trace are the same file"):
            outputs.file("trace", "./out")
        with pytest.raises(UsageError, match="output and report are the same file"):
            outputs.file("report", "link")


@pytest.mark.parametrize("path", ["missing", "folder/missing"])
def test_a_missing_input_is_named(path):
    with pytest.raises(UsageError, match=f"cannot read {path}: No such file"), Outputs() as outputs:
        outputs.reads("input", path)


@pytest.mark.parametrize(
    ("path", "reason"), [("missing/out", "No such file"), (".", "Is a directory"), ("x" * 5000, "File name too long")]
)
def test_a_place_that_cannot_be_written_is_named(path, reason):
    with pytest.raises(UsageError, match=f"cannot write {path}: {reason}"), Outputs() as outputs:
        outputs.file("output", path)


# Folders


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_may_hold_other_files_but_none_that_would_be_replaced(force):
    Path("report").mkdir()
    Path("report/notes.txt").write_text("mine")
    with Outputs(force=force) as outputs:
        outputs.folder("report", Path("report"), ("report.md", "*.png"))
    Path("report/photo.png").write_text("mine")
    with Outputs(force=force) as outputs:
        if force:
            outputs.folder("report", Path("report"), ("report.md", "*.png"))
        else:
            with pytest.raises(UsageError, match=r"report already holds photo\.png"):
                outputs.folder("report", Path("report"), ("report.md", "*.png"))
    assert names(Path("report")) == ["notes.txt", "photo.png"]


def test_a_file_is_no_folder():
    Path("file").write_text("mine")
    with (
        pytest.raises(UsageError, match="cannot write file: it is a file, not a folder"),
        Outputs(force=True) as outputs,
    ):
        outputs.folder("report", Path("file"))


# One writer

WRITER = """
import sys
from pathlib import Path
from specctl.outputs import Outputs
with Outputs(force=True) as outputs:
    outputs.file("output", "out").write("first\\n")
    outputs.folder("report", Path("report"))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
def test_a_second_writer_is_refused_until_the_first_has_ended_however_it_ends():
    first = subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"ready\n"
        for resumed in (None, False, True):
            with pytest.raises(UsageError, match="another process is writing out"), Outputs(force=True) as outputs:
                outputs.file("output", "out", resumed=resumed)
        with pytest.raises(UsageError, match="another process is writing report"), Outputs() as outputs:
            outputs.folder("report", Path("report"))
        assert Path("out").read_text() == "first\n"
        first.send_signal(signal.SIGKILL)
    with Outputs() as outputs:
        outputs.file("output", "out", resumed=True).write("second\n")
        outputs.folder("report", Path("report"))
    assert Path("out").read_text() == "first\nsecond\n"


# Writes


def test_a_write_that_fails_leaves_whole_lines():
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Outputs() as outputs:
        file = outputs.file("output", "out")
        file.write("whole\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
        try:
            with pytest.raises(OutputError, match="cannot write out: File too large"):
                file.write("cut short\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert Path("out").read_text() == "whole\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_device_is_named():
    with Outputs() as outputs, pytest.raises(OutputError, match="cannot write /dev/full: No space left on device"):
        outputs.file("output", "/dev/full").write("x\n")


def test_a_file_is_replaced_as_a_whole_or_not_at_all(here):
    Path("out").write_text("old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        with pytest.raises(OutputError, match="cannot write out: File too large"):
            write_whole(Path("out"), "longer than the limit")
        with pytest.raises(OutputError), Outputs(force=True) as outputs:
            outputs.file("output", "out").replace("longer than the limit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert Path("out").read_text() == "old"
    assert names(here) == ["out"]


@pytest.mark.parametrize(
    ("content", "size"),
    [(b"", 0), (b"x" * 200_000, 0), (b"a\n" + b"x" * 200_000, 2), (b"a\n" * 100_000, 200_000), (b"\n", 1)],
)
def test_whole_lines_are_counted_from_the_end(content, size):
    Path("file").write_bytes(content)
    assert whole_lines(Path("file")) == size


# Folders that killed processes left behind


def folder_of(path: Path, age: float = 2 * ABANDONED) -> Path:
    """A folder with a file in a folder, all of them this many seconds old, and a lock."""
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
