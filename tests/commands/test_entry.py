import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import typer

from specctl import __main__ as entry
from specctl import __version__
from specctl.commands.app import app
from tests.support.hostile import HOSTILE, commands

SPECCTL = Path(sysconfig.get_path("scripts")) / "specctl"
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("SPECCTL_")}


def command_lines():
    def walk(command, line):
        yield line
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, [*line, name])

    return list(walk(typer.main.get_command(app), []))


FORKS = """
import gc, os, pathlib, signal, sys, time
{before}
gc.freeze()  # else each process looks at all of it when it ends, and so has a copy
for number, case in enumerate({cases!r}):
    if not os.fork():
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{{number}}.{{name}}", os.O_WRONLY | os.O_CREAT), stream)
        {run}
        os._exit(99)  # not by an end of its own
    pathlib.Path(f"{folder}/{{number}}.code").write_text(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


def forked(folder, before, run, cases):
    """What ``run`` makes of each ``case``, in a process of its own each, all after the same imports."""
    program = FORKS.format(before=before, cases=cases, run=run.replace("\n", "\n        "), folder=folder)
    subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=True)

    def read(number):
        code, out, err = ((folder / f"{number}.{name}").read_text() for name in ("code", "out", "err"))
        return subprocess.CompletedProcess(program, int(code), out, err)

    return [read(number) for number in range(len(cases))]


IMPORTS = "from specctl.__main__ import main\nfrom specctl.commands.app import app\nimport typer.rich_utils"
BUILT = """
built = typer.main.get_command(app)  # which takes as long as most of what is tried
typer.main.get_command = lambda _: built
"""
PROBED = (
    IMPORTS
    + """
from rich.console import Console
from specctl.errors import ModelError

@app.command()
def probe(): exec(body)

def closed():
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)

