"""Errors say what is wrong once, and how to mend it once."""

import pickle
import re
import tomllib
import traceback
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from specctl.errors import DISTRIBUTION, ModelError, ProfileError, RecordError, SpecctlError, pip_install

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", [SpecctlError, ProfileError, ModelError])
def test_the_hint_is_beside_the_message_and_in_tracebacks(kind: type[SpecctlError]) -> None:
    error = kind("what is wrong", "how to mend it")
    assert (str(error), error.hint) == ("what is wrong", "how to mend it")
    assert error.full_message == "what is wrong\nhow to mend it"
    assert "".join(traceback.format_exception(error)).count("how to mend it") == 1
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.hint, again.__notes__) == (error.message, error.hint, error.__notes__)


def test_without_a_hint_there_is_the_message() -> None:
    error = RecordError("kind", "what is wrong")
    assert error.full_message == str(error) == "what is wrong"
    assert not hasattr(error, "__notes__")


def test_what_is_missing_is_installed_by_its_own_name_and_floor() -> None:
    """As pyproject.toml has it, through the installed metadata: an extra's name would be another distribution's."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert table["name"] == DISTRIBUTION
    for lines in table["optional-dependencies"].values():
        for line in lines:
            requirement, name = line.partition(";")[0].strip(), re.split(r"[\[>=;]", line)[0]
            if name != DISTRIBUTION:
                assert pip_install(name.upper()) == f'pip install "{requirement}"'
    assert pip_install("httpx", "numpy") == 'pip install "httpx>=0.27" "numpy>=2.0"'
    assert pip_install("unheard-of") == 'pip install "unheard-of"'


def test_where_nothing_is_installed_names_have_no_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", requires)
    assert pip_install("peft") == 'pip install "peft"'


def test_no_text_installs_another_distribution_of_our_name() -> None:
    """`specctl` on the package index is an unrelated program."""
    asked = re.compile(r"pip3? install (?:[^\s,]+ )*[\"']?specctl(?:[\[\"'\s`=<>~]|$)")
    told = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("plugins/**/*.md"), *ROOT.glob("plugins/**/*.py")]
    told += [*ROOT.glob("specctl/**/*.py"), *ROOT.glob("tools/**/*.py"), *ROOT.glob("profiles/*.toml")]
    found = [
        f"{path.relative_to(ROOT)}: {each[0]}" for path in told for each in asked.finditer(path.read_text("utf-8"))
    ]
    assert [one for one in found if not one.startswith("CHANGELOG.md")] == []
