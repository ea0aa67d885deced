"""Progress of long work: lines now and then, and what is reported after an interrupt."""

import io
import re
from threading import Event

import pytest
from rich.console import Console

from specctl.terminal import progress
from specctl.terminal.progress import INTERVAL, PATIENCE, SHARE, Count, ProgressLines, TerminalProgress, resumable
from tests.support.hostile import HOSTILE, commands


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "monotonic", found)
    return found


def test_a_count_tells_speed_and_time_left(clock: Clock) -> None:
    count = Count("records", 12, done=2, began=clock())
    assert str(count) == "2 of 12 records"
    clock.now += 20
    count.advance(50)
    count.advance(150)
    assert str(count) == "4 of 12 records, 10.0 tokens/s, 0:01:20 left"


def test_a_count_without_an_end_or_tokens_tells_neither(clock: Clock) -> None:
    count = Count("records", None, began=clock())
    clock.now += 20
    count.advance()
    assert str(count) == "1 record"
    assert str(Count("records", 1, began=clock())) == "0 of 1 record"
    assert str(Count("records", 2, done=1, began=clock())) == "1 of 2 records"


def test_lines_become_rarer(clock: Clock) -> None:
    stream = io.StringIO()
    lines = ProgressLines(Console(file=stream))
    assert lines.due == clock.now + PATIENCE
    clock.now += PATIENCE
    lines.write(HOSTILE)
    assert lines.due == clock.now + INTERVAL
    clock.now += 100 * SHARE
    lines.write("more")
    assert lines.due == pytest.approx(clock.now + 100, abs=1)
    first, second = stream.getvalue().splitlines()
    assert first.startswith("progress: 0:00:10 elapsed, ")
    assert commands(first) == set()
    assert second == "progress: 1:23:30 elapsed, more"


class Log(io.StringIO):
    """A log that tells when it gets its first line."""

    def __init__(self) -> None:
        super().__init__()
        self.written = Event()

    def flush(self) -> None:
        if "\n" in self.getvalue():
            self.written.set()


def test_a_line_comes_while_the_work_goes_on() -> None:
    log = Log()
    with TerminalProgress(Console(file=log), shown=True).counting("prompts", 3) as advance:
        advance(7)
        assert log.written.wait(30)
    assert log.getvalue().startswith("progress: 0:00:00 elapsed, ")
    assert "of 3 prompts" in log.getvalue()


def test_a_line_says_what_is_loaded() -> None:
    log = Log()
    with TerminalProgress(Console(file=log), shown=True).doing("loading big"):
        assert log.written.wait(30)
    assert log.getvalue() == "progress: 0:00:00 elapsed, loading big\n"


@pytest.mark.parametrize(
    ("console", "shown"),
    [
        (Console(file=io.StringIO()), None),  # not yet
        (Console(file=io.StringIO()), False),
        (Console(file=io.StringIO(), quiet=True), True),
        (Console(file=io.StringIO(), force_terminal=True), False),
    ],
)
def test_nothing_is_written_where_nothing_is_wanted(console: Console, shown: bool | None) -> None:
    with TerminalProgress(console, shown).counting("prompts", 3) as advance:
        advance()
    with TerminalProgress(console, shown).doing("loading"):
        pass
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""


def test_both_times_of_a_bar_are_labelled() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with TerminalProgress(console).counting("records", 4, 1) as advance:
        advance(8)
        console.print()
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.getvalue())
    assert re.search(r"2/4 0:00:0\d elapsed 0:00:0\d left", shown), shown


@pytest.mark.parametrize(
    ("path", "said"), [("out.jsonl", "note: interrupted; finished work is in out.jsonl; go on\n"), (None, "")]
)
def test_an_interrupt_says_where_finished_work_is_and_goes_on_up(path, said):
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt), resumable(Console(file=stream), path, "go on"):
        raise KeyboardInterrupt
    assert stream.getvalue() == said


def test_nothing_is_said_without_an_interrupt():
    stream = io.StringIO()
    with pytest.raises(ValueError, match="other"), resumable(Console(file=stream), "out.jsonl", "go on"):
        raise ValueError("other")
    with resumable(Console(file=stream), "out.jsonl", "go on"):
        pass
    assert stream.getvalue() == ""
