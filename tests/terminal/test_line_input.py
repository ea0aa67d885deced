"""Lines that go on in the next, and lines asked for where there is no line editing."""

import io
import sys

import pytest

from specctl.terminal.line_input import LineInput, joined


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], []),
        (["a", "b"], ["a", "b"]),
        (["a\\", "b", "c"], ["a\nb", "c"]),
        (["a\\", "\\", "b"], ["a\n\nb"]),
        (["a\\"], ["a"]),
        (["\\ a"], ["\\ a"]),
    ],
)
def test_a_backslash_at_the_end_joins(lines: list[str], found: list[str]) -> None:
    assert list(joined(lines)) == found


def test_questions_go_to_standard_error_where_standard_output_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\\\ntwo\nthree"))
    lines = LineInput(["/help"])
    assert [lines.ask(), lines.ask()] == ["one\ntwo", "three"]
    with pytest.raises(EOFError):
        lines.ask()
    asked = capsys.readouterr()
    assert (asked.out, asked.err) == ("", "> . > > ")
