"""The arrows between rooms are those that docs/architecture.md draws."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "specctl"
PARTED = {"models"}
"""Folders whose own folders are rooms."""


def room_of(module: str) -> str:
    """The room of a dotted module name, such as ``models.running`` for ``specctl.models.passes.cache``."""
    parts = module.split(".")[1:]
    if not parts or parts[0] in ("__main__", "__init__"):
        return "entry"
    if parts[0] in PARTED:
        return ".".join(parts[:2])
    return parts[0]


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and full name of every module of the package that a file imports, inside functions too."""
    return tuple(found_imports(path))


def found_imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("specctl", "tools"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if is_module(full) else node.module
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names if a.name.split(".")[0] in ("specctl", "tools"))


def allowed() -> dict[str, set[str]]:
    """The table of docs/architecture.md: for each room the rooms that it may import."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| room \| may import \|\n\| --- \| --- \|\n((?:\|.*\n)+)", page, re.M)
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()]
    rooms = [row[0] for row in rows]
    found: dict[str, set[str]] = {}
    for room, cell in rows:
        names = {name.strip() for name in cell.split(",") if name.strip()}
        if "everything" in names:
            names = set(rooms)
        if "models.*" in names:
            names = names - {"models.*"} | {other for other in rooms if other.startswith("models.")}
        assert names <= set(rooms), f"{room} may import {names - set(rooms)}, which is no room"
        found[room] = names
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_room_is_in_the_picture() -> None:
    rooms = {room_of(module_name(path)) for path in FILES} - {"entry", "models"}
    assert rooms == set(allowed())


def test_arrows_between_rooms_are_as_drawn() -> None:
    may = allowed()
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in FILES
        if (own := room_of(module_name(path))) != "entry"
        for line, module in imports(path)
        if (room := room_of(module)) not in ("entry", own) and room not in may.get(own, set())
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_upward() -> None:
    """The table itself has no circle: rooms can be stacked so that every arrow points down."""
    left = {room: set(below) - {room} for room, below in allowed().items()}
    while free := {room for room, below in left.items() if not below}:
        left = {room: below - free for room, below in left.items() if room not in free}
    assert not left, f"these rooms import each other: {sorted(left)}"


def imported(path: Path) -> set[str]:
    """The modules that a module of the package imports, inside functions too."""
    found, own = set[str](), module_name(path)
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        if typing_only(node := waiting.pop()):
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if is_module(name) else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("specctl.") and name != own}


def typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def in_circles(imports: dict[str, set[str]]) -> set[str]:
    """The modules from which a chain of imports leads back to themselves."""

    def leads_back(module: str) -> bool:
        seen, waiting = set[str](), [*imports[module]]
        while waiting:
            if (other := waiting.pop()) == module:
                return True
            if other not in seen:
                seen.add(other)
                waiting.extend(imports.get(other, ()))
        return False

    return {module for module in imports if leads_back(module)}


def test_no_modules_import_each_other() -> None:
    assert in_circles({module_name(path): imported(path) for path in FILES}) == set()


def test_circles_are_found() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}


def test_the_package_does_not_need_the_tools() -> None:
    assert not [f"{path}:{line}" for path in FILES for line, module in imports(path) if module.startswith("tools")]


def test_replay_reads_no_models_but_to_record() -> None:
    """What plays policies on traces imports no torch, however indirectly."""
    modules = [module_name(path) for path in FILES if path.parent == PACKAGE / "replay"]
    program = f"import sys\nfor name in {modules}:\n    __import__(name)\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT).returncode == 0
