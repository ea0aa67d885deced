"""The live view of several texts: the oldest as a panel, a line for each other one."""

from contextlib import nullcontext
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from specctl.terminal.batch_view import BatchView, ShownText
from specctl.terminal.tail import Origin, Piece


def seen(view: BatchView) -> list[str]:
    console = Console(file=StringIO(), width=80, height=24, force_terminal=True, color_system=None)
    console.print(view)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 23
    return list(lines)


def test_the_oldest_is_a_panel_and_others_have_a_line_each() -> None:
    view = BatchView(Console(file=StringIO()), "big + small", "svip", 99)

    def write(text: ShownText, said: str, tokens: int) -> None:
        text.panel.add = lambda *_: None  # type: ignore[method-assign]
        round_: Any = SimpleNamespace(emitted=range(tokens))
        text.on_round(round_, [Piece(said, Origin.ACCEPTED)])

    assert "waiting for records" in seen(view)[0]
    with view.text("a", "Once") as first:
        with view.text("b", "Twice") as second, view.text("c", "Thrice") as third:
            write(first, " upon", 2)
            write(second, " x\ny" * 60 + " the end", 7)
            write(third, " more", 1)
            shown = seen(view)
            assert "big + small · svip" in shown[0]
            assert any("Once" in line for line in shown)
            (others,) = [number for number, line in enumerate(shown) if "3 at once" in line]
            assert "tokens/s of all" in shown[others]
            assert [line.split()[:3] for line in shown[others + 1 :]] == [["b", "7", "tokens"], ["c", "1", "tokens"]]
            assert shown[others + 1].endswith("the end")
        assert view.tokens == 10
        assert not any(" 7 tokens" in line for line in seen(view)), "those that ended are gone"
    assert "waiting for records" in seen(view)[0]


def test_tokens_of_a_text_that_begins_again_count_once() -> None:
    view = BatchView(Console(file=StringIO()), "big", "svip", 99)
    for error in (GeneratorExit, None):
        with pytest.raises(GeneratorExit) if error else nullcontext(), view.text("a", "Once") as text:
            text.panel.add = lambda *_: None  # type: ignore[method-assign]
            text.on_round(SimpleNamespace(emitted=range(5)), [])  # type: ignore[arg-type]
            if error:
                raise error
    assert view.tokens == 5


def test_more_texts_than_rows_of_the_screen_are_counted() -> None:
    view = BatchView(Console(file=StringIO()), "big", "svip", 99)
    contexts = [view.text(str(number), "Once") for number in range(30)]
    for context in contexts:
        context.__enter__()
    assert any("30 at once" in line and "19 not shown" in line for line in seen(view))
    for context in contexts:
        context.__exit__(None, None, None)
