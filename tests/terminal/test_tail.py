import unicodedata
from collections.abc import Iterable
from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment

from specctl.printable import one_line
from specctl.terminal.live import KEPT_LINES, Origin, Piece, TextTail, printable

HOSTILE = st.text(st.characters() | st.sampled_from("\x1b\x9b\r\n\t \u200d\u202e\u0301\ufe0f世🚢"), max_size=60)


def console() -> Console:
    return Console(file=StringIO(), width=80, height=24, force_terminal=True, color_system="standard")


def plain(lines: Iterable[list[Segment]]) -> list[str]:
    return ["".join(segment.text for segment in line) for line in lines]


@given(HOSTILE)
def test_printable_text_contains_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert all(char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in shown)
    shown.encode()


def test_printable_keeps_words_and_shows_escapes() -> None:
    assert printable("日本 a\tb\r\n\x1b[2J\x9b5n\ud800") == "日本 a    b\n␛[2J�5n�"
    assert one_line("a\nb") == "a b"


@settings(deadline=None)
@given(st.lists(HOSTILE, max_size=8), st.integers(2, 40), st.integers(1, 12))
def test_lines_have_the_asked_size(texts: list[str], width: int, rows: int) -> None:
    tail = TextTail("prompt ")
    tail.append(console(), [Piece(text, Origin.ACCEPTED) for text in texts])
    lines = plain(tail.lines(console(), width, rows))
    assert 1 <= len(lines) <= rows
    assert {cell_len(line) for line in lines} == {width}


@pytest.mark.parametrize("width", [7, 12, 40])
def test_text_laid_out_as_it_grows_reads_like_text_laid_out_at_once(width: int) -> None:
    text = "The quick brown fox, antidisestablishmentarianism and\n  世界世界世界世界 jump  over it " * 3
    growing, whole = TextTail(""), TextTail("")
    growing.lines(console(), width, 1)
    for char in text:
        growing.append(console(), [Piece(char, Origin.BONUS)])
    whole.append(console(), [Piece(text, Origin.BONUS)])
    grown = plain(growing.lines(console(), width, 200))
    assert grown == plain(whole.lines(console(), width, 200))
    assert "".join("".join(grown).split()) == "".join(text.split())


def test_words_stay_whole_and_parted() -> None:
    tail = TextTail("")
    tail.lines(console(), 10, 1)
    tail.append(console(), [Piece(text, Origin.ACCEPTED) for text in ("one two ", "th", "ree ", "four")])
    assert plain(tail.lines(console(), 10, 5)) == ["one two   ", "three four"]


def test_a_line_never_moves_once_finished() -> None:
    tail = TextTail("")
    seen: list[str] = []
    for _ in range(40):
        tail.append(console(), [Piece("several words more ", Origin.ACCEPTED)])
        finished = plain(tail.lines(console(), 23, KEPT_LINES))[:-1]
        assert finished[: len(seen)] == seen
        seen = finished
    assert len(seen) > 20


def test_a_new_width_lays_the_text_out_again() -> None:
    tail = TextTail("one two three")
    assert plain(tail.lines(console(), 20, 5)) == ["one two three       "]
    assert plain(tail.lines(console(), 5, 5)) == ["one  ", "two  ", "three"]


def test_the_newest_text_is_what_remains_of_a_long_one() -> None:
    tail = TextTail("start ")
    tail.lines(console(), 20, 4)
    for number in range(20_000):
        tail.append(console(), [Piece(f"word{number}\n", Origin.ACCEPTED)])
    assert [line.strip() for line in plain(tail.lines(console(), 20, 4))] == ["word19997", "word19998", "word19999", ""]
    assert len(tail.lines(console(), 20, 10**6)) <= KEPT_LINES + 1
    assert len(tail.lines(console(), 21, 10**6)) <= KEPT_LINES + 1


def test_zero_width_characters_do_not_pile_up_on_one_line() -> None:
    tail = TextTail("")
    tail.append(console(), [Piece("\N{COMBINING ACUTE ACCENT}" * 5000, Origin.ACCEPTED)])
    assert max(len(line) for line in plain(tail.lines(console(), 20, 300))) <= 4 * 20 + 20


def test_each_origin_has_its_own_style() -> None:
    tail = TextTail("prompt")
    tail.append(console(), [Piece(origin.value, origin) for origin in Origin])
    (line,) = tail.lines(console(), 60, 3)
    styles = {segment.text: str(segment.style) for segment in line if segment.text.strip()}
    assert list(styles) == ["prompt", "accepted", "copied", "correction", "bonus"]
    assert len(set(styles.values())) == 5
