import os
import re
import sys
import unicodedata
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pexpect
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment

from specctl.metrics import Metrics
from specctl.printable import one_line
from specctl.records import Completion, DraftStep, ExtraToken, FinishReason, Round, StopReason
from specctl.terminal.live import (
    COLUMN_WIDTH,
    KEPT_LINES,
    LiveView,
    Origin,
    Piece,
    ShownText,
    TextTail,
    bar,
    printable,
    recall,
    strip,
    tree,
)
from specctl.terminal.output import WordWrap
from specctl.terminal.progress import loading
from tests.support.hostile import Terminal

SGR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SIZES = [(80, 24), (200, 50), (40, 24), (80, 10), (40, 10), (20, 6), (10, 4), (3, 2), (1, 1)]
HOSTILE = "木星の衛星🚢\tx\x1b[2J\x1b]0;evil\x07\r\n\x9b31m\u202e\ud800"


def terminal(width: int, height: int, **more) -> Console:
    return Console(
        width=width, height=height, file=StringIO(), force_terminal=True, color_system="standard", record=True, **more
    )


def round_of(index: int, accepted: int, drafted: int, threshold: float | None = 0.4) -> Round:
    steps = tuple(DraftStep(position + 1, 7) for position in range(drafted))
    kind = ExtraToken.BONUS if accepted == drafted else ExtraToken.CORRECTION
    return Round(index, steps, accepted, 9, kind, StopReason.POLICY, threshold, total_seconds=0.25)


ROUNDS = [round_of(index, index % 5, 4 + index % 2) for index in range(30)]


def panel(rounds: list[Round] = ROUNDS, text: str = "some words ", prompt: str = "Once upon a time") -> ShownText:
    drawn = ShownText(LiveView(Console(file=StringIO()), "big + small", "adaedl", 512), "", prompt)
    for round_ in rounds:
        drawn.add(round_, [Piece(text * round_.accepted, Origin.ACCEPTED), Piece(text, Origin.CORRECTION)])
    return drawn


def completion(rounds: list[Round]) -> Completion:
    tokens = tuple(token for round_ in rounds for token in round_.emitted)
    return Completion((1,) * 5, 0, tokens, "THE WHOLE TEXT", FinishReason.LENGTH, tuple(rounds), 0.5, 8.0, 0.75)


def drawn_lines(console: Console, drawn: ShownText) -> list[str]:
    with console.capture() as capture:
        console.print(drawn, end="")
    output = capture.get()
    assert "\x1b" not in SGR.sub("", output)
    return SGR.sub("", output).splitlines()


@pytest.mark.parametrize("text", ["some words ", HOSTILE, "x" * 300, "\n"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_panel_fits_every_terminal(width: int, height: int, text: str) -> None:
    drawn = panel(text=text, prompt=f"prompt {text}")
    lines = drawn_lines(terminal(width, height), drawn)
    assert len(lines) <= max(1, height - 1)
    assert max(map(cell_len, lines)) <= max(2, width)


def test_before_the_first_round_the_prompt_is_shown() -> None:
    page = "\n".join(drawn_lines(terminal(80, 24), panel([])))
    assert "Once upon a time" in page
    assert "0 of 512" in page
    assert "threshold" not in page


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 24)])
def test_the_panel_shows_the_figures_of_the_rounds(width: int, height: int) -> None:
    metrics = Metrics()
    for round_ in ROUNDS:
        metrics.add_round(round_)
    page = " ".join("\n".join(drawn_lines(terminal(width, height), panel())).split())
    for figure in (
        f"tokens {metrics.generated_tokens} of 512",
        f"tokens/s {metrics.tokens_per_second:.1f}",
        f"acceptance rate {metrics.acceptance_rate:.1%}",
        f"mean acceptance length {metrics.mean_acceptance_length:.2f}",
        f"verification rate {metrics.verification_rate:.3f}",
        f"discard rate {metrics.discard_rate:.3f}",
        "threshold 0.400",
        "30 ████▒ 4/5 policy",
        "accepted · correction · bonus",
        "big + small · adaedl",
    ):
        assert figure in page


def test_without_drafts_there_is_no_acceptance_rate() -> None:
    page = " ".join("\n".join(drawn_lines(terminal(80, 24), panel([round_of(0, 0, 0)]))).split())
    assert "acceptance rate - " in page


