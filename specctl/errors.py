"""Errors meant for people: what went wrong, how to mend it, and the exit code it deserves."""


class SpecctlError(Exception):
    """A mistake the user can mend; shown as one message without a traceback.

    Args:
        message: what went wrong and where.
        hint: how to mend it, or an empty string.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class UsageError(SpecctlError):
    """A wrong flag or argument."""

    exit_code = 2


class ProfileError(SpecctlError):
    """A profile that cannot be found, read, or believed."""

    exit_code = 2


class ModelError(SpecctlError):
    """A model that cannot be loaded, does not fit, or does not pair with the other."""

    exit_code = 3


class RecordError(SpecctlError):
    """One bad input record; processing goes on with the next.

    Args:
        kind: a stable word for programs, such as ``invalid_json``.
        message: what is wrong with it.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
