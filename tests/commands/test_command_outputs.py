"""Every command keeps the rule for outputs, and finds what is wrong with files before it loads a model."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specctl.commands.app import app
from specctl.commands.flags import ShowOptions
from specctl.errors import ModelError, SpecctlError
from specctl.models.loading import pair_members as found
from specctl.outputs import Outputs
from specctl.training import predictors as workshop

DATA = Path(__file__).parents[1] / "data"
INPUT = ("-i", "in.jsonl")
DRAFT = ["train-draft", "--kind", "eagle3"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with files of every kind, in which no model can be loaded."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("SPECCTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(found, "load_inspected", None)
    monkeypatch.setattr(workshop, "load_model", None)
    Path("in.jsonl").write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}\n')
    Path("soft").symlink_to("in.jsonl")
    Path("hard").hardlink_to("in.jsonl")
    Path("torn.json").write_text('{"important": "no newline"}')
    Path("notes.txt").write_text("to keep\n")
    Path("p.toml").write_text('[target]\nmodel = "embedded:target"\n[draft]\nmodel = "embedded:draft"\n')
    Path("results").write_bytes((DATA / "results.jsonl").read_bytes())
    Path("trace").write_bytes((DATA / "trace-sampled.jsonl").read_bytes())
    Path("rounds").write_bytes((DATA / "rounds.jsonl").read_bytes())
    Path("out").write_text('{"id": "a", "completion": "done"}\n')
    Path("report").mkdir()
    Path("report/report.md").write_text("mine")
    Path("drawn").mkdir()
    Path("drawn/in.svg").write_text('{"prompt": "x"}\n')
    Path("photos").mkdir()
    Path("photos/photo.png").write_text("mine")
    Path("answers").mkdir()
    Path("answers/none.jsonl").write_text("mine")
    return tmp_path


def state():
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path.cwd().rglob("*"))
        if path.is_file()
    }


def refused(*arguments):
    """The error of a command that must leave every file as it is."""
    before = state()
    with pytest.raises(SpecctlError) as found:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert state() == before
    return found.value.full_message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # An existing file
        (["generate", "x", "-o", "notes.txt"], "notes.txt exists already\nreplace it with --force"),
        (["generate", "x", "--trace", "notes.txt"], "notes.txt exists already\nreplace"),
        (["generate", *INPUT, "-o", "notes.txt"], "notes.txt exists already\ncontinue it with --resume, replace"),
        (["generate", *INPUT, "--trace", "notes.txt"], "notes.txt exists already"),
        (["bench", *INPUT, "-o", "notes.txt"], "notes.txt exists already\ncontinue it with --resume, replace"),
        (["calibrate", *INPUT, "-o", "notes.txt"], "notes.txt exists already\nreplace it with --force"),
        (["bench", *INPUT, "--report", "report"], "report already holds report.md"),
        (["bench", *INPUT, "--report", "photos"], "photos already holds photo.png"),
        (["bench", "--from", "results", "--report", "report"], "report already holds report.md"),
        (["bench", "--from", "results", "--spec-bench-out", "answers"], "answers already holds none.jsonl"),
        (["bench", *INPUT, "--spec-bench-out", "answers"], "answers already holds none.jsonl"),
        (["calibrate", *INPUT, "--report", "report"], "report already holds report.md"),
        (["analyze", *INPUT, "--report", "report"], "report already holds report.md"),
        (["analyze", "--from", "rounds", "--report", "report"], "report already holds report.md"),
        (["train-head", *INPUT, "-o", "report"], "report already holds report.md\ncontinue it with --resume"),
        ([*DRAFT, *INPUT, "-o", "report"], "report already holds report.md\ncontinue it with --resume"),
        ([*DRAFT, *INPUT, "-o", "notes.txt"], "cannot write notes.txt: it is a file, not a folder"),
        ([*DRAFT, *INPUT, "-o", "photos", "--resume"], "photos holds nothing that specctl train-draft has written"),
        # An input
        *(
            ([command, *INPUT, option, name, "--force"], f"input and {role} are the same file")
            for command, option, role in (
                ("generate", "-o", "output"),
                ("generate", "--trace", "trace"),
                ("bench", "-o", "output"),
                ("calibrate", "-o", "output"),
                ("calibrate", "--trace", "trace"),
            )
            for name in ("in.jsonl", "soft", "hard")
        ),
        (["bench", *INPUT, "-o", "soft", "--resume"], "input and output are the same file"),
        (["bench", *INPUT, "-p", "./p.toml", "-o", "p.toml", "--force"], "profile and output are the same file"),
        (["generate", "x", "-p", "./p.toml", "-o", "p.toml", "--force"], "profile and output are the same file"),
        (["calibrate", "-p", "./p.toml", *INPUT, "-o", "p.toml", "--force"], "profile and output are the same file"),
        (["calibrate", "--from", "trace", "-o", "trace", "--force"], "earlier trace and output are the same file"),
        (["bench", "-i", "drawn/in.svg", "--report", "drawn", "--force"], "report would replace"),
        (["analyze", "--from", "report/report.md", "--report", "report", "--force"], "report would replace"),
        (["bench", "--from", "answers/none.jsonl", "--spec-bench-out", "answers", "--force"], "answers would replace"),
        # Two outputs
        (["generate", *INPUT, "-o", "new", "--trace", "./new"], "output and trace are the same file"),
        (["calibrate", *INPUT, "-o", "new", "--trace", "new"], "output and trace are the same file"),
        (["bench", *INPUT, "--report", "new", "--spec-bench-out", "new"], "report and answers are the same file"),
        # A place that cannot be written
        (["bench", *INPUT, "-o", "missing/r"], "cannot write missing/r: No such file"),
        (["calibrate", *INPUT, "-o", "missing/p.toml"], "cannot write missing/p.toml: No such file"),
        (["calibrate", *INPUT, "--trace", "."], "cannot write .: Is a directory"),
        (["bench", *INPUT, "--report", "notes.txt"], "cannot write notes.txt: it is a file, not a folder"),
        (["bench", *INPUT, "--report", "notes.txt/x"], "cannot write notes.txt/x: Not a directory"),
        (["calibrate", *INPUT, "--report", "notes.txt"], "cannot write notes.txt: it is a file, not a folder"),
        (["analyze", *INPUT, "--report", "notes.txt"], "cannot write notes.txt: it is a file, not a folder"),
        (["train-head", *INPUT, "-o", "notes.txt"], "cannot write notes.txt: it is a file, not a folder"),
        (["train-head", *INPUT, "-o", "notes.txt", "--resume"], "cannot write notes.txt: it is a file, not a folder"),
        # Another kind of file
        (["bench", *INPUT, "-o", "torn.json", "--resume"], "torn.json holds nothing that specctl has written"),
        (["bench", *INPUT, "-o", "notes.txt", "--resume"], "notes.txt holds nothing that specctl has written"),
        (["bench", *INPUT, "-o", "trace", "--resume"], "trace holds a trace of specctl calibrate, not results"),
        (["bench", *INPUT, "-o", "results", "--resume"], "results holds another benchmark: not the same profile"),
        (["bench", "--from", "torn.json"], "torn.json holds no whole line"),
        (["calibrate", *INPUT, "--trace", "torn.json"], "torn.json holds nothing that specctl has written"),
        (["calibrate", *INPUT, "--trace", "notes.txt"], "notes.txt holds nothing that specctl has written"),
        (["calibrate", *INPUT, "--trace", "trace"], "trace holds the trace of another calibration"),
        (["calibrate", "--from", "torn.json"], "torn.json holds no whole line"),
        (["generate", *INPUT, "-o", "torn.json", "--resume"], "torn.json:1 was not written by this command"),
        (["generate", *INPUT, "-o", "out", "--resume"], "out.run.json is missing or damaged, so nothing says"),
        (
            ["generate", *INPUT, "-o", "out", "--trace", "torn.json", "--resume", "--anyway"],
            "torn.json:1 was not written by this",
        ),
        (
            ["generate", *INPUT, "-o", "out", "--trace", "rounds", "--resume", "--anyway"],
            "rounds:1: the trace does not belong to",
        ),
        (["generate", *INPUT, "-o", "new", "--trace", "rounds", "--resume"], "rounds:1: the trace does not belong to"),
        (
            ["train-head", *INPUT, "-o", "photos", "--resume"],
            "photos holds nothing that specctl train-head has written",
        ),
        # What is read
        (["generate", "-i", "nope"], "cannot read nope: No such file"),
        (["bench", "-i", "nope"], "cannot read nope: No such file"),
        (["calibrate", "-i", "nope"], "cannot read nope: No such file"),
        (["calibrate", *INPUT, "--head", "./nope"], "acceptance head './nope': there is no such folder"),
        (["bench", *INPUT, "--set", "draft.head=./nope", "--policy", "specdec++"], "there is no such folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_told_before_a_model_is_loaded(arguments, message):
    assert message in refused(*arguments)


@pytest.mark.parametrize("command", ["bench", "calibrate", "analyze"])
def test_a_report_needs_matplotlib_from_the_start(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "figures need matplotlib" in refused(command, *INPUT, "--report", "new")
    assert not Path("new").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", *INPUT, "-o", "out", "--resume"],
        ["generate", "x", "--trace", "out", "--force"],
        ["bench", *INPUT, "-o", "results", "--force"],
        ["calibrate", *INPUT, "-o", "new.toml"],
        ["calibrate", *INPUT, "--trace", "trace"],
        ["analyze", *INPUT, "--report", "report", "--force"],
        ["train-head", *INPUT, "-o", "photos", "--force"],
    ],
    ids=" ".join,
)
def test_one_process_writes_an_output_at_a_time(arguments):
    with Outputs(force=True) as outputs:
        name = next(name for name in arguments if name in ("out", "results", "new.toml", "trace", "report", "photos"))
        if Path(name).is_dir():
            outputs.folder("other", Path(name))
        else:
            outputs.file("other", name)
        assert f"another process is writing {name}" in refused(*arguments)


def test_traces_may_be_read_while_they_are_written():
    with Outputs(force=True) as outputs:
        outputs.file("trace", "rounds")
        assert CliRunner().invoke(app, ["analyze", "--from", "rounds", "--json"]).exit_code == 0


def test_quiet_commands_do_not_say_what_they_wrote():
    arguments = ["bench", "--from", "results", "--spec-bench-out", "new"]
    assert "wrote new/none.jsonl" in CliRunner().invoke(app, arguments).stderr
    done = CliRunner().invoke(app, [*arguments, "--force", "-q"])
    assert (done.exit_code, done.stderr) == (0, "")


@pytest.mark.usefixtures("undrawn")
def test_a_report_is_replaced_with_force_and_leaves_other_files():
    Path("report/notes.txt").write_text("mine")
    done = CliRunner().invoke(app, ["bench", "--from", "results", "--report", "report", "--force", "-q"])
    assert done.exit_code == 0, done.output
    assert Path("report/report.md").read_text().startswith("# ")
    assert Path("report/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("content", ["{}", "[]", "5", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "[" * 3000])
def test_a_damaged_index_of_weights_is_named(content):
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "llama"}')
    Path("model/model.safetensors.index.json").write_text(content)
    from specctl.models.files.checkpoint import locate
    from specctl.profile.schema import ModelTable

    with pytest.raises(ModelError, match=r"damaged model\.safetensors\.index\.json") as found:
        locate(ModelTable(model="./model"), "target").weight_files()
    assert "model/model.safetensors.index.json" in found.value.hint


@pytest.mark.parametrize("content", ["[" * 3000, "5", "{" * 3, '{"a":' * 200 + "1" + "}" * 200])
def test_a_damaged_head_is_named(content):
    Path("head").mkdir()
    Path("head/config.json").write_text(content)
    message = refused("calibrate", *INPUT, "--head", "head")
    assert "damaged config.json" in message
    assert "Copy head/config.json again" in message


@pytest.mark.parametrize(
    ("line", "stream"),
    [
        ("profiles list >&-", "output"),
        ("profiles show >&-", "output"),
        ("--help >&-", "output"),
        ("generate <&-", "input"),
        ("generate - <&-", "input"),
        ("generate -i - <&-", "input"),
        ("bench -i - <&-", "input"),
    ],
)
@pytest.mark.representatives("profiles list", "generate - <", "bench")
def test_a_closed_stream_is_told(line, stream):
    program = f'exec "{sys.executable}" -m specctl {line}'
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: standard {stream} is closed\n")


def test_a_closed_error_stream_does_no_harm():
    program = f'exec "{sys.executable}" -m specctl profiles path nobody 2>&-'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("line", ["profiles list", "profiles show --json", "--help"])
@pytest.mark.representatives("profiles show --json")
def test_a_full_standard_output_is_named_once(line):
    program = f'exec "{sys.executable}" -m specctl {line} > /dev/full'
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error: cannot write standard output: No space left on device\n",
    )


@pytest.mark.parametrize("command", ["generate", "bench", "calibrate", "analyze", "train-head", "doctor"])
def test_no_command_runs_code_of_a_profile_found_here(command):
    Path("profiles").mkdir()
    Path("profiles/near.toml").write_text('[target]\nmodel = "./m"\ntrust_remote_code = true\n[draft]\nmodel = "./m"\n')
    Path("m").mkdir()
    Path("m/config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"}))
    Path("m/evil.py").write_text("from pathlib import Path\nPath('PWNED').touch()\n")
    more = {"generate": ["x"], "train-head": [*INPUT, "-o", "new"]}.get(command, [])
    message = refused(command, "-p", "near", *more)
    assert "profiles/near.toml:3: target.trust_remote_code = true would run code" in message
    assert not Path("PWNED").exists()


def test_a_profile_that_hides_another_is_told_by_doctor_and_show():
    Path("profiles").mkdir()
    Path("profiles/embedded.toml").write_text('[target]\nmodel = "embedded:target"\n')
    done = CliRunner().invoke(app, ["profiles", "show", "embedded"])
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: profiles/embedded.toml is used instead of ")
    assert done.stderr.count("\n") == 1
    assert "warning" not in CliRunner().invoke(app, ["profiles", "show"]).stderr


def test_one_odd_file_breaks_no_listing():
    Path("profiles").mkdir()
    Path("profiles/deep.toml").write_text("a = " + "[" * 3000)
    Path("profiles/digits.toml").write_text("a = " + "9" * 5000)
    os.mkfifo("profiles/pipe.toml")
    Path(os.fsdecode(b"profiles/\xff.toml")).write_text("")
    Path("profiles/good.toml").write_text('[target]\nmodel = "big"\n')
    listed = CliRunner().invoke(app, ["profiles", "list"])
    assert listed.exit_code == 0, listed.output
    rows = {line.split("\t")[0]: line for line in listed.stdout.splitlines()}
    assert {"good", "embedded", "deep", "digits", "pipe"} <= rows.keys()
    for name in ("deep", "digits", "pipe"):
        assert "not usable: " in rows[name]
        assert f" profiles/{name}.toml" in rows[name]
    assert json.loads(CliRunner().invoke(app, ["profiles", "list", "--json"]).stdout)
    with pytest.raises(SpecctlError) as found:
        CliRunner().invoke(app, ["profiles", "check"], catch_exceptions=False)
    for name in ("deep", "digits"):
        assert f"profiles/{name}.toml" in str(found.value)


def test_all_figures_are_one_line(tmp_path, capsys):
    folder = tmp_path / "report"
    names = ("report.md", "report.html", "speed.png", "speed.svg", "curve.png", "curve.svg")
    ShowOptions().written(folder / name for name in names)
    assert capsys.readouterr().err.splitlines() == [
        f"wrote {folder / 'report.md'}",
        f"wrote {folder / 'report.html'}",
        f"wrote figures to {folder}, as PNG and SVG: speed, curve",
    ]
    ShowOptions(quiet=True).written([folder / "report.md", folder / "speed.png"])
    assert capsys.readouterr().err == ""
