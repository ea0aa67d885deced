import io
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pexpect
import pytest
from test_entry import IMPORTS, forked

from specctl import __main__ as entry
from specctl.profile.profile_file import packaged_directory
from tests.support.hostile import HOSTILE, commands

SPECCTL = Path(sysconfig.get_path("scripts")) / "specctl"


@pytest.fixture
def environment(tmp_path):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPECCTL_")}
    return inherited | {"XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.fixture
def specctl(tmp_path, monkeypatch):
    """Runs the command line in this process."""

    def specctl(*arguments, **variables):
        streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for name in ("stdin", "stdout", "stderr")}
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", ["specctl", *arguments])
            for name in [name for name in os.environ if name.startswith("SPECCTL_")]:
                patch.delenv(name)
            for name, value in {"XDG_CONFIG_HOME": str(tmp_path / "config"), **variables}.items():
                patch.setenv(name, value)
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            code = entry._run()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        out, err = (streams[name].buffer.getvalue().decode() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(arguments, code, out, err)

    return specctl


def own_profile(tmp_path, text):
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "mine.toml").write_text(text)


def test_list_in_a_pipe_is_tab_separated(specctl):
    lines = [line.split("\t") for line in specctl("profiles", "list").stdout.splitlines()]
    assert {len(line) for line in lines} == {6}
    (embedded,) = (line for line in lines if line[0] == "embedded")
    assert embedded[1:4] == ["embedded:target", "embedded:draft", "svip"]
    assert Path(embedded[5]).is_file()


def test_list_on_a_terminal_is_a_table(tmp_path, environment):
    output, status = pexpect.run(
        f"{SPECCTL} profiles list",
        cwd=tmp_path,
        env=environment | {"COLUMNS": "160", "TERM": "xterm"},
        withexitstatus=True,
        encoding="utf-8",
    )
    assert status == 0
    assert "\t" not in output
    assert {"name", "target", "policy"} <= set(output.replace("\x1b[1m", " ").replace("\x1b[0m", " ").split())
    assert "llama70b-svip" in output


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.representatives("60")
def test_a_list_has_a_line_for_each_profile_with_its_whole_name(tmp_path, environment, specctl, width):
    output = pexpect.run(
        f"{SPECCTL} profiles list",
        cwd=tmp_path,
        env=environment | {"COLUMNS": str(width), "TERM": "xterm", "NO_COLOR": "1"},
        encoding="utf-8",
    )
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:2] == ["name", "target"]
    assert "policy" in lines[0].split()
    assert ("description" in lines[0]) == (width == 140)
    if width >= 80:
        policies = {
            line.split("\t")[0]: line.split("\t")[3] for line in specctl("profiles", "list").stdout.splitlines()
        }
        assert all(policies[line.split()[0]] in line for line in lines if line.split()[0] in policies)
    names = [line.split("\t")[0] for line in specctl("profiles", "list").stdout.splitlines()]
    told = lines.index("demonstration models, which ship with specctl:")
    assert [line.split()[0] for line in lines[1:told] + lines[told + 1 :]] == names
    assert {name.partition("-")[0] for name in names[told - 1 :]} == {"embedded"}


def test_a_copy_of_a_profile_hides_nothing(tmp_path, specctl):
    text = (packaged_directory() / "llama70b-svip.toml").read_text("utf-8")
    own_profile(tmp_path, "")
    copy = tmp_path / "profiles" / "llama70b-svip.toml"
    copy.write_text(text)
    assert specctl("profiles", "show", "llama70b-svip").stderr == ""
    copy.write_text(text.replace("0.3", "0.4"))
    assert "profiles/llama70b-svip.toml is used instead of" in specctl("profiles", "show", "llama70b-svip").stderr


def test_a_broken_profile_is_listed_as_such(specctl, tmp_path):
    own_profile(tmp_path, "nonsense = 1\n")
    listed = json.loads(specctl("profiles", "list", "--json").stdout)
    (mine,) = (row for row in listed if row["name"] == "mine")
    assert "not usable" in mine["description"]
    assert len(listed) > 5


def test_show_json_has_absolute_model_paths_and_origins(specctl):
    shown = json.loads(specctl("profiles", "show", "embedded", "--set", "sampling.seed=3", "--json").stdout)
    for role in ("target", "draft"):
        path = Path(shown["profile"][role]["model"])
        assert path.is_absolute()
        assert path.name == role
    assert shown["profile"]["sampling"]["seed"] == 3
    assert shown["origins"]["sampling.seed"] == "--set"
    assert shown["name"] == "embedded"


