import importlib
import io
import os
import re
import signal
import sys
from pathlib import Path

import pexpect
import pytest
from rich.console import Console
from rich.text import Text

from specctl.terminal import display
from specctl.terminal.display import Bottom, FullScreen
from specctl.terminal.progress import TerminalProgress

ENTER, LEAVE, HIDE, SHOW = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25l", "\x1b[?25h"


class Screen:
    """What a terminal shows, as far as drawings use it: rows of cells, and a cursor."""

    def __init__(self, width: int, height: int, fill: str = " ") -> None:
        self.width, self.height = width, height
        self.cells = [[fill] * width for _ in range(height)]
        self.row = self.column = 0

    def feed(self, output: str) -> None:
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|.|\n", output):
            if part == "\x1b[H":
                self.row = self.column = 0
            elif part == "\x1b[K":
                self.cells[self.row][self.column :] = [" "] * (self.width - self.column)
            elif part == "\x1b[J":
                blank = [[" "] * self.width for _ in range(self.height)]
                self.cells[self.row :] = blank[self.row :]
            elif part == "\n":
                self.row, self.column = self.row + 1, 0
                assert self.row < self.height, "the screen scrolls"
            elif part == "\r":
                self.column = 0
            elif not part.startswith("\x1b"):
                assert self.column < self.width, "the line wraps"
                self.cells[self.row][self.column] = part
                self.column += 1

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.cells]


def terminal(width: int, height: int) -> Console:
    return Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)


def taken(console: Console) -> str:
    """What was written to the console since it was last asked."""
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    console.file.seek(0)
    console.file.truncate()
    return output


@pytest.mark.parametrize("sizes", [[(30, 10), (100, 30)], [(8, 4), (80, 24)], [(80, 24), (20, 5), (81, 24)], [(1, 1)]])
@pytest.mark.parametrize("lines", [1, 3, 10, 200])
def test_whatever_a_resize_left_on_the_screen_is_overdrawn(sizes: list[tuple[int, int]], lines: int) -> None:
    console = terminal(*sizes[0])
    text = [f"{'x' * (number % 90)}{number}" for number in range(lines)]
    with FullScreen(console, lambda: Text("\n".join(text), no_wrap=True, overflow="crop"), 0) as display:
        for width, height in sizes:
            console.size = (width, height)
            taken(console)
            display.resized()
            shown = Screen(width, height, "#")
            shown.feed(taken(console))
            expected = [line[:width] for line in text[:height]]
            assert shown.lines == expected + [""] * (height - len(expected))


def test_the_first_screen_is_left_alone() -> None:
    console = terminal(80, 24)
    with FullScreen(console, lambda: "picture", 0):
        console.print("meanwhile")
        print("a warning", file=sys.stderr)
        console.print("[red]later[/]")
    output = taken(console)
    assert output.index(HIDE) < output.index("picture")
    assert output.startswith((HIDE + ENTER, ENTER))
    drawn, _, left = output.rpartition(LEAVE)
    assert "meanwhile" not in drawn
    assert left == f"meanwhile\na warning\nlater\n{SHOW}"


def test_a_last_view_can_be_kept() -> None:
    console = terminal(80, 24)
    display = FullScreen(console, lambda: "picture", 0)
    display.start()
    display.stop(keep=True)
    assert taken(console).rpartition(LEAVE)[2] == f"{SHOW}picture\n"


def test_what_is_printed_appears_above_the_bottom() -> None:
    console = terminal(80, 24)
    with Bottom(console, lambda: "one\ntwo", 0):
        taken(console)
        console.print("meanwhile")
        assert taken(console) == "\r\x1b[2K\x1b[1A\x1b[2Kmeanwhile\none\ntwo\r"
    assert taken(console) == f"\r\x1b[2K\x1b[1A\x1b[2K{SHOW}"


