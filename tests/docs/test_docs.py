"""The README and docs/: marked commands run, and all that the pages name exists.

Marks are HTML comments right before a fence. ``run`` (with an exit code other than 0 after a colon) runs a console
block and compares what it shows; ``file: NAME`` gives the file NAME to the page's commands; ``help: COMMAND`` compares
lines with that command's help; the ``python`` blocks of a page run one after the other. In shown output ``...`` stands
for any lines, ``…`` for the rest of a line, a number for any number.
"""

import ast
import io
import os
import re
import shlex
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from specctl import __main__ as entry
from specctl.benchmark.papers import PAPERS, PEERS
from specctl.conversation import SLASHES
from specctl.policies import POLICIES
from specctl.profile.schema import model_path
from specctl.replay.recording import metering

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = (
    "generate",
    "chat",
    "serve",
    "bench",
    "calibrate",
    "analyze",
    "train-head",
    "train-draft",
    "doctor",
    "profiles",
    "words",
)
SUBCOMMANDS = ("list", "show", "check", "path", "new")
DIALECT = (
    r"\b(?:(?:foretell\w*|foretold|told|tells|refus\w+|so many|so much|whoever|nobody|beside|likewise|in law|as ever)\b"
    r"|all the same\b|as of `|in (?:the|its) stead\b|in the place of\b|behind\b(?! (?:one|a) (?:port|proxy)))"
)
_MARKED = re.compile(r"^<!-- (\w+)(?:: (\S+))? -->\n```(\w*)\n(.*?)^```$", re.M | re.S)
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


class Marked(NamedTuple):
    """A marked fence: the mark's action, its argument, and the text of the fence."""

    page: Path
    mark: str
    argument: str | None
    text: str


class Ran(NamedTuple):
    """An exit code, and standard output followed by standard error."""

    code: int
    output: str


def marked(mark: str) -> list[Marked]:
    found = [
        Marked(page, *match.group(1, 2, 4)) for page in PAGES for match in _MARKED.finditer(page.read_text("utf-8"))
    ]
    return [one for one in found if one.mark == mark]


def prose(page: Path) -> str:
    """The page without its fences."""
    return _FENCE.sub("", page.read_text("utf-8"))


def specctl(*arguments: str, stdin: bytes = b"", columns: int = 100) -> Ran:
    """Run the command line in this process, where torch has to be imported only once."""
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for name in ("stdout", "stderr")}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SPECCTL_")]:
            patch.delenv(name)
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("NO_COLOR", "1")
        patch.setenv("TERM", "dumb")
        patch.setattr(sys, "argv", ["specctl", *arguments])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        code = entry._run()
        for stream in streams.values():
            stream.flush()
    return Ran(code, "".join(stream.buffer.getvalue().decode() for stream in streams.values()))


@cache
def help_of(*command: str) -> str:
    """A command's whole help with every option on one line and single spaces."""
    text = specctl(*command, "--help-all", columns=400).output.replace(", -", " -")
    return re.sub(r"[ \t]+", " ", text)


def test_the_readme_is_short() -> None:
    assert 10_000 <= README.stat().st_size <= 12_288


def test_pages_use_the_terms_of_the_field() -> None:
    pages = (*PAGES, ROOT / "CHANGELOG.md")
    assert [f"{page.name}: {word}" for page in pages for word in re.findall(DIALECT, prose(page), re.I)] == []


def test_docstrings_comments_and_messages_use_them_too() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted((ROOT / "specctl").rglob("*.py"))
        for line, text in written_in(path)
        for word in re.findall(DIALECT, text, re.I)
    ]
    assert found == []


