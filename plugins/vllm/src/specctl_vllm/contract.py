"""What the plugin relies on in vLLM, checked on the installed sources without importing them.

Of each function that is overridden or whose behaviour exactness hangs on, `known_sources.json` has for every
version that was read the parameters and a fingerprint of the source.
"""

import ast
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from specctl.errors import ModelError, UsageError

TOLD = 3
"""Differences that a message names."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """A function as a file has it.

    Attributes:
        parameters: their names in order, with commas.
        fingerprint: of its source.
    """

    parameters: str
    fingerprint: str


Known = Mapping[str, Mapping[str, Source]]
"""By place, such as ``v1/worker/gpu_worker.py:Worker.load_model``, the source in each version of vLLM that was read."""


@cache
def known_sources() -> Known:
    """What the plugin was written for."""
    table = json.loads((files(__package__) / "known_sources.json").read_text(encoding="utf-8"))
    return {place: {version: Source(**one) for version, one in known.items()} for place, known in table.items()}


def known_versions() -> list[str]:
    """The versions of vLLM whose sources were read."""
    return sorted({version for versions in known_sources().values() for version in versions})


def installed_package() -> Path:
    """The folder of the installed package.

    Raises:
        ModelError: vLLM is not installed.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ModelError("vLLM is not installed", f"Known versions: {', '.join(known_versions())}")
    return Path(spec.origin).parent


def check_contract(package: Path, known: Known | None = None) -> None:
    """Compare vLLM's sources with those that were read.

    Args:
        package: the folder ``vllm`` with the sources.
        known: what to compare with; all that the plugin knows unless given.

    Raises:
        UsageError: something differs; the message names it, the hint the versions that are known.
    """
    if found := differences(package, known_sources() if known is None else known):
        more = f"; and {len(found) - TOLD} more" if len(found) > TOLD else ""
        raise UsageError(
            f"specctl-vllm does not know this vLLM and does not start in it: {'; '.join(found[:TOLD])}{more}",
            f"Known versions: {', '.join(known_versions())}. Install one of them, or serve without --worker-cls.",
        )


def differences(package: Path, known: Known) -> list[str]:
    """What differs from every known version, a phrase for each function."""
    found = []
    for place, versions in known.items():
        source = read_function(package, place)
        if source is None:
            found.append(f"{place} is not there")
        elif source.parameters not in (expected := {each.parameters: None for each in versions.values()}):
            found.append(f"{place} takes ({source.parameters}) instead of ({') or ('.join(expected)})")
        elif source not in versions.values():
            found.append(f"{place} has another source than in {' and '.join(versions)}")
    return found


def read_function(package: Path, place: str) -> Source | None:
    """The function at a place; None if it is not there."""
    name, _, dotted = place.partition(":")
    path = package / name
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(text).body
    *classes, last = dotted.split(".")
    for wanted in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == wanted), [])
    node = next((each for each in body if isinstance(each, Function) and each.name == last), None)
    return None if node is None else Source(_parameters(node), _fingerprint(text.splitlines(), node))


def _parameters(node: Function) -> str:
    arguments = node.args
    return ", ".join(each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _fingerprint(lines: list[str], node: Function) -> str:
    """Of a function's lines without indentation, empty lines, whole-line comments and its docstring.

    It is taken from the text, since what Python makes of a syntax tree differs from version to version.
    """
    first = node.body[0]
    told = range(first.lineno, (first.end_lineno or first.lineno) + 1) if ast.get_docstring(node) is not None else ()
    numbered = enumerate(lines[node.lineno - 1 : node.end_lineno], start=node.lineno)
    kept = [stripped for number, line in numbered if number not in told and (stripped := line.strip())]
    return sha256("\n".join(line for line in kept if not line.startswith("#")).encode()).hexdigest()[:16]


def with_version(package: Path, version: str) -> str:
    """The text of `known_sources.json` with one more version, whose sources somebody has read.

    Raises:
        UsageError: a function is not there.
    """
    table = {}
    for place, known in known_sources().items():
        source = read_function(package, place)
        if source is None:
            raise UsageError(f"{place} is not in vLLM {version}", "The plugin has to be changed for this version.")
        sources = {**known, version: source}
        table[place] = {each: asdict(sources[each]) for each in sorted(sources)}
    return json.dumps(table, indent=2) + "\n"


if __name__ == "__main__":  # python -m specctl_vllm.contract VLLM_FOLDER VERSION > known_sources.json
    print(with_version(Path(sys.argv[1]), sys.argv[2]), end="")
