"""Errors for users: what is wrong, how to fix it, and the exit code."""

import re
import sys
from json import JSONDecodeError
from typing import Any

DISTRIBUTION = "specctl-llm"  # What the package index and pip call specctl; `specctl` there is an unrelated program
_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)[^;]*")
"""A line of metadata as `importlib.metadata.requires` gives it, up to its marker; the first group is the name."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception of Python, torch or onnxruntime reports it; neither library is imported."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    # On a CPU they have no class of their own for it.
    found = "DefaultCPUAllocator" if type(error) is RuntimeError else "Failed to allocate memory"
    return found in str(error) and (type(error) is RuntimeError or of_onnxruntime(error))


def of_onnxruntime(error: BaseException) -> bool:
    """Whether onnxruntime raised an exception: its classes have no base of their own."""
    return type(error).__module__.startswith("onnxruntime.")


def reason(error: BaseException) -> str:
    """An exception's message in one line: its first line, and the next one after a colon at its end."""
    lines = [stripped for line in str(error).splitlines() if (stripped := line.strip())]
    count = next((number for number, line in enumerate(lines, start=1) if not line.endswith(":")), len(lines))
    return " ".join(lines[:count])


def pip_install(*libraries: str) -> str:
    """The command that installs libraries, each with the least version that specctl's own installed metadata asks for.

    It names the libraries and not an extra of specctl, so it works however specctl was installed.

    Args:
        libraries: names of distributions.
    """
    from importlib.metadata import PackageNotFoundError, requires  # slow to import, and rarely needed

    try:
        required = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # specctl runs from a folder in which it was not installed
        required = []
    known = {found[1].lower(): found[0].strip() for line in required if (found := _REQUIREMENT.match(line)) is not None}
    return " ".join(["pip install", *(f'"{known.get(name.lower(), name)}"' for name in libraries)])


class SpecctlError(Exception):
    """A problem that the user can fix; shown as a message without a traceback.

    Args:
        message: what is wrong and where.
        hint: how to fix it, or an empty string.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.add_note(hint)  # in tracebacks, and not in `str`, which programs show next to the hint

    @property
    def full_message(self) -> str:
        """The message, and below it the hint."""
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(SpecctlError):
    """A wrong flag or argument."""

    exit_code = 2


class ProfileError(SpecctlError):
    """A profile that cannot be found or read, or that has mistakes."""

    exit_code = 2


class OutputError(SpecctlError):
    """An output that can no longer be written, such as on a full disk; what was written before is whole."""


class ModelError(SpecctlError):
    """A model that cannot be loaded, does not fit into memory, or does not match the other models."""

    exit_code = 3


class AbsentError(ModelError):
    """A model whose files are not on this machine, and cannot be fetched now.

    Args:
        message, hint: see `SpecctlError`.
        gated: whether the hub denies access to them.
    """

    def __init__(self, message: str, hint: str = "", *, gated: bool = False) -> None:
        super().__init__(message, hint)
        self.gated = gated


class RecordError(SpecctlError):
    """One bad input record; processing continues with the next record.

    Args:
        kind: a stable identifier for programs, such as ``invalid_json``.
        message: what is wrong with the record.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type["RecordError"], tuple[str, str], dict[str, Any]]:
        """What pickle makes it from: `Exception` keeps the message alone."""
        return type(self), (self.kind, self.message), self.__dict__


DEEPEST = 100


def json_fault(error: ValueError | RecursionError) -> str:
    """Why a text is not JSON, and where, from what `json.loads` raised: ``Expecting value at column 12``."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if not isinstance(error, JSONDecodeError):
        return str(error)
    place = min(error.pos, len(error.doc.rstrip()))  # a text that ends too soon is at fault at its end
    column = place - error.doc.rfind("\n", 0, place)
    line = f"line {error.doc.count(chr(10), 0, place) + 1}, " if "\n" in error.doc.strip() else ""
    return f"{error.msg.removesuffix(' at')} at {line}column {column}"


def too_deep(value: Any, most: int = DEEPEST) -> bool:
    """Whether dictionaries and lists are nested in each other more than ``most`` times."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True
