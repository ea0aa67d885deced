"""The system's limits on a process, as messages."""

import errno


def exceeded(error: BaseException) -> tuple[str, str] | None:
    """Which limit an exception tells of, and how to raise it; None where it tells of none."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            "too many files are open: this process may open no more",
            "Raise the limit with `ulimit -n 4096`, or use fewer --workers, each of which takes three.",
        )
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return (
            "no more threads can be started: the system limits memory or processes",
            "Raise the limit (`ulimit -u`, `ulimit -v`, or the container's), or use fewer --workers or --threads.",
        )
    return None