def test_lines_that_a_narrower_terminal_wrapped_are_erased() -> None:
    console = terminal(100, 24)
    with Bottom(console, lambda: Text(f"{'x' * 90}\nshort"), 0) as display:
        console.width = 40
        taken(console)
        display.resized()
        assert taken(console).startswith("\r\x1b[J\x1b[2K" + "\x1b[1A\x1b[2K" * 3 + "x")


@pytest.mark.parametrize("kind", [Bottom, FullScreen])
def test_a_stopped_process_shows_nothing(kind: type[Bottom | FullScreen]) -> None:
    console = terminal(80, 24)
    with kind(console, lambda: "picture", 0) as display:
        display.hide()
        hidden = taken(console)
        assert hidden.endswith(SHOW)
        display.refresh()
        display.resized()
        assert taken(console) == ""
        console.print("message")
        assert taken(console) == "message\n"
        display.show()
        shown = taken(console)
        assert shown.startswith(HIDE)
        assert "picture" in shown
        assert "\x1b[1A" not in shown, "what is above is not ours"
        display.hide()
        taken(console)
    assert taken(console) == ""


@pytest.mark.parametrize("kind", [Bottom, FullScreen])
def test_nothing_is_drawn_where_there_is_no_terminal(kind: type[Bottom | FullScreen]) -> None:
    console = Console(file=io.StringIO())
    before = sys.stderr
    with kind(console, lambda: "picture") as display:
        display.refresh()
        assert sys.stderr is before
    assert taken(console) == ""


SCRIPT = """
import sys, time
from rich.console import Console
from specctl.terminal.display import Bottom, FullScreen
try:
    with {kind}(Console(stderr=True), lambda: "the picture"):
        time.sleep(60)
finally:
    print("the end", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["Bottom", "FullScreen"])
def test_a_shell_stops_it_and_continues_it(tmp_path: Path, kind: str) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(kind=kind), encoding="utf-8")
    environment = dict(os.environ) | {"TERM": "xterm", "PS1": "shell> ", "PYTHONUNBUFFERED": "1"}
    options = ["--norc", "--noprofile", "--noediting", "-i"]
    child = pexpect.spawn("bash", options, env=environment, dimensions=(24, 80), encoding="utf-8", timeout=60)
    child.expect_exact("shell> ")
    child.sendline(f"{sys.executable} {script}")
    child.expect_exact("the picture")
    child.send("\x1a")
    child.expect("Stopped")
    assert SHOW in child.before
    assert (LEAVE in child.before) is (kind == "FullScreen")
    child.expect_exact("shell> ")
    child.sendline("bg")
    child.expect_exact("shell> ")
    child.sendline("echo quiet; sleep 0.3; echo still")
    child.expect("quiet\r\n")
    child.expect("still\r\n")
    assert child.before == "", "a background job draws nothing"
    child.sendline("fg")
    child.expect_exact("the picture")
    assert HIDE in child.before
    child.sendintr()
    child.expect_exact("the end")
    assert child.before.rindex(SHOW) > child.before.rfind("the picture")
    child.expect_exact("shell> ")
    child.sendline("exit")
    child.expect(pexpect.EOF)
    child.close()


def test_without_a_shell_that_could_continue_it_nothing_stops(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(kind="FullScreen"), encoding="utf-8")
    child = pexpect.spawn(sys.executable, [str(script)], env=dict(os.environ) | {"TERM": "xterm"}, encoding="utf-8")
    child.expect_exact("the picture")
    child.send("\x1a")
    child.expect_exact("the picture")
    child.sendintr()
    child.expect_exact("the end")
    child.expect(pexpect.EOF)
    child.close()


def test_the_cursor_of_a_bar_does_not_wait_behind_a_full_line() -> None:
    """The terminal's echo of ^C would then take a row of its own, which nobody erases."""
    console = terminal(40, 24)
    with TerminalProgress(console).counting("things", 3):
        assert taken(console).endswith("\r")


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
