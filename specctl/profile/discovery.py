"""Where profile files are, and how a profile name is resolved to a file."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from specctl.errors import ProfileError
from specctl.profile.wording import did_you_mean

DEFAULT_PROFILE = "embedded"

_PACKAGE = Path(__file__).parent.parent


def packaged_directory() -> Path:
    """The profiles that ship with the program: inside the wheel, or next to the package in a source checkout."""
    installed = _PACKAGE / "_profiles"
    return installed if installed.is_dir() else _PACKAGE.parent / "profiles"


def user_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a user's own profiles are kept."""
    config = environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "specctl" / "profiles"


def directories(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The directories searched by name, nearest first."""
    return [Path("profiles"), user_directory(environ), packaged_directory()]


def available(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """The file of every profile that can be found by name, sorted by name."""
    found: dict[str, Path] = {}
    for directory in directories(environ):
        for path in directory.glob("*.toml"):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def find(name: str, environ: Mapping[str, str] = os.environ, *, extended_by: Path | None = None) -> Path:
    """The file of a profile given by name or by path.

    Args:
        name: a path if it has a separator or ends in ``.toml``, else a name.
        environ: environment variables; XDG_CONFIG_HOME sets the user's config directory.
        extended_by: the profile file that extends ``name``. Its directory is searched first, and relative paths start
            there. The file never extends itself, so a profile may extend another profile of the same name.

    Raises:
        ProfileError: there is no such file; the message suggests the nearest known profile.
    """
    if is_path(name):
        path = Path(name).expanduser()
        if extended_by is not None:
            path = extended_by.parent / path
        if path.is_file():
            return path
        raise ProfileError(f"there is no profile file {display(path)}")
    for path in _candidates(name, environ, extended_by):
        if path.is_file() and not (extended_by is not None and path.samefile(extended_by)):
            return path
    raise ProfileError(f"there is no profile named '{name}'{did_you_mean(name, available(environ))}")


def display(path: Path) -> str:
    """A path for messages: relative if it is below the current directory, else absolute."""
    absolute = path.absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def is_path(name: str) -> bool:
    """Whether what names a profile is a path."""
    return name.endswith(".toml") or "/" in name or os.sep in name


def _candidates(name: str, environ: Mapping[str, str], extended_by: Path | None) -> Iterator[Path]:
    if extended_by is not None:
        yield extended_by.parent / f"{name}.toml"
    for directory in directories(environ):
        yield directory / f"{name}.toml"
