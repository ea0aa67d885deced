import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from specctl.commands.app import app
from specctl.commands.requests import help_lines
from tests.support.invoked import invoke

GROUP: Any = typer.main.get_command(app)


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


def lines(path: tuple[str, ...], width: int, *, whole: bool = True) -> list[str]:
    command = GROUP
    for name in path:
        command = command.commands[name]
    context = command.make_context("specctl", [], resilient_parsing=True)
    return [line for line, _ in help_lines(command, context, width, whole=whole)]


@pytest.mark.parametrize("width", [80, 60, 200])
@pytest.mark.parametrize("path", [(), *commands(GROUP)], ids=" ".join)
@pytest.mark.parametrize("whole", [True, False])
def test_help_fits_the_terminal_and_breaks_between_words(path: tuple[str, ...], width: int, whole: bool) -> None:
    shown = lines(path, width, whole=whole)
    long = [line for line in shown if len(line) > width and not line.startswith("  specctl ")]
    assert [line for line in long if " " in line.strip() and not re.match(r"  (-|printf|ls )", line)] == []
    words = " ".join(shown).split()
    assert not any(re.search(r"x[<>]=|[…]", word) for word in words)
    wide = " ".join(lines(path, 1000, whole=whole)).split()
    assert sorted(words) == sorted(wide), "no word is broken, and none is missing"


@pytest.mark.parametrize("path", [(), *commands(GROUP)], ids=" ".join)
def test_the_help_of_each_command_fits_a_screen(path: tuple[str, ...]) -> None:
    assert len(lines(path, 80, whole=False)) < 40  # the prompt of the shell needs one


@pytest.mark.parametrize("path", [path for path in commands(GROUP) if path not in [("profiles",)]], ids=" ".join)
def test_what_the_help_leaves_out_is_counted_and_shown_by_another_flag(path: tuple[str, ...]) -> None:
    def flags(shown: list[str]) -> list[str]:
        return [line.split("  ")[1] for line in shown if line.startswith("  -")]

    brief, whole = lines(path, 80, whole=False), lines(path, 80)
    assert {*flags(brief)} <= {*flags(whole)}
    missing = len({*flags(whole)} - {*flags(brief)} - {"--help", "--help-all"})
    told = re.fullmatch(r"(\d+) more options, and more about these: specctl --help-all", brief[-1])
    assert (int(told[1]) if told else 0) == missing
    assert any("--help-all" in line for line in whole) == (missing > 0)


def test_every_option_has_its_first_sentence_in_the_brief_help() -> None:
    text = " ".join(" ".join(lines(("generate",), 80, whole=False)).split())
    assert "--target, --model MODEL Target model: a folder, hub id or GGUF file. --draft MODEL" in text
    assert "[default: jsonl]" in text
    assert "--top-k" not in text


def test_help_all_runs_nothing_and_shows_everything() -> None:
    for path in ("generate",), ("profiles", "list"), ("profiles",), ():
        assert invoke(*path, "--help-all").output.startswith("Usage: ")
    assert "--grammar FILE" in invoke("generate", "--help-all").output
    assert "--grammar FILE" not in invoke("generate", "--help").output


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
    assert "-n, --max-new-tokens, --max-tokens N Most new tokens for each prompt. Default: profile, else 256." in text
    assert "--target, --model MODEL" in text
    assert "svip:threshold=0.4" in text
    assert "[default: jsonl]" in text
    assert "[default: 10]" in " ".join(lines(("calibrate",), 80))


def test_the_first_page_is_a_description_and_the_commands() -> None:
    shown = lines((), 80)
    assert "in one pass, and a stopping policy decides, token by token, when the draft" in shown
    assert shown.index("Commands:") < shown.index("Options:")