def test_show_as_toml_reads_the_environment(specctl):
    shown = specctl("profiles", "show", SPECCTL_PROFILE="embedded-constant", SPECCTL_POLICY__DRAFT_LENGTH="9")
    assert "draft_length = 9  # environment SPECCTL_POLICY__DRAFT_LENGTH" in shown.stdout


def test_show_of_a_wrong_profile_exits_with_2(specctl):
    done = specctl("profiles", "show", "embeded")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no profile named 'embeded'; did you mean 'embedded'?")


def test_check_passes_shipped_profiles_whatever_the_environment(specctl):
    done = specctl("profiles", "check", SPECCTL_NONSENSE="1")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^embedded: ok \(.*embedded\.toml\)$", done.stdout, re.M)


def test_check_names_a_path_once(specctl, tmp_path):
    (tmp_path / "q.toml").write_text('extends = "embedded"\n')
    assert specctl("profiles", "check", "./q.toml").stdout == "./q.toml: ok (q.toml)\n"
    assert specctl("profiles", "check", "q.toml").stdout == "q.toml: ok\n"


def test_check_reports_every_wrong_profile(specctl, tmp_path):
    own_profile(tmp_path, "nonsense = 1\n")
    done = specctl("profiles", "check", "mine", "nobody", "embedded")
    assert done.returncode == 2
    assert done.stdout.startswith("embedded: ok")
    assert "profiles/mine.toml:1: nonsense: unknown key" in done.stderr
    assert "'nobody'" in done.stderr


def test_path(specctl, tmp_path):
    own_profile(tmp_path, "")
    assert specctl("profiles", "path", "mine").stdout == f"{tmp_path / 'profiles' / 'mine.toml'}\n"


def test_names_complete(tmp_path):
    line = "specctl profiles show embedded-co"
    words = {"COMP_WORDS": line, "COMP_CWORD": "3", "_TYPER_COMPLETE_ARGS": line}
    shells = [
        words | {"_SPECCTL_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        for shell in ("bash", "zsh", "fish")
    ]
    for done in forked(tmp_path, IMPORTS, "os.environ.update(case)\nsys.argv = ['specctl']\nmain()", shells):
        assert "embedded-constant" in done.stdout
        assert "pythia" not in done.stdout


LINES = ["list", "show mine", "check", "check wrong", "list --json", "show mine --json"]
ONE_BY_ONE = f"""
import os, sys
{IMPORTS}
for line in {LINES!r}:
    print("@@@", flush=True)
    if not os.fork():
        sys.argv = ["specctl", "profiles", *line.split()]
        main()
    os.wait()
"""


def test_a_terminal_obeys_nothing_in_other_peoples_profiles(tmp_path, environment):
    text = json.dumps(HOSTILE)
    own_profile(tmp_path, f"schema_version = 1\ndescription = {text}\n[target]\nmodel = {text}\n")
    wrong = f"schema_version = 1\n[target]\nmodel = {text}\n{text} = 1\n"
    (tmp_path / "profiles" / "wrong.toml").write_text(wrong)
    (tmp_path / "profiles" / "\x1b]0;PWNED\x07.toml").write_text(wrong)
    (tmp_path / "one_by_one.py").write_text(ONE_BY_ONE)
    shown = pexpect.run(
        f"{sys.executable} one_by_one.py",
        cwd=tmp_path,
        env=environment | {"COLUMNS": "300", "LINES": "50", "TERM": "dumb", "NO_COLOR": "1"},
        encoding="utf-8",
    )
    assert len(shown.split("@@@")) == 1 + len(LINES)
    for line, output in zip(LINES, shown.split("@@@")[1:], strict=True):
        assert "PWNED" in output, line
        assert commands(re.sub(r"\x1b\[[0-9;]*m", "", output)) <= {"\r"}, line
        assert "\x1b[31m" not in output, line
        assert "[red]x[/]" in output, "a list of this width has room for descriptions"


@pytest.mark.slow
def test_a_pipe_gets_other_peoples_profiles_as_they_are(tmp_path, specctl):
    own_profile(tmp_path, f"schema_version = 1\ndescription = {json.dumps('a' + HOSTILE)}\n[target]\nmodel = 'x'\n")
    assert json.loads(specctl("profiles", "show", "mine", "--json").stdout)["profile"]["description"] == "a" + HOSTILE
    (line,) = (line for line in specctl("profiles", "list").stdout.split("\n") if line.startswith("mine\t"))
    assert line.split("\t")[4] == " ".join(f"a{HOSTILE}".split())