def nested(index: int) -> Round:
    inner = round_of(0, 2, 3, threshold=0.7), round_of(1, 0, 1, threshold=0.8)
    return replace(round_of(index, 3, 4, threshold=0.4), inner=inner)


@pytest.mark.parametrize(("width", "height"), [*SIZES, (80, 19)])
def test_a_hierarchy_fits_every_terminal(width: int, height: int) -> None:
    lines = drawn_lines(terminal(width, height), panel([nested(index) for index in range(30)]))
    assert len(lines) <= max(1, height - 1)
    assert max(map(cell_len, lines)) <= max(2, width)


def test_a_hierarchy_shows_both_levels() -> None:
    """The last round drafted nothing; the lower level's threshold is shown nevertheless."""
    page = " ".join("\n".join(drawn_lines(terminal(80, 30), panel([nested(0), nested(1), round_of(2, 0, 0)]))).split())
    for figure in (
        "draft passes/token 0.444",
        "draft.draft passes/token 0.889",
        "draft redundancy 0.250",
        "draft.draft redundancy 0.500",
        "draft threshold 0.400",
        "draft.draft threshold 0.800",
        "2 ███ ▒ 3/4 policy",
    ):
        assert figure in page


@pytest.mark.parametrize(("width", "beside"), [(200, True), (80, True), (40, False)])
def test_figures_are_next_to_the_strip_where_both_fit(width: int, beside: bool) -> None:
    lines = drawn_lines(terminal(width, 30), panel())
    assert any("rate" in line and "policy" in line for line in lines) is beside


def test_a_long_text_shows_its_end() -> None:
    drawn = panel(text="filler " * 5)
    drawn.add(round_of(30, 0, 1), [Piece("THE END", Origin.BONUS)])
    page = "\n".join(drawn_lines(terminal(80, 24), drawn))
    assert "THE END" in page
    assert "Once upon a time" not in page


def test_markup_in_titles_and_text_is_shown_as_it_is() -> None:
    view = LiveView(Console(file=StringIO()), "[red]title\x1b[0m[/red]", "[bold]p", 8)
    drawn = ShownText(view, "", "[blink]prompt")
    page = "\n".join(drawn_lines(terminal(80, 24), drawn))
    assert "[red]title␛[0m[/red] · [bold]p" in page
    assert "[blink]prompt" in page


def test_without_colour_origins_still_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = terminal(80, 24)
    drawn = panel([])
    drawn.add(round_of(0, 1, 1), [Piece(origin.value, origin) for origin in Origin])
    with console.capture() as capture:
        console.print(drawn)
    codes = {code for sequence in SGR.findall(capture.get()) for code in sequence[2:-1].split(";")}
    assert codes <= {"0", "1", "2", "3", "4"}
    assert "\x1b[3mcopied" in capture.get()
    assert "\x1b[4mcorrection" in capture.get()
    assert "\x1b[1mbonus" in capture.get()


@pytest.mark.parametrize("width", [80, 200, 40])
def test_finish_leaves_only_a_summary(width: int) -> None:
    console = terminal(width, 24)
    finished = completion(ROUNDS)
    with LiveView(console, "big + small", "adaedl", 512).text("", "Once upon a time") as view:
        for round_ in ROUNDS:
            view.on_round(round_, [Piece("THE WHOLE TEXT", Origin.ACCEPTED)])
        console.file.truncate(0)
    view.finish(finished)
    after = console.file.getvalue()
    metrics = Metrics.of([finished])
    lines = CONTROL.sub("", after[after.rindex("\x1b[?1049l") :]).splitlines()
    summary = " ".join(lines)
    assert max(map(cell_len, lines)) <= width
    assert f"tokens {metrics.generated_tokens} of 512" in summary
    assert f"tokens/s {metrics.tokens_per_second:.1f}" in summary
    assert f"acceptance rate {metrics.acceptance_rate:.1%}" in summary
    assert "drafting stopped by policy 30" in summary
    assert "first tokens after 0.75 s" in summary
    assert "total 8.00 s" in summary
    assert "finished length" in summary
    assert "THE WHOLE TEXT" not in summary


