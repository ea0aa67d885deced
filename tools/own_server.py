"""A server of a tool's own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_server(*flags: str) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    """The URL of a server with these flags, and its process, which has ended behind the block.

    What it says is thrown away: a line for each request would fill a pipe that nobody reads.
    """
    command = [sys.executable, "-m", "specctl", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(found[0] for line in process.stderr if (found := re.search(r"http://[^/]+", line)))
        log = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        try:
            yield url, process
        finally:
            process.terminate()
            process.wait(60)
            log.wait(10)
