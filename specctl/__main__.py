"""Entry point: turns exceptions into messages and exit codes."""

import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from specctl.errors import OutputError, SpecctlError, reason
from specctl.models.files.library_calls import hush_imports
from specctl.outputs import name_standard_output
from specctl.processes import exceeded, interrupt
from specctl.streams import Closed, replace_closed
from specctl.terminal.output import print_message

INTERRUPTED = 130
CLOSED_PIPE = 141
TERMINATED = 143


def main() -> NoReturn:
    """Run the command line and exit."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell lets jobs ignore it
        signal.signal(signal.SIGINT, interrupt)
    replace_closed()
    name_standard_output()
    _wait_passively()
    code = _run()
    gc.freeze()  # Python would look through all objects of the libraries once more, which can take a second
    sys.exit(_flush(silent=code != 0) or code)


def _wait_passively() -> None:
    """Let threads that wait for each other sleep, unless the environment says what they do.

    By default they spin: where another process has one of their cores, each step of a pass then takes as long as that
    process's turn. OpenMP reads this when it is loaded, so it must be said before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _run() -> int:
    hush_imports()
    try:
        # Imported here so that an interrupt during the import is handled like any other.
        from specctl.commands.app import app

        app()
    except SystemExit as stop:
        return _exit_code(stop)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return CLOSED_PIPE
    except Exception as error:
        return INTERRUPTED if interrupt.became(error) else _told(error)
    return 0


def _told(error: Exception) -> int:
    """Tell the user; the exit code."""
    if isinstance(error, SpecctlError):
        _report(error, error.message, error.hint)
        return error.exit_code
    if (limit := exceeded(error)) is not None:
        _report(error, *limit)
        return SpecctlError.exit_code
    said = reason(error)
    message = f"{type(error).__name__}: {said}" if said else type(error).__name__
    _report(error, message, "Set SPECCTL_DEBUG=1 to see where it happened.")
    return 1


def _exit_code(stop: SystemExit) -> int:
    """The exit code; an interrupt or a closed pipe that Typer and rich report as 1 gets its own code."""
    if stop.code == 1:
        causes = list(_causes(stop))
        if any(isinstance(cause, BrokenPipeError) for cause in causes):
            return CLOSED_PIPE
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            return INTERRUPTED
    if isinstance(stop.code, str):
        print_message(stop.code)
        return 1
    return stop.code or 0


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__context__
    while cause is not None:
        yield cause
        cause = cause.__context__


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(TERMINATED)  # as an exception, so that `finally` blocks run


def _report(error: Exception, message: str, hint: str) -> None:
    if os.environ.get("SPECCTL_DEBUG", "0") not in {"", "0"}:
        print_message("".join(traceback.format_exception(error)).rstrip("\n"))
    print_message(f"{message}\n{hint}".rstrip("\n"), "error", "1;31")


def _flush(*, silent: bool) -> int:
    """Flush the output; return an exit code if data was lost, else 0. At exit Python could only print a warning.

    Args:
        silent: whether the loss goes without a message, because there was one before.
    """
    code = 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Closed) or stream.closed:
            continue
        try:
            stream.flush()
        except (OSError, OutputError) as error:
            code = CLOSED_PIPE if isinstance(error, BrokenPipeError) else 1
            if code == 1 and not silent:
                _report(error, str(error), "")
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


if __name__ == "__main__":
    main()
