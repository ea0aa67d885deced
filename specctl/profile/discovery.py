"""Where profile files are, and how a profile name is resolved to a file."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from specctl.errors import ProfileError
from specctl.profile.wording import brief, did_you_mean

DEFAULT_PROFILE = "embedded"
HERE = Path("profiles")
"""Where profiles of the working directory are found by name."""

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
    return [HERE, user_directory(environ), packaged_directory()]


def found_here(path: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a file is in ./profiles, which may be anyone's, not the user's or the program's own folder."""
    return _same(path.parent, HERE) and not owned(path, environ)


def owned(path: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a file is one of the user's own profiles or ships with the program."""
    return any(_same(path.parent, directory) for directory in directories(environ)[1:])


def shadowed(path: Path, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The user's own or packaged profile that a file in ./profiles hides, if it hides one and says something else."""
    if not found_here(path, environ):
        return None
    others = (directory / path.name for directory in directories(environ)[1:])
    hidden = next((other for other in others if _is_file(other)), None)
    return None if hidden is None or _same_text(path, hidden) else hidden


def available(environ: Mapping[str, str] = os.environ) -> dict[str, Path]:
    """The file of every profile that can be found by name, sorted by name."""
    found: dict[str, Path] = {}
    for directory in directories(environ):
        for path in directory.glob("*.toml"):
            found.setdefault(path.stem, path)
    return dict(sorted(found.items()))


def chosen(name: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The file of a profile, by default of the one named in SPECCTL_PROFILE, else of the packaged default profile.

    Raises:
        ProfileError: there is no such file.
    """
    name = name or environ.get("SPECCTL_PROFILE")
    return find(name, environ) if name else packaged_directory() / f"{DEFAULT_PROFILE}.toml"


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
        path = _expanded(name)
        if extended_by is not None:
            path = extended_by.parent / path
        if _is_file(path):
            return path
        raise ProfileError(f"there is no profile file {brief(display(path))}")
    for path in _candidates(name, environ, extended_by):
        if _is_file(path) and not (extended_by is not None and path.samefile(extended_by)):
            return path
    raise ProfileError(f"there is no profile named '{brief(name)}'{did_you_mean(name, available(environ))}")


def display(path: Path) -> str:
    """A path for messages: relative if it is below the current directory, else absolute."""
    absolute = path.absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def is_path(name: str) -> bool:
    """Whether a profile is given by path."""
    return name.endswith(".toml") or "/" in name or os.sep in name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _same_text(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def _candidates(name: str, environ: Mapping[str, str], extended_by: Path | None) -> Iterator[Path]:
    if extended_by is not None:
        yield extended_by.parent / f"{name}.toml"
    for directory in directories(environ):
        yield directory / f"{name}.toml"


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # no such user, or no home folder
        return Path(name)