def written_in(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and texts of several words in a module, without what they quote as code, with their lines."""
    source = path.read_text("utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, re.sub(r"``.+?``|^ *\w+(?:, \w+)*:", "", node.value, flags=re.M)


# Commands that are run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page's commands run: two folders of models, and the profiles of a clone."""
    for name, model in (("big", "target"), ("small", "draft")):
        (tmp_path / name).mkdir()
        for file in model_path(model).iterdir():
            if file.name != "chat_template.jinja":  # base models, as most examples continue a text
                (tmp_path / name / file.name).symlink_to(file)
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", marked("run"), ids=lambda block: f"{block.page.stem}: {block.text.splitlines()[0]}")
def test_commands_show_what_the_page_shows(block: Marked, folder: Path) -> None:
    for one in marked("file"):
        if one.page == block.page and one.argument:
            (folder / one.argument).write_text(one.text, "utf-8")
    for command, shown in _commands(block.text):
        ran = _run(command)
        assert ran.code == int(block.argument or 0), ran.output
        assert re.fullmatch(_pattern(shown), _numberless(ran.output).rstrip("\n") + "\n"), ran.output


@pytest.mark.parametrize("page", dict.fromkeys(one.page for one in marked("python")), ids=lambda page: page.stem)
@pytest.mark.usefixtures("folder")
def test_python_examples_run_in_their_order(page: Path) -> None:
    names: dict[str, object] = {}
    with patch.multiple(metering, LENGTHS=(0, 1, 4, 40), IN_A_ROW=2, PASSES=metering.WARM_UPS + 1):
        for block in marked("python"):
            if block.page == page:
                exec(compile(block.text, f"{page.name}: {block.text.splitlines()[0]}", "exec"), names)


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, shown = part.replace("\\\n", " ").partition("\n")
        yield command, shown.rstrip("\n").split("\n")


def _run(command: str) -> Ran:
    source, _, piped = command.rpartition(" | ")
    words = shlex.split(piped)
    assert words[0] == "specctl"
    if not source:
        return specctl(*words[1:])
    cat, name = shlex.split(source)
    assert cat == "cat"
    return specctl(*words[1:], stdin=Path(name).read_bytes())


def _numberless(text: str) -> str:
    return re.sub(r"\d+(?:[.,]\d+)*", "0", text)


def _pattern(shown: list[str]) -> str:
    return "".join(
        r"(?:.*\n)*?"
        if line == "..."
        else re.escape(_numberless(line).removesuffix("…")) + (".*" if line.endswith("…") else "") + "\n"
        for line in shown
    )


def test_help_excerpts_are_those_of_the_command() -> None:
    wrong = [
        f"{block.page.name}: {block.argument}: {line}"
        for block in marked("help")
        for line in block.text.splitlines()
        if " ".join(line.replace(", -", " -").split()) not in help_of(block.argument or "")
    ]
    assert wrong == []


def test_commands_and_flags_exist() -> None:
    assert [f"{page.name}: {wrong}" for page in PAGES for wrong in unknown_commands(page)] == []


def unknown_commands(page: Path) -> Iterator[str]:
    """The commands of a page, and flags of its commands, that there are not."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    written = re.findall(r"`specctl ([^`\n]+)`", text) + re.findall(r"^\$ (?:cat \S+ \| )?specctl (.+)$", text, re.M)
    for words in map(str.split, written):
        if words[0].startswith("-"):
            continue
        command = tuple(words[:2]) if words[0] == "profiles" and words[1:] else tuple(words[:1])
        if words[0] not in COMMANDS or (len(command) > 1 and command[1] not in SUBCOMMANDS):
            yield " ".join(command)
            continue
        flags = [flag for flag in words if flag.startswith("--") and flag != "--"]
        yield from (f"{' '.join(command)} has no {flag}" for flag in flags if f" {flag} " not in help_of(*command))


def test_every_quoted_flag_is_some_commands() -> None:
    known = " ".join(map(help_of, COMMANDS))
    wrong = [
        f"{page.name}: {span}"
        for page in PAGES
        for span in quoted(prose(page))
        if span.startswith(("--", *COMMANDS))
        for flag in re.findall(r"(?:^| )(--[\w-]+)", span)
        if f" {flag} " not in known
    ]
    assert wrong == []


# What is named exists


def test_links_lead_somewhere() -> None:
    found = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
    links = [(page, *link) for page in PAGES for link in found.findall(prose(page))]
    lost = [f"{page.name}: {target}#{anchor}" for page, target, anchor in links if not leads(page, target, anchor)]
    assert links
    assert lost == []


def leads(page: Path, target: str, anchor: str) -> bool:
    """Whether a link of a page leads to a heading or file that is there; of the net nothing is known."""
    if target.startswith("http"):
        return True
    other = page.parent / target if target else page
    if not other.exists():
        return False
    headings = re.findall(r"^#+ (.+)$", other.read_text("utf-8"), re.M) if anchor else []
    return not anchor or anchor in [re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings]


def test_files_and_modules_exist() -> None:
    named = [(page.name, name) for page in PAGES for name in files_of(page) if not name.startswith("my-")]
    assert [one for one in named if not any(is_there(at / one[1]) for at in (ROOT, ROOT / "specctl"))] == []


def test_tests_that_their_readme_names_exist() -> None:
    folder = ROOT / "tests"
    named = re.findall(r"`([\w/*]+(?:\.py|/))(?:::\w+)?`", (folder / "README.md").read_text("utf-8"))
    assert len(named) > 50
    assert [one for one in named if not (any(folder.glob(one)) or any(ROOT.glob(one)))] == []


def is_there(path: Path) -> bool:
    """Whether there is such a file, or a package that runs by that name."""
    return path.exists() or (path.with_suffix("") / "__main__.py").exists()


def files_of(page: Path) -> list[str]:
    """The files that a page names, and those of the modules that it names."""
    text = page.read_text("utf-8")
    files = re.findall(r"`([\w-]+/[\w./-]+\.(?:py|md|toml))`", prose(page)) + re.findall(
        r"python (tests/[\w/]+\.py)", text
    )
    files += [f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m (tools\.[\w.]+\w)", text)]
    return files + [f"{name}.py" for name in re.findall(r"# ([\w/]+)\.py: ", text)]


def tables(page: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Every Markdown table as its headings and its rows."""
    for match in re.finditer(r"^\|.*\n\|[-:| ]+\n((?:\|.*\n)+)", page.read_text("utf-8") + "\n", re.M):
        lines = match.group(0).strip().split("\n")
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        yield cells[0], cells[2:]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_readme_has_every_policy() -> None:
    rows = next(rows for headings, rows in tables(README) if headings[0] == "policy")
    assert {name for row in rows for name in quoted(row[0])} == set(POLICIES)


def test_settings_are_those_of_the_policies() -> None:
    rows = next(rows for headings, rows in tables(ROOT / "docs/profiles.md") if headings[0] == "name")
    written = {quoted(row[0])[0]: row[1] for row in rows}
    for name, policy in POLICIES.items():
        defaults = {
            field.name: list(field.default) if isinstance(field.default, tuple) else field.default
            for field in fields(policy)
            if field.init
        }
        shown = re.sub(r", (?=\w+ = )", "\n", written[name].replace("(none)", ""))
        assert tomllib.loads(shown) == defaults, name


def test_the_papers_policies_are_those_that_bench_runs() -> None:
    rows = next(rows for headings, rows in tables(ROOT / "docs/bench.md") if headings == ["candidate", "settings of"])
    written = {name: row[1] for row in rows for name in quoted(row[0])}
    assert written == {entrant.label: entrant.source for entrant in PAPERS} | PEERS


def test_every_slash_command_is_listed_as_help_shows_it() -> None:
    rows = next(rows for headings, rows in tables(ROOT / "docs/chat.md") if headings[0] == "command")
    shown = [f"{name} {slash.argument}".rstrip() for name, slash in SLASHES.items()]
    assert [name for row in rows for name in quoted(row[0])] == shown


def test_every_profile_that_ships_is_listed() -> None:
    rows = next(rows for headings, rows in tables(ROOT / "docs/profiles.md") if headings[0] == "profile")
    assert {name for row in rows for name in quoted(row[0])} == {path.stem for path in ROOT.glob("profiles/*.toml")}


# Columns


def test_every_column_is_defined_once() -> None:
    """Once per section, because the same heading may have another meaning in another command."""
    sections = re.split(r"^## ", (ROOT / "docs/words.md").read_text("utf-8"), flags=re.M)
    for section in sections:
        names = re.findall(r"^\| ([^`|\n][^\n]*?) \| ", section, re.M)
        assert not {name for name in names if names.count(name) > 1} - {"column", "word", "field", "kind", "---"}


def test_every_column_of_a_table_is_defined() -> None:
    defined = {
        row[0].replace("\\|", "|")
        for headings, rows in tables(ROOT / "docs/words.md")
        if headings[0] == "column"
        for row in rows
    }
    names = [re.escape(name).replace("NAME", ".+").replace(r"\ N\ ", r"\ .+\ ") for name in defined]
    missing = [
        column
        for column in sorted(shown_columns())
        if not any(re.fullmatch(name, column) for name in names)
        and not any(re.fullmatch(re.escape(column).replace("WILD", ".*"), name) for name in defined)
    ]
    assert missing == []


def shown_columns() -> set[str]:
    """Headings in the source of every ``Table(title, columns, ...)``, ``WILD`` where a value is put in."""
    found: set[str] = set()
    for path in sorted((ROOT / "specctl").rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        if "Table" not in {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "specctl.reporting.table"
            for alias in node.names
        }:
            continue
        for part in (
            one for one in ast.walk(tree) if isinstance(one, ast.AnnAssign) and isinstance(one.value, ast.Dict)
        ):
            if ast.unparse(part.annotation).startswith("Columns["):
                found |= {text for key in part.value.keys if key is not None for text in _headings(key, part)}
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("Table", "Table.of"):
                    given = [one.value for one in call.keywords if one.arg == "columns"] or call.args[1:2]
                    for columns in given:
                        found |= _headings(columns, function)
    return {column for column in found if column.strip("WILD ")}


def _headings(node: ast.expr, function: ast.AST, seen: frozenset[str] = frozenset()) -> set[str]:
    """Texts in an expression, and in the values that the function assigns or appends to its names."""
    if isinstance(node, ast.Constant):
        return {_plain(node.value)} if isinstance(node.value, str) else set()
    if isinstance(node, ast.JoinedStr):
        return {_plain("".join(str(one.value) if isinstance(one, ast.Constant) else "WILD" for one in node.values))}
    if isinstance(node, ast.Tuple | ast.List):
        return {text for one in node.elts for text in _headings(one, function, seen)}
    if isinstance(node, ast.Starred):
        return _headings(node.value, function, seen)
    if isinstance(node, ast.GeneratorExp | ast.ListComp):
        return _headings(node.elt, function, seen)
    if isinstance(node, ast.Call):
        return {text for one in node.args for text in _headings(one, function, seen)}
    if isinstance(node, ast.Dict):
        return {text for one in node.keys if one is not None for text in _headings(one, function, seen)}
    if isinstance(node, ast.BinOp):
        return _headings(node.left, function, seen) | _headings(node.right, function, seen)
    if isinstance(node, ast.Name) and node.id not in seen:
        values = [
            one.value
            for one in ast.walk(function)
            if isinstance(one, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == node.id for target in one.targets)
        ]
        return {text for value in values for text in _headings(value, function, seen | {node.id})}
    return set()


def _plain(heading: str) -> str:
    """The heading without the arrow that shows whether higher or lower is better."""
    return re.sub(r" [↑↓]$", "", heading)
