"""The processes of a leader's followers: started, listened to, ended."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from specctl.errors import ModelError
from specctl.outputs.locks import locked, remove_abandoned
from specctl.processes.arrivals import Arrivals
from specctl.processes.children import child_command

PROGRAM = "specctl.models.loading.follower"
GRACE = 20.0
"""Seconds after a follower's death in which a pass of the leader's may fail by itself. Then the process ends: NCCL
waits for a dead rank without end, in code that no exception reaches."""
PATIENCE = 2.0
"""Seconds that a pass gets to end after the signals that are to end it. Then its followers are killed, which ends it
with an error: a follower that was stopped takes no part in it, and the leader waits in native code."""
LAST_WORDS = 5.0
"""Seconds in which a follower's death becomes known after a collective failed because of it."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a follower ended.

    Attributes:
        rank: its own.
        error: what to tell a user.
        at: `monotonic` seconds.
    """

    rank: int
    error: ModelError
    at: float


class Followers:
    """Followers on this machine, each a process of its own that ends when this one does.

    Args:
        size: how many ranks there are, this process's included.

    Attributes:
        store: the file by which the ranks find each other.
        death: the first follower's that ended unasked; None while all live.
        given_up: the signal because of which all were killed in the middle of a pass.
    """

    def __init__(self, size: int) -> None:
        self._folder = MeetingFolder()
        self.store = self._folder.path / "store"
        self.size = size
        self.death: Death | None = None
        self._stopping = False
        self.given_up: int | None = None
        self._pass_since: float | None = None
        self._presses = 0
        self._arrivals = Arrivals(self._heard)
        self._said: queue.Queue[str] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            ear, mouth = os.pipe()
            log = self._log(rank).open("wb")
            process = subprocess.Popen(
                [*child_command(PROGRAM), str(self.store), str(rank), str(size), str(mouth)],
                stdin=subprocess.PIPE,  # nothing is written to it: its end is the end of this process
                stdout=log,
                stderr=log,
                pass_fds=[mouth],
                start_new_session=True,  # Ctrl-C is the leader's alone
            )
            log.close()
            os.close(mouth)
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(rank, process, ear), daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Their process ids, in the order of their ranks."""
        return [process.pid for process in self._processes]

    def wait_for(self, word: str) -> None:
        """Wait until every follower has said a word.

        Raises:
            ModelError: one of them ended, for the reason that it gave.
        """
        missing = self.size - 1
        while missing:
            try:
                missing -= self._said.get(timeout=0.2) == word
            except queue.Empty:
                if self.death is not None:
                    raise self.death.error from None

    def began_pass(self, presses: int = 2) -> None:
        """A pass that needs all ranks has begun; Ctrl-C pressed so many times is to end it."""
        self._presses = presses
        self._pass_since = monotonic()

    def ended_pass(self) -> None:
        self._pass_since = None

    def last_words(self) -> ModelError | None:
        """Why a follower ended, after something failed that its end would explain; None if all live."""
        until = monotonic() + LAST_WORDS
        while self.death is None and monotonic() < until:
            sleep(0.05)
        return None if self.death is None else self.death.error

    def stop(self) -> None:
        """End all of them."""
        self._stopping = True
        self._arrivals.close()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.remove()

    def _log(self, rank: int) -> Path:
        return self._folder.path / f"rank{rank}.log"

    def _listen(self, rank: int, process: "subprocess.Popen[bytes]", ear: int) -> None:
        """Note what a follower says, and its end."""
        reason: tuple[str, str] | None = None
        with os.fdopen(ear, encoding="utf-8") as lines:
            for line in lines:
                told = json.loads(line)
                if isinstance(told, str):
                    self._said.put(told)
                else:
                    reason = told["message"], told["hint"]
        code = process.wait()
        if self._stopping or self.death is not None:
            return
        self.death = Death(rank, self._obituary(rank, code, reason), monotonic())
        self._end_a_stuck_pass(self.death)

    def _heard(self, number: int) -> None:
        """Note a signal that arrived, from a thread, and end the pass under way if it is stuck."""
        since = self._pass_since
        if since is None:
            return
        self._presses -= number == signal.SIGINT
        if number == signal.SIGTERM or self._presses == 0:
            sleep(PATIENCE)
            if self._pass_since == since and not self._stopping:
                self.given_up = number
                for process in self._processes:
                    process.kill()

    def _end_a_stuck_pass(self, death: Death) -> None:
        while not self._stopping:
            sleep(0.5)
            since = self._pass_since
            if since is not None and monotonic() - max(since, death.at) > GRACE:
                if self.given_up is None:
                    print(f"error: {death.error}", file=sys.stderr, flush=True)
                with suppress(OSError):
                    self._folder.remove()
                os._exit(ModelError.exit_code if self.given_up is None else 128 + self.given_up)

    def _obituary(self, rank: int, code: int, reason: tuple[str, str] | None) -> ModelError:
        subject = f"Process {rank + 1} of the {self.size} that hold the sharded models"
        if reason is not None:
            return ModelError(f"{subject} failed: {reason[0]}", reason[1])
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        log = [line for line in _tail(self._log(rank)) if line.strip()]
        said = f": {log[-1].strip()}" if log and code >= 0 else ""
        return ModelError(
            f"{subject} {how}{said}.",
            "Run the command again, with --resume where it writes an output. If it happens again, see whether memory "
            "ran out: `specctl doctor` shows what each card must hold.",
        )


def _tail(path: Path) -> Sequence[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    except OSError:
        return []


PREFIX = "specctl-shards-"
_LOCK = "lock"


class MeetingFolder:
    """A folder of this user's among the temporary files; locked, so that others see that its process lives.

    Those of leaders that were killed are removed.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            remove_abandoned(left, left / _LOCK)
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self.path = Path(self._folder.name)
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        locked(self._lock)

    def remove(self) -> None:
        """Remove it with what is in it."""
        os.close(self._lock)
        self._folder.cleanup()
