import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from specctl.commands.app import app
from specctl.commands.help_screen import help_lines

GROUP: Any = typer.main.get_command(app)


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


def lines(path: tuple[str, ...], width: int) -> list[str]:
    command = GROUP
    for name in path:
        command = command.commands[name]
    context = command.make_context("specctl", [], resilient_parsing=True)
    return [line for line, _ in help_lines(command, context, width)]


@pytest.mark.parametrize("width", [80, 60, 200])
@pytest.mark.parametrize("path", [(), *commands(GROUP)], ids=" ".join)
def test_help_fits_the_terminal_and_breaks_between_words(path: tuple[str, ...], width: int) -> None:
    shown = lines(path, width)
    long = [line for line in shown if len(line) > width and not line.startswith("  specctl ")]
    assert [line for line in long if " " in line.strip() and not re.match(r"  (-|printf|ls )", line)] == []
    words = " ".join(shown).split()
    assert not any(re.search(r"x[<>]=|[…]", word) for word in words)
    wide = " ".join(lines(path, 1000)).split()
    assert sorted(words) == sorted(wide), "no word is broken, and none is missing"


def test_what_is_used_most_comes_first_and_how_it_runs_last() -> None:
    shown = lines(("generate",), 80)
    titles = [line for line in shown if re.fullmatch(r"[A-Z][a-z ]+:", line) and line != "Examples:"]
    assert titles[:3] == ["Arguments:", "Options:", "Sampling:"]
    assert titles[-1] == "How it runs:"
    options = shown[shown.index("Options:") : shown.index("Sampling:")]
    assert [line.split()[0].rstrip(",") for line in options if line.startswith("  -")][:4] == [
        "-p",
        "--target",
        "--draft",
        "--policy",
    ]


def test_examples_stand_whole_one_below_the_other() -> None:
    shown = lines(("generate",), 40)
    first = shown.index("Examples:") + 1
    assert shown[first : first + 3] == [
        '  specctl generate "Once upon a time" -n 100',
        "  specctl generate -i prompts.jsonl -o answers.jsonl --resume",
        "  ls | specctl generate --input-format text -t 0.8 | jq .completion",
    ]


def test_defaults_and_other_names_are_told() -> None:
    text = " ".join(" ".join(lines(("generate",), 80)).split())
    assert (
        "-n, --max-new-tokens, --max-tokens N Maximum number of tokens to generate. Default: the profile's; 256" in text
    )
    assert "--target, --model MODEL" in text
    assert "svip:threshold=0.4" in text
    assert "[default: jsonl]" in text
    assert "[default: 8]" in " ".join(lines(("calibrate",), 80))


def test_the_first_page_is_a_description_and_the_commands() -> None:
    shown = lines((), 80)
    assert "in one pass, and a stopping policy decides, token by token, when the draft" in shown
    assert shown.index("Commands:") < shown.index("Options:")
