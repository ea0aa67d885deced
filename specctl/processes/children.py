"""Child processes in Python."""

import os
import sys


def child_command(module: str) -> list[str]:
    """The command of a child process that runs a module's ``main``; further words are its arguments.

    The child imports from where this process does, whatever its own first folder is.
    """
    paths = [os.path.abspath(path) for path in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; from {module} import main; main()"]
