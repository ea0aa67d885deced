"""Completions on a terminal: lines end between words, whatever pieces the text comes in."""

import io
import random

import pytest

from specctl.terminal.output import WordWrap, wrapped
from tests.support.hostile import HOSTILE, Terminal, commands

TEXT = "Tom had a red kite. He took it to the big park,\nand  it flew over a very-long-word tree.\n\n  The end"


def shown(text: str, width: int, monkeypatch: pytest.MonkeyPatch, seed: int | None = None) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    terminal, place = Terminal(), 0
    sink = WordWrap(terminal)
    draw = random.Random(seed)
    while place < len(text):
        step = len(text) if seed is None else draw.randint(1, 7)
        assert sink.write(text[place : place + step]) == len(text[place : place + step])
        sink.flush()
        place += step
    sink.end()
    return terminal.getvalue()


@pytest.mark.parametrize("width", [20, 23, 31, 40, 80])
def test_lines_end_between_words_and_nothing_else_changes(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    laid = shown(TEXT, width, monkeypatch)
    assert max(map(len, laid.split("\n"))) <= width
    assert laid.split() == TEXT.split()
    assert laid.endswith("\n\n  The end")
    if width == 80:
        assert laid == TEXT


@pytest.mark.parametrize("seed", range(12))
def test_the_pieces_of_a_text_make_no_difference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(TEXT, 24, monkeypatch, seed) == shown(TEXT, 24, monkeypatch)


def test_a_line_that_is_full_to_the_last_cell_is_not_broken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown("aaaa bbbb cccc ddddd eeee", 20, monkeypatch) == "aaaa bbbb cccc ddddd\neeee"
    assert shown("aaaa bbbb cccc dddddd eeee", 20, monkeypatch) == "aaaa bbbb cccc\ndddddd eeee"


def test_wide_characters_count_twice_and_a_word_too_long_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    word = "\u51e7" * 7
    assert shown(f"kite {word} x", 20, monkeypatch) == f"kite {word}\nx"
    assert shown("kite " + "a" * 50 + " b", 20, monkeypatch) == "kite " + "a" * 50 + " b"


def test_the_last_word_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    sink = WordWrap(terminal)
    sink.write("one two thr")
    assert terminal.getvalue() == "one two"
    sink.write("ee ")
    assert terminal.getvalue() == "one two three"
    sink.end()
    assert terminal.getvalue() == "one two three "


def test_a_terminal_gets_no_commands_and_a_pipe_the_text_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands(shown(HOSTILE, 30, monkeypatch)) == set()
    pipe = io.StringIO()
    assert wrapped(pipe) is pipe
    assert isinstance(wrapped(Terminal()), WordWrap)
