"""``specctl chat`` in a pipe, in one process, and in a pseudo-terminal."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pexpect
import pytest

from specctl import __main__ as entry
from specctl.processes import interruptible

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("SPECCTL_") and name not in ("COLUMNS", "LINES")
}
QUESTION = "Tom has 3 apples and buys 4 more. How many?"
QUESTION_MARK = re.escape("\x1b[?2004h> ")
"""Where readline asks: pasted line breaks are taken as such, then the prompt."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Ran(NamedTuple):
    code: int
    stdout: str
    stderr: str


@contextmanager
def standard_streams(stdin: bytes) -> Iterator[dict[str, io.TextIOWrapper]]:
    streams = {
        name: io.TextIOWrapper(io.BytesIO(stdin if name == "stdin" else b""), encoding="utf-8")
        for name in ("stdin", "stdout", "stderr")
    }
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SPECCTL_")]:
            patch.delenv(name)
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        yield streams


def specctl(*arguments: object, stdin: bytes = b"") -> Ran:
    """Run the whole command line in this process, where torch has to be imported only once."""
    with standard_streams(stdin) as streams, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specctl", *map(str, arguments)])
        code = entry._run()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    out, err = (streams[name].buffer.getvalue().decode() for name in ("stdout", "stderr"))
    return Ran(code, out, err)


def chat(*arguments: object, said: str | bytes) -> Ran:
    return specctl("chat", "-n", "24", *arguments, stdin=said.encode() if isinstance(said, str) else said)


def test_each_line_of_a_pipe_is_a_turn(tmp_path: Path) -> None:
    (tmp_path / "turns.jsonl").write_text(json.dumps({"turns": [QUESTION, "He eats 2.\nHow many are left?"]}) + "\n")
    answers = json.loads(specctl("generate", "-n", "24", "-i", tmp_path / "turns.jsonl").stdout)["completion"]
    ran = chat(said=f"{QUESTION}\n\nHe eats 2.\\\nHow many are left?")
    assert ran == Ran(0, "".join(f"{answer}\n" for answer in answers), "")


def test_slash_commands_of_a_pipe(tmp_path: Path) -> None:
    saved = tmp_path / "talk.jsonl"
    ran = chat("--chat", said=f"{QUESTION}\n/policy none\n/save {saved}\n/stats\n/quit\nnever said\n")
    assert ran.code == 0
    assert "policy none" in ran.stderr
    assert "acceptance rate" in ran.stderr
    record = json.loads(saved.read_text())
    assert record["messages"] == [{"role": "user", "content": QUESTION}]
    assert ran.stdout == record["completion"] + "\n"
    again = json.loads(specctl("generate", "-n", "24", "-i", saved).stdout)
    assert again["completion"] == record["completion"]


def test_what_goes_wrong_is_told_and_the_rest_goes_on() -> None:
    ran = chat(said=b"/polcy none\n\xff\xfe\n" + b"word " * 3000 + b"\n" + QUESTION.encode())
    assert ran.code == 1
    for text in ("did you mean '/policy'", "not UTF-8", "/undo takes the last turn back"):
        assert text in ran.stderr
    assert ran.stdout == chat(said=QUESTION).stdout


def test_a_panel_leaves_the_answer_as_it_is() -> None:
    assert chat("--live", said=QUESTION) == chat(said=QUESTION)


@pytest.mark.exhaustive
def test_no_conversation_is_saved_in_an_input_or_output(tmp_path: Path) -> None:
    said, answered = tmp_path / "said.txt", tmp_path / "answers.txt"
    said.write_text(f"{QUESTION}\n/save {said}\n/save {answered}\n")
    command = [sys.executable, "-m", "specctl", "chat", "-n", "4"]
    with said.open() as turns, answered.open("a") as answers:
        environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(command, stdin=turns, stdout=answers, stderr=subprocess.PIPE, text=True, env=environment)
    assert ran.returncode == 1
    assert "input and conversation are the same file" in ran.stderr
    assert "answers and conversation are the same file" in ran.stderr
    assert "messages" not in said.read_text() + answered.read_text()


def test_a_profile_is_no_place_for_a_conversation(tmp_path: Path) -> None:
    profile = tmp_path / "own.toml"
    profile.write_text(text := 'extends = "embedded"\n')
    ran = chat("-p", profile, said=f"{QUESTION}\n/save {profile}\n")
    assert ran.code == 1
    assert "profile and conversation are the same file" in ran.stderr
    assert profile.read_text() == text


