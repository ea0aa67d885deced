"""A process that answers one JSON line with one JSON line, and is stopped while it is not asked."""

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Self

from specctl.errors import ModelError

HELLO_SECONDS = 120.0
"""How long the first line may take, for which a package is imported."""
NOT_PASSED_ON = ("OMP_", "GOMP_", "KMP_")
"""Beginnings of the environment variables that set up specctl's own threads; a peer has its own defaults."""


class PeerError(ModelError):
    """A peer's process cannot be used, or cannot be used any more."""


class PeerProcess:
    """A process with a process group of its own, which its children share.

    It is stopped (SIGSTOP) but for the time between a question and its answer, so that threads that wait by spinning
    take no time from others. Where this process dies without ending it, the system wakes it up and hangs it up, because
    its group is left without a parent in the session.

    Args:
        label: names it in messages.
        command: its arguments.

    Attributes:
        hello: its first line.

    Raises:
        PeerError: it does not start, or its first line does not come.
    """

    def __init__(self, label: str, command: Sequence[str]) -> None:
        self._label = label
        self._answer = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        environment = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=environment,
                process_group=0,
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{label}: {command[0]} cannot be started: {error.strerror}") from error
        try:
            self.hello = self._exchange(b"", HELLO_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the process, and of its group."""
        return self._process.pid

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a question.

        Raises:
            PeerError: it does not come within so many seconds, is an error, or the process has ended. The process is
                then killed, so that it takes no more time from others.
        """
        self._signal(signal.SIGCONT)
        try:
            return self._exchange(json.dumps(question).encode() + b"\n", seconds)
        except PeerError:
            self._signal(signal.SIGKILL)
            raise

    def close(self) -> None:
        """End the process and its children."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        """Write a line, read a line, and stop the process."""
        text = self._read(line, monotonic() + seconds, seconds)
        self._signal(signal.SIGSTOP)
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise PeerError(f"{self._label}: its process wrote something that is not an answer")
        if "error" in found:
            raise PeerError(f"{self._label}: {found['error']}", str(found.get("hint", "")))
        return found

    def _read(self, line: bytes, deadline: float, seconds: float) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        to, of = self._process.stdin.fileno(), self._process.stdout.fileno()
        while b"\n" not in self._answer:
            readable, writable, _ = select.select([of], [to] if line else [], [], max(0.0, deadline - monotonic()))
            if not readable and not writable:
                raise PeerError(f"{self._label}: its process did not answer within {seconds:.0f} s")
            try:
                if writable:
                    line = line[os.write(to, line[: select.PIPE_BUF]) :]
                if readable:
                    found = os.read(of, 1 << 16)
                    if not found:
                        raise BrokenPipeError
                    self._answer += found
            except BrokenPipeError:
                raise PeerError(f"{self._label}: {self._end()}") from None
        answer, _, self._answer = self._answer.partition(b"\n")
        return answer

    def _end(self) -> str:
        """How the process ended, and the last line that it wrote to standard error."""
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            how = "its process closed its output"
        else:
            how = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4096))
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return f"{how}: {lines[-1].strip()}" if lines else how

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # all of the group have ended
            os.killpg(self._process.pid, number)
