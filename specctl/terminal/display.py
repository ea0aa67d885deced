"""Drawings on a terminal that are updated during work and erased afterwards."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Event, RLock, Thread, current_thread, main_thread
from typing import Self, TextIO, cast

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.segment import ControlType, Segment, Segments


@contextmanager
def obeyed(drawn: "Display") -> Iterator[None]:
    """Hide a drawing before Ctrl-Z stops the process, and show it when the process continues in the foreground.

    Python runs signal handlers only in the main thread, between two bytecode instructions. A long forward pass would
    delay them, so a separate thread reads the signals as they arrive. Handlers can be set only in the main thread: this
    does nothing in other threads, or on a system without these signals.
    """
    if current_thread() is not main_thread() or not hasattr(signal, "SIGTSTP"):
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # A signal is reported only if it has a handler. If a parent ignores it, it stays ignored.
    watched = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
    handled = [number for number in watched if signal.getsignal(number) is not signal.SIG_IGN]
    earlier = {number: signal.signal(number, lambda *_: None) for number in handled}
    earlier_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = Thread(target=_obey, args=(reading, drawn), name="job control", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier_fd)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        os.close(writing)
        thread.join()
        os.close(reading)


def in_foreground(terminal: int) -> bool:
    """Whether this process may draw on the terminal of a file descriptor; a shell's background job may not."""
    if not hasattr(os, "tcgetpgrp"):
        return True
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # not this session's terminal, so there is no job control
        return True


def _obey(reading: int, drawn: "Display") -> None:
    while numbers := os.read(reading, 64):
        for number in numbers:
            if number == signal.SIGTSTP and _stoppable():
                drawn.hide()
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGCONT:
                drawn.show()
            elif number == signal.SIGWINCH:
                drawn.resized()


def _stoppable() -> bool:
    """Whether a shell could continue this process; there is none if the process is in the session leader's group."""
    with suppress(OSError):
        return os.getpgrp() != os.getsid(0)
    return False


REFRESHES_PER_SECOND = 12