sys.argv = ["specctl", "probe"]
"""
    + BUILT
)
PROBE = "body, own = case\nos.environ.update(own)\nmain()"
SIGINT = "os.kill(os.getpid(), signal.SIGINT); time.sleep(30)"
SIGTERM = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)"
BODIES = {
    "raise ModelError('does not fit', 'Use a smaller one.')": (3, "", "error: does not fit\nUse a smaller one.\n"),
    "raise ValueError('first\\nsecond')": (
        *(1, ""),
        "error: ValueError: first\nSet SPECCTL_DEBUG=1 to see where it happened.\n",
    ),
    "raise KeyboardInterrupt": (130, "", ""),
    SIGINT: (130, "", ""),
    SIGTERM: (143, "", ""),
    "raise BrokenPipeError(32, 'Broken pipe')": (141, "", ""),
    "import typer; raise typer.Exit(5)": (5, "", ""),
    "sys.exit(1)": (1, "", ""),
    "pass": (0, "", ""),
    f"try:\n    {SIGTERM}\nfinally:\n    print('cleaned')": (143, "cleaned\n", ""),
    f"try:\n    {SIGINT}\nfinally:\n    print('cleaned')": (130, "cleaned\n", ""),
}
"""What a command does, its exit code and what it says."""
PIPES = {
    f"{write}, {lines} times": f"closed()\nfor _ in range({lines}): {write}"
    for write in ("print('x' * 9)", "Console().print('x' * 9)")
    for lines in (1, 20_000)
}
DEBUGGED = "raise ModelError('does not fit')  # and says where"
WAITING = "print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
FULL = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nprint('x')"
OWN = {
    DEBUGGED: {"SPECCTL_DEBUG": "1"},
    WAITING: {},
    f"{WAITING}  # as the person says": {"OMP_WAIT_POLICY": "ACTIVE"},
    FULL: {},
}
"""What a command does that has variables of its own."""
TOLD = {
    "raise ValueError('Validation failed for heads:\\n\\n  in config.json:\\n 64 % 7 != 0\\nmore')": (
        "error: ValueError: Validation failed for heads: in config.json: 64 % 7 != 0\n"
    ),
    "raise OSError(24, 'Too many open files')": "error: too many files are open: this process may open no more\n",
    'raise RuntimeError("can\'t start new thread")': "error: no more threads can be started: the system limits",
}
"""How a reason begins that is told."""
HELP = """
sys.argv = ["specctl", *case, "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {"torch", "transformers", "accelerate"} & set(sys.modules)
assert not heavy, heavy
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def helps(request, tmp_path_factory):
    """Of the commands whose help is tested."""
    tests = [item for item in request.session.items if "helps" in item.fixturenames]
    lines = [item.callspec.params["line"] for item in tests]
    found = forked(tmp_path_factory.mktemp("helps"), IMPORTS + BUILT, HELP, lines)
    return {" ".join(line): done for line, done in zip(lines, found, strict=True)}


@pytest.mark.parametrize("line", command_lines(), ids=" ".join)
@pytest.mark.representatives("generate", "train-draft", "doctor")
def test_help_needs_no_model_library(helps, line):
    done = helps[" ".join(line)]
    assert done.returncode == 0, done.stderr
    assert "Usage: specctl" in done.stdout
    typed = re.findall(r"--[\w-]+.*(?:<(?:str|int|float|list|Path)\b|INTEGER|FLOAT)", done.stdout)
    assert not typed, "a type tells nobody what to give"


@pytest.mark.parametrize("program", [[str(SPECCTL)], [sys.executable, "-m", "specctl"]], ids=["script", "module"])
def test_version(program):
    done = subprocess.run([*program, "--version"], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == f"specctl {__version__}\n"


def test_usage_errors_exit_with_2(tmp_path):
    lines = [["bogus"], ["--bogus"], ["profiles", "show", "--set"], ["profiles", "bogus"], []]
    *wrong, nothing = forked(tmp_path, IMPORTS + BUILT, "sys.argv = ['specctl', *case]\nmain()", lines)
    for line, done in zip(lines, wrong, strict=False):
        assert (done.returncode, done.stdout) == (2, ""), line
        assert "Error" in done.stderr
    assert nothing.returncode == 2
    assert "Usage: specctl" in nothing.stdout + nothing.stderr


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """What each body does, through the entry point, in a process of its own."""
    cases = [(body, OWN.get(body, {})) for body in (*BODIES, *TOLD, *PIPES.values(), *OWN)]
    found = forked(tmp_path_factory.mktemp("probed"), PROBED, PROBE, cases)
    return {body: done for (body, _), done in zip(cases, found, strict=True)}


@pytest.mark.parametrize(("body", "ends"), BODIES.items())
def test_how_a_command_ends_is_told_by_its_exit_code(probed, body, ends):
    done = probed[body]
    assert (done.returncode, done.stdout, done.stderr) == ends


@pytest.mark.parametrize(("body", "said"), TOLD.items())
def test_reasons_are_told(probed, body, said):
    done = probed[body]
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(said)
    limit = not body.startswith("raise ValueError")
    assert ("ulimit" in done.stderr) == limit, "limits of the system are told with a way out"
    assert ("SPECCTL_DEBUG" in done.stderr) != limit


def test_debug_adds_the_traceback(probed):
    done = probed[DEBUGGED]
    assert done.returncode == 3
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("error: does not fit\n")


@pytest.mark.parametrize(("own", "policy"), [("", "PASSIVE"), ("  # as the person says", "ACTIVE")])
def test_threads_wait_without_spinning_before_torch_is_there(probed, own, policy):
    assert "OMP_WAIT_POLICY" not in ENVIRONMENT, "this test needs a shell that does not set it"
    assert probed[WAITING + own].stdout == f"{policy} False\n"


READ_BY_TORCH = f"""{IMPORTS}
from specctl.errors import ModelError
import torch

class Interrupting:
    def __len__(self): return 1
    def __getitem__(self, place): os.kill(os.getpid(), signal.SIGINT); return 1

def read(): torch.asarray(Interrupting())

@app.command()
def probe(): exec(case)
"""
INTERRUPTED = {
    "as it came": ("read()", 130, ""),
    "explained as an error of a model": (
        "try: read()\nexcept ValueError as error: raise ModelError('does not load') from error",
        130,
        "",
    ),
    "another error later": ("try: read()\nexcept ValueError: pass\nraise ModelError('no')", 3, "error: no\n"),
}


@pytest.mark.slow
def test_an_interrupt_that_torch_makes_another_error(tmp_path):
    bodies = [body for body, *_ in INTERRUPTED.values()]
    found = forked(tmp_path, READ_BY_TORCH, "sys.argv = ['specctl', 'probe']\nmain()", bodies)
    for (name, (_, code, said)), done in zip(INTERRUPTED.items(), found, strict=True):
        assert (done.returncode, done.stderr) == (code, said), name


@pytest.mark.parametrize("body", PIPES.values(), ids=PIPES)
def test_a_closed_pipe_is_silent(probed, body):
    done = probed[body]
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported(probed):
    done = probed[FULL]
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colour_only_on_a_terminal_that_wants_it(no_color, coloured):
    import pexpect

    output = pexpect.run(f"{SPECCTL} profiles path nobody", env=ENVIRONMENT | {"NO_COLOR": no_color}, encoding="utf-8")
    assert ("\x1b[" in output) is coloured


@pytest.mark.exhaustive
def test_packages_for_quantised_weights_say_nothing_on_import():
    """torchao's import logs about kernels for other machines; transformers imports it wherever it is installed."""
    pytest.importorskip("torchao")
    program = "from specctl.models.files.library_calls import hush_imports\nhush_imports()\n"
    program += "import transformers.modeling_utils, torchao.quantization"
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "line",
    [
        ["generate", "--bogus{}"],
        ["generate", "hi", "more{}"],
        ["bogus{}"],
        ["generate", "-p", "x{}", "hi"],
        ["generate", "--policy", "x{}", "hi"],
        ["bench", "--lengths", "x{}"],
        ["profiles", "bogus{}"],
    ],
    ids=" ".join,
)
def test_a_quoted_argument_is_clean(capsys, monkeypatch, line):
    monkeypatch.setattr(sys, "argv", ["specctl", *(word.format(HOSTILE) for word in line)])
    monkeypatch.setenv("COLUMNS", "500")
    assert entry._run() == 2
    said = capsys.readouterr().err
    assert commands(said) == set()
    unwrapped = re.sub(r"[│\s]", "", said)
    assert "PWNED" in unwrapped
    assert "[red]x[/]" in unwrapped


def test_a_traceback_is_clean(capsys, monkeypatch):
    monkeypatch.setenv("SPECCTL_DEBUG", "1")
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        entry._report(error, HOSTILE, HOSTILE)
    said = capsys.readouterr().err
    assert said.count("PWNED") == 3
    assert commands(said) == set()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["generate", "--report", "x"], r"No such option: --report; all options: .*specctl generate --help-all"),
        (["generate", "--temprature", "1"], r"No such option: --temprature \(Possible options: --temperature\)"),
        (["profiles", "list", "--x"], r"No such option: --x; all options: .*specctl profiles list --help-all"),
    ],
)
def test_an_unknown_option_is_answered_with_near_ones_or_where_all_are(capsys, monkeypatch, line, said):
    monkeypatch.setattr(sys, "argv", ["specctl", *line])
    monkeypatch.setenv("COLUMNS", "120")
    assert entry._run() == 2
    assert re.search(said, " ".join(capsys.readouterr().err.replace("│", " ").split()))
