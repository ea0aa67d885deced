"""Distributions with entry points, as pip leaves them, written into a folder on ``sys.path``."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from specctl.plugins import DRAFTERS
from specctl.policies import POLICIES


def write_distribution(folder: Path, name: str, entries: Mapping[str, Mapping[str, str]], **modules: str) -> None:
    """An installed distribution of version 1.0.

    Args:
        folder: to be put on ``sys.path``.
        name: of the distribution.
        entries: for each group the entry points by name.
        modules: for each module its source.
    """
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in named.items()) for group, named in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """With the distributions of a folder."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    refresh()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for module in folder.glob("*.py"):
            if module.stem not in before:
                sys.modules.pop(module.stem, None)
        refresh()


def refresh() -> None:
    POLICIES.refresh()
    DRAFTERS.refresh()
