"""``specctl generate`` in a pseudo-terminal."""

import json
import os
import re
import sys
import sysconfig
from pathlib import Path

import pexpect
import pytest
from typer.testing import CliRunner

from specctl.commands.app import app
from tests.support.checkpoints import save_model

SPECCTL = Path(sysconfig.get_path("scripts")) / "specctl"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("SPECCTL_")},
    "TERM": "xterm-256color",
    "NO_COLOR": "",
    "COLUMNS": "",
    "LINES": "",
}
PROMPT = "Once upon a time"
LENGTH = 40
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38;\d)[\d;]*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SECOND_SCREEN = re.compile(r"\x1b\[\?1049h.*?\x1b\[\?1049l", re.DOTALL)
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"

SEVERAL = """
import sys
from specctl.__main__ import _run
for arguments in {lines!r}:
    sys.argv = ["specctl", "generate", *arguments]
    code = _run()
    print(f"<<{{code}}>>", flush=True)
"""


def spawn(command, arguments, columns=80, **variables):
    return pexpect.spawn(
        str(command),
        arguments,
        env=ENVIRONMENT | variables,
        dimensions=(30, columns),
        encoding="utf-8",
        timeout=120,
    )


def screen(output):
    """The final lines on a terminal that is too wide to wrap them; what was on its second screen is gone."""
    output = SECOND_SCREEN.sub("", output)
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
        elif part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part.endswith("K"):
            lines[row] = "" if part == "\x1b[2K" else lines[row][:column]
    return [line.rstrip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def said():
    """The text that a pipe receives."""
    return CliRunner().invoke(app, ["generate", PROMPT, "-n", str(LENGTH)], catch_exceptions=False).stdout


@pytest.fixture(scope="module")
def outputs():
    """The terminal output of several commands, run by one process."""
    plain = [PROMPT, "-n", str(LENGTH)]
    lines = [plain, [*plain, "--no-live"], [*plain, "-q"], [*plain, "--json"], ["word " * 2000]]
    child = spawn(sys.executable, ["-c", SEVERAL.format(lines=lines)])
    found = []
    for _ in lines:
        child.expect(r"<<(\d+)>>\r\n")
        found.append((int(child.match.group(1)), child.before))
    child.expect(pexpect.EOF)
    return dict(zip(("live", "no live", "quiet", "json", "error"), found, strict=True))


@pytest.mark.slow
def test_the_panel_appears_and_the_whole_completion_remains(outputs, said):
    code, output = outputs["live"]
    assert code == 0
    drawn = CONTROL.sub("", output)
    for word in ("embedded:target", "svip", "accepted", "tokens/s", "acceptance rate"):
        assert word in drawn
    assert COLOUR.search(output)
    left = screen(output)
    assert not any(line.startswith(("╭", "│", "╰")) for line in left), "the panel is gone"
    figures = left.index("embedded:target + embedded:draft · svip")
    assert " ".join(left[:figures]).split() == f"{PROMPT}{said}".split()
    assert max(map(len, left)) <= 80, "no word is broken"
    assert any("finished" in line for line in left[figures:])
    # A panel that was there for a moment leaves its last rounds.
    assert re.fullmatch(r"\d+ [█▒]* ?\d+/\d+ (policy|max_draft|budget|eos)", left[-1])
    assert output.rindex(SHOW) > output.rindex(HIDE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no live", "quiet"])
def test_without_the_panel_text_is_printed_alone(outputs, said, name):
    code, output = outputs[name]
    assert code == 0
    assert "╭" not in output
    left = screen(output)
    assert " ".join(left).split() == said.split()
    assert max(map(len, left)) <= 80, "no word is broken"


@pytest.mark.slow
def test_a_document_in_a_terminal_is_one_line_of_json(outputs):
    code, output = outputs["json"]
    assert code == 0
    assert "╭" not in output
    (line,) = screen(output)
    assert json.loads(line)["prompt"] == PROMPT


@pytest.mark.slow
def test_an_error_leaves_no_panel(outputs):
    code, output = outputs["error"]
    assert code == 1
    assert screen(output)[0].startswith("error: the prompt has")


@pytest.mark.slow
def test_an_interrupt_leaves_what_was_generated_and_a_sane_terminal(tmp_path):
    endless = save_model(tmp_path / "model")  # untrained, so that it never comes to an end by itself
    arguments = [PROMPT, "-n", "2000", "--policy", "none", "--set", f"target.model={endless}"]
    child = spawn(SPECCTL, ["generate", *arguments], columns=200, NO_COLOR="1")
    child.expect(r"[1-9]\d* of 2000")
    child.sendintr()
    before = child.before
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, child.signalstatus) == (130, None)
    output = before + child.before
    assert output.rindex(SHOW) > output.rindex(HIDE)
    assert not COLOUR.search(output)
    assert "Traceback" not in output
    text = CONTROL.sub("", output[output.rindex("\x1b[?1049l") :])
    assert "╭" not in text
    assert text.startswith(PROMPT), "what was generated until then"
    assert "finished interrupted" in text
    assert "tokens/s" in text
    assert text.endswith("\r\n"), "the shell's prompt begins a line of its own"