def test_after_an_interrupt_the_figures_are_those_until_then() -> None:
    console = terminal(80, 24)
    with LiveView(console, "big + small", "adaedl", 512).text("", "Once") as view:
        for round_ in ROUNDS:
            view.on_round(round_, [Piece("text", Origin.ACCEPTED)])
    view.finish(None)
    lines = CONTROL.sub("", console.file.getvalue().rpartition("\x1b[?1049l")[2])
    metrics = Metrics()
    for round_ in ROUNDS:
        metrics.add_round(round_)
    assert f"tokens {metrics.generated_tokens} of 512" in lines
    assert "finished interrupted" in lines


def test_the_end_of_a_long_prompt_stands_before_its_completion() -> None:
    console = terminal(80, 24)
    recall(console, "a" * 900 + " \x1b[31mthe end", WordWrap(Terminal()))
    shown = SGR.sub("", console.file.getvalue())
    assert shown.startswith("…aaa")
    assert " ".join(shown.split()).endswith("the end")
    assert "\x1b" not in shown
    assert len(shown) < 500


def test_an_error_in_the_block_takes_the_panel_away() -> None:
    console = terminal(80, 24)
    with pytest.raises(KeyboardInterrupt), LiveView(console, "t", "svip", 8).text("", "prompt"):
        raise KeyboardInterrupt
    output = console.file.getvalue()
    assert output.rindex("\x1b[?25h") > output.rindex("prompt")
    assert CONTROL.sub("", output[output.rindex("\x1b[?25h") :]).strip() == ""


def test_nothing_is_drawn_without_a_terminal() -> None:
    console = Console(file=StringIO(), width=80)
    with loading(console, "Loading"):
        pass
    with LiveView(console, "t", "svip", 8).text("", "prompt") as view:
        view.on_round(ROUNDS[0], [Piece("text", Origin.BONUS)])
    view.finish(completion(ROUNDS[:1]))
    assert console.file.getvalue() == ""


def test_a_dumb_terminal_gets_the_summary_alone() -> None:
    console = terminal(80, 24, _environ={"TERM": "dumb"})
    with LiveView(console, "t", "svip", 8).text("", "prompt") as view:
        view.on_round(ROUNDS[0], [Piece("text", Origin.BONUS)])
    view.finish(completion(ROUNDS[:1]))
    assert CONTROL.sub("", console.file.getvalue()).startswith("t · svip\ntokens 1 of 8")


@pytest.mark.parametrize("width", [80, 20])
def test_loading_shows_its_message_and_cleans_up(width: int) -> None:
    console = terminal(width, 24)
    with loading(console, "Loading [b]big\x1b[2J"):
        pass
    output = console.file.getvalue()
    assert "Loading" in output
    assert "\x1b[2J" not in output
    assert output.endswith("\r\x1b[2K\x1b[?25h")


def seen(view: LiveView) -> list[str]:
    console = Console(file=StringIO(), width=80, height=24, force_terminal=True, color_system=None)
    console.print(view)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 23
    return list(lines)


def test_the_oldest_is_a_panel_and_others_have_a_line_each() -> None:
    view = LiveView(Console(file=StringIO()), "big + small", "svip", 99)

    def write(text: ShownText, said: str, tokens: int) -> None:
        text.add = lambda *_: None  # type: ignore[method-assign]
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
    view = LiveView(Console(file=StringIO()), "big", "svip", 99)
    for error in (GeneratorExit, None):
        with pytest.raises(GeneratorExit) if error else nullcontext(), view.text("a", "Once") as text:
            text.add = lambda *_: None  # type: ignore[method-assign]
            text.on_round(SimpleNamespace(emitted=range(5)), [])  # type: ignore[arg-type]
            if error:
                raise error
    assert view.tokens == 5


def test_more_texts_than_rows_of_the_screen_are_counted() -> None:
    view = LiveView(Console(file=StringIO()), "big", "svip", 99)
    contexts = [view.text(str(number), "Once") for number in range(30)]
    for context in contexts:
        context.__enter__()
    assert any("30 at once" in line and "19 not shown" in line for line in seen(view))
    for context in contexts:
        context.__exit__(None, None, None)


