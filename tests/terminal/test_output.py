import io
import json
import random
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from specctl.commands.watching import show_prompt
from specctl.files import write_line
from specctl.jsonl import Record
from specctl.printable import harmless, one_line, printable
from specctl.records import DraftStep, ExtraToken, Round, StopReason
from specctl.reporting.console import print_tables
from specctl.reporting.table import Table
from specctl.terminal.output import WordWrap, print_message, wrapped, write_json, write_out, write_sentence, write_text
from specctl.terminal.progress import TerminalProgress, loading, note
from tests.support.hostile import HOSTILE, Terminal, commands


class Rigged:
    """Answers with a text of which every byte is a token and every token a round, as a model might."""

    all_special_ids = ()

    def __init__(self, text, ends=frozenset()):
        self.bytes, self.added_tokens_decoder = text.encode(), {}
        self.session = SimpleNamespace(ends=ends)
        self.settings = SimpleNamespace(stop=[])
        self.prompts = SimpleNamespace(tokenizer=self)

    def get_vocab(self):
        return {}

    def decode(self, tokens, **_):
        return bytes(tokens).decode(errors="replace")

    def answer(self, _, on_round):
        for index, byte in enumerate(self.bytes):
            steps = (DraftStep(1, byte),)
            on_round(0, [], Round(index, steps, 1, None, ExtraToken.BONUS, StopReason.POLICY, 0.1))
        return (SimpleNamespace(text=self.bytes.decode()),)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_completion_is_cleaned_for_a_terminal_only(stream):
    """Each escape sequence comes in pieces of a character, or less."""
    sink = stream()
    show_prompt(Rigged(HOSTILE), Record(1, 1, {"prompt": "p"}), sink, None, None)
    assert sink.getvalue() == (harmless(HOSTILE) if stream is Terminal else HOSTILE) + "\n"
    assert not sink.isatty() or not commands(sink.getvalue())


def test_a_token_that_ends_the_text_is_not_written():
    sink = io.StringIO()
    rigged = Rigged("ab<", ends=frozenset(b"<"))
    rigged.answer = lambda record, on_round: Rigged.answer(rigged, record, on_round) and (SimpleNamespace(text="ab"),)
    show_prompt(rigged, Record(1, 1, {"prompt": "p"}), sink, None, None)
    assert sink.getvalue() == "ab\n"


def test_text_for_a_file_is_left_alone(monkeypatch):
    file, terminal = io.StringIO(), Terminal()
    write_text(file, HOSTILE)
    write_text(terminal, HOSTILE)
    assert file.getvalue() == HOSTILE
    assert commands(terminal.getvalue()) == set()
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stdout", stream)
        write_out(HOSTILE)
        assert stream.getvalue() == (harmless(HOSTILE) if stream.isatty() else HOSTILE) + "\n"


def test_a_json_line_stays_the_same_object_on_a_terminal():
    for stream in (io.StringIO(), Terminal()):
        write_line(stream, {HOSTILE: HOSTILE})
        assert json.loads(stream.getvalue()) == {HOSTILE: HOSTILE}
        assert bool(commands(stream.getvalue())) is not stream.isatty()


def test_a_json_document_stays_the_same_on_a_terminal(monkeypatch):
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stdout", stream)
        write_json(json.dumps([HOSTILE], ensure_ascii=False, indent=2))
        assert json.loads(stream.getvalue()) == [HOSTILE]
        assert bool(commands(stream.getvalue())) is not stream.isatty()


def test_nothing_is_written_to_a_closed_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    write_out("text")
    write_json("{}")


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_messages_are_clean_even_in_a_log(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setenv("NO_COLOR", "1")
    print_message(f"{HOSTILE}\nhint", "error", "1;31")
    assert sys.stderr.getvalue() == f"error: {printable(HOSTILE)}\nhint\n"


def on_terminal(width=300):
    return Console(file=Terminal(), force_terminal=True, width=width, color_system=None, _environ={"TERM": "xterm"})


def test_notices_are_literal():
    console = on_terminal()
    note(console, HOSTILE)
    TerminalProgress(console).say(HOSTILE)
    assert console.file.getvalue() == f"note: {printable(HOSTILE)}\n{printable(HOSTILE)}\n"


def test_labels_of_progress_are_literal():
    console = on_terminal()
    with loading(console, HOSTILE) as show:
        show(HOSTILE * 2)
    with TerminalProgress(console).counting(HOSTILE, 3) as advance:
        advance()
    shown = console.file.getvalue()
    assert one_line(HOSTILE) in shown
    assert not {"\x07", "\x9b", "\u202e"} & set(shown)
    assert "\x1b]" not in shown


@pytest.mark.parametrize("alarm", [True, False])
def test_tables_on_a_terminal_are_literal(alarm):
    console = on_terminal()
    print_tables(console, [Table(HOSTILE, (HOSTILE, HOSTILE), ((HOSTILE, HOSTILE),), note=HOSTILE, alarm=alarm)])
    shown = console.file.getvalue()
    assert commands(shown) <= {"\x1b"}  # the table's own style
    assert "\x1b]" not in shown
    assert shown.count("[red]x[/] [/] :smile:") == 6


def test_tables_in_a_pipe_are_as_they_are():
    console = Console(file=io.StringIO())
    print_tables(console, [Table("title", ("name",), (("a\x1b[31m",),))])
    assert console.file.getvalue() == "title\nname\na\x1b[31m\n"


def test_a_terminal_gets_messages_broken_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", Terminal())
    command = "  hf download " + "x" * 40 + " --exclude y"
    print_message(f"{'word ' * 20}\n{command}\nlast", "error", "1;31")
    lines = sys.stderr.getvalue().splitlines()
    assert lines[0].endswith("word word")
    assert all(set(line.split()) == {"word"} for line in lines[1:3])
    assert command in lines
    assert lines[-1] == "last"
    assert all(len(line) <= 40 for line in lines[1:] if line != command)


def test_a_pipe_gets_messages_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    print_message("word " * 20 + "end", "error")
    assert sys.stderr.getvalue() == "error: " + "word " * 20 + "end\n"


@pytest.mark.parametrize("width", [20, 40, 61, 62, 63, 80, 200])
def test_a_verdict_is_never_broken_within_a_number(monkeypatch, width):
    line = (
        "verdict: cost-optimal is fastest on eager: 1.67x (1.50 to 1.87), 1.03x (0.98 to 1.08, only 2 prompts) as fast "
        "as svip:threshold=0.54; all 12 runs gave the tokens of none"
    )
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    write_sentence(line)
    shown = sys.stdout.getvalue()
    assert "1.67x (1.50 to 1.87)" in shown
    assert "1.03x (0.98 to 1.08" in shown
    assert " ".join(shown.split()) == line
    assert max(map(len, shown.splitlines())) <= max(width, len("1.67x (1.50 to 1.87),"))


def test_a_verdict_in_a_pipe_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setenv("COLUMNS", "20")
    write_sentence("verdict: all runs gave the tokens of none")
    assert sys.stdout.getvalue() == "verdict: all runs gave the tokens of none\n"


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