@pytest.mark.parametrize("said", ["", "\n\n"])
def test_nothing_said_is_fine(said: str) -> None:
    assert chat(said=said) == Ran(0, "", "")


def test_raw_turns_continue_a_text() -> None:
    ran = chat("--raw", said="Once upon a time")
    assert ran.code == 0
    assert ran.stdout == chat(said="Once upon a time").stdout != chat("--chat", said="Once upon a time").stdout


def test_a_profile_may_ask_for_plain_turns(tmp_path: Path) -> None:
    (tmp_path / "plain.toml").write_text('extends = "embedded"\n[prompt]\nchat = false\n')
    ran = chat("-p", tmp_path / "plain.toml", said="Once upon a time")
    assert ran == chat("--raw", said="Once upon a time")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--raw", "--system", "Be kind."], "a system message needs a chat template"),
        (["--draft", "embedded:draft"], "--draft names a draft without a target"),
        (["--policy", "svpi"], "did you mean 'svip'"),
    ],
)
def test_wrong_options_end_it_before_anything_is_read(arguments: list[str], message: str) -> None:
    ran = chat(*arguments, said="Hello")
    assert (ran.code, ran.stdout) == (2, "")
    assert message in ran.stderr


def test_an_interrupt_in_a_pipe_leaves_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chat(said=QUESTION).stdout
    from specctl.commands.talk import Watcher

    show: Callable[..., None] = Watcher.__call__
    rounds: list[object] = []

    def interrupted(self: Watcher, *round_: object) -> None:
        rounds.append(round_)
        show(self, *round_)
        if len(rounds) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Watcher, "__call__", interrupted)
    ran = chat(said=f"{QUESTION}\nnever said\n")
    assert ran.code == 130
    assert 0 < len(ran.stdout) < len(whole)
    assert whole.startswith(ran.stdout.removesuffix("\n"))


def test_the_first_interrupt_is_noted_and_the_second_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as pressed:  # noqa: PT012 - each step must come in turn
        assert not pressed()
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_exit_is_a_turn_like_any_other_in_a_pipe() -> None:
    assert chat(said="exit\n").stdout.strip()


@pytest.mark.exhaustive
def test_the_demonstration_models_say_so_and_exit_leaves(tmp_path: Path) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-m", "specctl", "chat", "-n", "4"],
        env=ENVIRONMENT | {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        dimensions=(30, 60),
        encoding="utf-8",
        timeout=120,
    )
    child.expect("demonstration models")
    child.expect("try: Once upon a time")
    child.expect(QUESTION_MARK)
    child.sendline("/set temp=0.7")
    child.expect("did you mean\\s+'temperature'")
    child.expect(QUESTION_MARK)
    child.sendline("exit")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.mark.slow
def test_a_conversation_in_a_terminal(tmp_path: Path) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-m", "specctl", "chat", "--raw", "-n", "900"],
        env=ENVIRONMENT | {"TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path,
        dimensions=(30, 200),
        encoding="utf-8",
        timeout=120,
    )

    def hears(line: str, *answers: str) -> str:
        """Type a line; what the screen got until the next question, which has all answers in it."""
        child.sendline(line)
        child.expect(QUESTION_MARK)
        text = CONTROL.sub("", str(child.before))
        assert all(answer in text for answer in answers), text
        return text

    child.expect("plain text")
    child.expect(QUESTION_MARK)
    child.sendline("Once upon a time there was a dog")
    child.expect(r"dog\r\n[^>]*?\w+ \w+ \w+")  # the answer grows
    child.sendintr()
    child.expect("interrupted; what was written stays")
    child.expect(QUESTION_MARK)
    hears("/retrie", "did you mean '/retry'")
    hears("/undo", "taken back: Once upon a time")
    hears("/set max_new_tokens=5", "sampling.max_new_tokens = 5")
    child.sendline("Once upon a\\")
    hears("time", "5 tokens", "ended at max_new_tokens")
    hears(3 * "\x1b[A", "sampling.max_new_tokens = 5")  # the history
    hears("/save talk.jsonl", "added to talk.jsonl")
    child.sendintr()
    child.expect("Ctrl-C again or Ctrl-D leaves")
    child.expect(QUESTION_MARK)
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert json.loads((tmp_path / "talk.jsonl").read_text())["turns"] == ["Once upon a\ntime"]