SCRIPT = """
import time
from rich.console import Console
from specctl.records import Completion, DraftStep, ExtraToken, FinishReason, Round, StopReason
from specctl.terminal.live import LiveView, Origin, Piece
from specctl.terminal.progress import loading

console = Console(stderr=True)
rounds = []
with loading(console, "Loading a model"):
    time.sleep(0.3)
with LiveView(console, "big + small", "svip", 99).text("", "Once") as view:
    narrow = 0
    while narrow < 5:
        narrow += console.width == 50
        steps = tuple(DraftStep(position + 1, 1) for position in range(4))
        rounds.append(Round(len(rounds), steps, 3, 9, ExtraToken.CORRECTION, StopReason.POLICY, 0.3, 0.1, 0.1, 0.2))
        pieces = [Piece(" upon a time \\x1b]0;evil\\x07", Origin.ACCEPTED), Piece("!", Origin.CORRECTION)]
        view.on_round(rounds[-1], pieces)
        time.sleep(0.1)
tokens = tuple(token for round_ in rounds for token in round_.emitted)
view.finish(Completion((1,), 0, tokens, "", FinishReason.STOP, tuple(rounds), 0.1, 2.0, 0.2))
print("the completion stands whole")
"""


@pytest.mark.slow
def test_in_a_pseudo_terminal_that_is_resized(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT, encoding="utf-8")
    settings = {"NO_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"}
    # Given explicitly: readline puts LINES and COLUMNS into the environment a child inherits, unseen by os.environ.
    environment = {name: value for name, value in os.environ.items() if name not in settings} | {"TERM": "xterm"}
    child = pexpect.spawn(
        sys.executable, [str(script)], dimensions=(24, 80), encoding="utf-8", timeout=60, env=environment
    )
    child.expect("Loading a model")
    child.expect("3/4")
    before = child.before
    child.setwinsize(16, 50)
    child.expect(pexpect.EOF)
    output = child.before
    child.close()
    assert child.exitstatus == 0

    assert any(cell_len(line) == 80 for line in CONTROL.sub("", before).splitlines())
    assert "\x1b]0" not in output
    panel_end = output.rindex("╰")
    last_frame = CONTROL.sub("", output[output.rindex("╭") : panel_end]).splitlines()
    assert len(last_frame) < 16
    assert {cell_len(line) for line in last_frame if line} == {50}
    assert any("upon a time" in line for line in last_frame)
    left = [line.strip() for line in CONTROL.sub("", output[output.rindex("\x1b[?1049l") :]).splitlines()]
    assert left[0] == "big + small · svip"
    assert any("finished stop (end of sequence or stop string)" in line for line in left)
    assert left[-1] == "the completion stands whole"
    assert output.rindex("\x1b[?25h") < output.rindex("the completion")


def drafted_round(
    index: int, accepted: int, drafted: int, stop: StopReason | None = StopReason.POLICY, **more
) -> Round:
    steps = tuple(DraftStep(position + 1, 7) for position in range(drafted))
    kind = ExtraToken.BONUS if accepted == drafted else ExtraToken.CORRECTION
    return Round(index, steps, accepted, 9, kind, stop, **more)


def hierarchy(index: int, accepted: int, handed_up: list[int]) -> Round:
    inner = tuple(drafted_round(number, tokens - 1, tokens) for number, tokens in enumerate(handed_up))
    return drafted_round(index, accepted, sum(handed_up), inner=inner)


@pytest.mark.parametrize(
    ("accepted", "drafted", "expected"), [(4, 6, "████▒▒"), (0, 2, "▒▒"), (3, 3, "███"), (0, 0, "")]
)
def test_bar_counts_accepted_out_of_drafted(accepted: int, drafted: int, expected: str) -> None:
    assert bar(drafted_round(0, accepted, drafted)).plain == expected


def test_bar_of_a_hierarchy_has_a_segment_per_inner_round() -> None:
    assert bar(hierarchy(0, 5, [3, 3, 2])).plain == "███ ██▒ ▒▒"
    assert bar(hierarchy(0, 3, [3, 1])).plain == "███ ▒"


def test_bar_of_a_cut_block_stays_as_long_as_what_was_drafted() -> None:
    inner = (drafted_round(0, 2, 3), drafted_round(1, 3, 4))
    assert bar(drafted_round(0, 4, 5, StopReason.BUDGET, inner=inner)).plain == "███ █▒"


def test_a_scaled_bar_never_looks_full_when_a_token_was_rejected() -> None:
    assert bar(drafted_round(0, 39, 40), 0.25).plain == "█████████▒"
    assert bar(drafted_round(0, 40, 40), 0.25).plain == "█" * 10
    assert bar(drafted_round(0, 1, 2), 0.1).plain == "▒"