class Display(RenderHook):
    """A drawing that lasts from start to stop; a context manager. See `Bottom` and `FullScreen`.

    It is erased before Ctrl-Z stops the process, and stays hidden while the process runs in the background. Nothing is
    drawn unless the console is a capable terminal.

    Args:
        console: draws; should write to standard error.
        view: makes a new drawing for each refresh.
        refreshes_per_second: how often a thread draws; 0 to draw on `refresh` only.
    """

    def __init__(
        self, console: Console, view: Callable[[], RenderableType], refreshes_per_second: float = REFRESHES_PER_SECOND
    ) -> None:
        self.started = False
        self._console, self._view = console, view
        self._interval = 1 / refreshes_per_second if refreshes_per_second else None
        self._visible = self._stopped = False
        self._lock = RLock()
        self._ended = Event()
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Draw for the first time."""
        if self.started or not self._console.is_interactive:
            return
        self.started = True
        if not isinstance(sys.stderr, FileProxy):
            self._undo.callback(setattr, sys, "stderr", sys.stderr)
            sys.stderr = cast(TextIO, FileProxy(self._console, sys.stderr))
        self._console.push_render_hook(self)
        self._undo.callback(self._console.pop_render_hook)
        self._undo.enter_context(obeyed(self))
        self.refresh()
        if self._interval is not None:
            Thread(target=self._keep_refreshing, args=(self._interval,), name="display", daemon=True).start()

    def stop(self, *, keep: bool = False) -> None:
        """Stop drawing and erase.

        Args:
            keep: print the present state in full and leave it on the screen.
        """
        self._ended.set()
        with self._lock:
            if not self.started:
                return
            self._vanish()
            self.started = False
            if keep:
                self._console.print(self._view())
        # Not under the lock, because this joins a thread that may wait for the lock.
        self._undo.close()

    def refresh(self) -> None:
        """Replace the drawing by the present state."""
        with self._lock:
            if not self.started or self._stopped or not (self._visible or self._in_foreground()):
                return
            if not self._visible:
                self._console.show_cursor(False)
                self.appear()
                self._visible = True
            self._console.print(Control())

    def hide(self) -> None:
        """Erase the drawing and restore the terminal; like `show` and `resized`, called from another thread."""
        with self._lock:
            self._stopped = True
            self._vanish()

    def show(self) -> None:
        """Draw again at the cursor; the old drawing may be anywhere."""
        with self._lock:
            self._stopped = self._visible = False
            self.refresh()

    def resized(self) -> None:
        """The terminal's size may have changed."""
        self.refresh()

    def appear(self) -> None:
        """Prepare the terminal for the first drawing."""
        raise NotImplementedError

    def vanish(self) -> None:
        """Erase the drawing."""
        raise NotImplementedError

    def draw(self, printed: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """The output that draws, combined with this output of other parts of the program."""
        raise NotImplementedError

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Called by rich with everything printed on the console."""
        with self._lock:
            return self.draw(renderables) if self._visible else renderables

    def _vanish(self) -> None:
        if self._visible:
            self._visible = False  # output from here on must not draw
            self.vanish()
            self._console.show_cursor(True)

    def _keep_refreshing(self, interval: float) -> None:
        while not self._ended.wait(interval):
            self.refresh()

    def _in_foreground(self) -> bool:
        try:
            return in_foreground(self._console.file.fileno())
        except (OSError, ValueError):  # drawn into memory
            return True


class Bottom(Display):
    """A few lines below all other output, which appears above them.

    A terminal that gets narrower wraps lines already drawn; they are still erased. Lines should be few and narrower
    than the terminal, because lines that leave the screen cannot be erased.
    """

    def appear(self) -> None:
        self._lines = _Lines(self._view)

    def vanish(self) -> None:
        self._console.print(self._erasing())

    def draw(self, printed: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [self._erasing(), *printed, self._lines]

    def _erasing(self) -> Segments:
        width = max(1, self._console.width)
        climb = sum(max(1, -(-cells // width)) for cells in self._lines.widths[:-1])
        # Row by row, because tmux saves a screen erased from its top to its history.
        below = "\x1b[J" if max(self._lines.widths, default=0) > width else ""
        return _control("\r" + below + "\x1b[2K" + "\x1b[1A\x1b[2K" * climb)


class _Lines:
    """The lines of a `Bottom`, and the width of each in cells once they are drawn."""

    def __init__(self, view: Callable[[], RenderableType]) -> None:
        self.widths: list[int] = []
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._view(), options, pad=False)[: options.size.height]
        self.widths = [Segment.get_line_length(line) for line in lines]
        for number, line in enumerate(lines):
            if number:
                yield Segment.line()
            yield from line
        # Echoed input such as ^C then begins in the first cell and takes no extra row.
        yield _control("\r")


class FullScreen(Display):
    """A drawing on the terminal's second screen, which most editors use too.

    The first screen keeps the output so far. Each drawing covers every cell of the second screen, also after a resize.
    Other output appears on the first screen at the end.
    """

    def appear(self) -> None:
        self._held: list[ConsoleRenderable] = []
        self._console.set_alt_screen(True)

    def vanish(self) -> None:
        self._console.set_alt_screen(False)
        if self._held:
            self._console.print(*self._held, sep="\n")

    def draw(self, printed: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        self._held += (item for item in printed if not isinstance(item, Control))
        return [_Screen(self._view)]


class _Screen:
    """Every cell of the screen, from its upper left corner."""

    def __init__(self, view: Callable[[], RenderableType]) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.size
        lines = console.render_lines(self._view(), options, pad=False)[:height]
        # Lines must not wrap and push others out if the terminal has just become narrower.
        yield _control("\x1b[?7l\x1b[H")
        for number, line in enumerate(lines):
            if number:
                yield Segment.line()
            yield from line
            if Segment.get_line_length(line) < width:  # after a full line the cursor is still on its last cell
                yield _control("\x1b[K")
        yield _control("\r\n\x1b[J\x1b[?7h" if len(lines) < height else "\x1b[?7h")


def _control(codes: str) -> Segments:
    return Segments([Segment(codes, None, [(ControlType.CARRIAGE_RETURN,)])])