def test_strip_shows_the_last_rounds_newest_last() -> None:
    rounds = [drafted_round(8, 4, 6), drafted_round(9, 2, 2, StopReason.MAX_DRAFT), drafted_round(10, 0, 0, None)]
    assert [line.plain.rstrip() for line in strip(rounds, 5, 40)] == [
        " 9 ████▒▒ 4/6 policy",
        "10 ██ 2/2 max_draft",
        "11 0/0 target only",
    ]
    assert [line.plain.split()[0] for line in strip(rounds, 2, 40)] == ["10", "11"]
    assert strip(rounds, 0, 40) == []
    assert strip([], 5, 40) == []


def test_strip_uses_columns_where_there_is_room() -> None:
    lines = strip([drafted_round(index, 1, 2) for index in range(30)], 3, 2 * COLUMN_WIDTH)
    assert [[word for word in line.plain.split() if word.isdigit()] for line in lines] == [
        ["25", "28"],
        ["26", "29"],
        ["27", "30"],
    ]


@pytest.mark.parametrize("width", [10, 24, 40, 80, 200])
def test_long_drafts_are_scaled_alike_and_keep_their_labels(width: int) -> None:
    rounds = [
        drafted_round(97, 20, 40),
        drafted_round(98, 10, 20),
        hierarchy(99, 7, [1] * 20),
        hierarchy(100, 9, [20, 20]),
    ]
    lines = strip(rounds, 4, width)
    assert {cell_len(line.plain) for line in lines} == {width}
    if 40 <= width < 2 * COLUMN_WIDTH:
        assert [line.plain.rstrip().rpartition(" ")[0].rpartition(" ")[2] for line in lines] == [
            "20/40",
            "10/20",
            "7/20",
            "9/40",
        ]
        cells = [line.plain.count("█") + line.plain.count("▒") for line in lines]
        assert cells[0] == cells[3]
        assert cells[1] == cells[2] == pytest.approx(cells[0] / 2, abs=1)


def test_a_tree_that_does_not_fit_is_left_out() -> None:
    long = drafted_round(0, 1, 30, tree=(1,) * 30)
    (line,) = strip([long], 1, 40)
    assert "1111" not in line.plain
    assert "1/30 policy" in line.plain


def test_a_dynamic_tree_shows_the_tokens_of_each_level() -> None:
    grown = drafted_round(0, 2, 5, tree=(10, 24, 7, 1, 0), path=(4, 5))
    assert [line.plain.rstrip() for line in strip([grown], 1, 40)] == ["1 ██▒▒▒ ++71· 2/5 policy"]
    assert [(span.start, span.end) for span in tree(grown).spans if span.style == "green"] == [(0, 1), (1, 2)]


def test_copies_behind_a_models_tokens_stand_apart() -> None:
    chained = drafted_round(0, 3, 5, copied=3)
    assert bar(chained).plain == "██ █▒▒"
    assert [str(span.style) for span in bar(chained).spans] == ["green", "blue", "dim"]
    alone = drafted_round(0, 1, 2, copied=2)
    assert bar(alone).plain == "█▒"
    assert str(bar(alone).spans[0].style) == "blue"
    assert "█▒▒" in strip([chained], 1, 30)[0].plain


WIDE_AND_HOSTILE = st.text(
    st.characters() | st.sampled_from("\x1b\x9b\r\n\t \u200d\u202e\u0301\ufe0f世🚢"), max_size=60
)


def console() -> Console:
    return Console(file=StringIO(), width=80, height=24, force_terminal=True, color_system="standard")


def plain(lines: Iterable[list[Segment]]) -> list[str]:
    return ["".join(segment.text for segment in line) for line in lines]


@given(WIDE_AND_HOSTILE)
def test_printable_text_contains_no_control_characters(text: str) -> None:
    shown = printable(text)
    assert all(char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in shown)
    shown.encode()


def test_printable_keeps_words_and_shows_escapes() -> None:
    assert printable("日本 a\tb\r\n\x1b[2J\x9b5n\ud800") == "日本 a    b\n␛[2J�5n�"
    assert one_line("a\nb") == "a b"


@settings(deadline=None)
@given(st.lists(WIDE_AND_HOSTILE, max_size=8), st.integers(2, 40), st.integers(1, 12))
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
