"""The engine over processes of this machine. Each process answers several questions at once, one in each place."""

import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import IO, Any, Self

from specctl.processes import child_command
from specctl.text_engine.child import Frames, framed
from specctl.text_engine.engine import MOST_FAILURES, Answered, Event, Lost, Part, Places, Restarted
from specctl.text_engine.job import Job, ReplicaError

BEAT = 5.0  # Seconds between two heartbeats
SILENCE = 24  # After this many missing heartbeats a replica counts as dead; this also catches stopped processes


@dataclass(slots=True, eq=False)
class _Replica:
    """One process, or the slot for one."""

    number: int
    process: subprocess.Popen[bytes]
    frames: Frames
    places: Places  # its places and questions
    ready: bool = False
    unsent: bytes = b""  # bytes of a question that did not fit into the pipe yet
    heard: float = field(default_factory=monotonic)  # the time of the last heartbeat
    errors: bytes = b""
    said: str = ""  # the last line of its standard error


class ProcessEngine:
    """Processes in their own sessions: Ctrl-C in a terminal does not reach them, and the system schedules each like a
    command of its own.

    They end with this process, however it ends, because their standard input closes. Their standard error is passed on,
    each line with the process's number.

    Args:
        job: what each does.
        environments: additional environment variables for each process, set before anything is imported.
        say: called with each line of their standard error.
        warn: receives a message when a process ends.
        one_by_one: start each process once the previous one is ready. Needed if loading uses much shared memory, or if
            the first process compiles code that the others reuse.
        beat: seconds between two heartbeats.
        places: the most questions that each process takes at once; its own engine may take fewer.
        name: what messages call a single process; by default the processes are numbered.

    Attributes:
        places: as given.
        about: `HereEngine.about` of the process that was ready last; None without one.
    """

    def __init__(
        self,
        job: Job,
        environments: Sequence[Mapping[str, str]],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        *,
        one_by_one: bool = False,
        beat: float = BEAT,
        places: int = 1,
        name: str | None = None,
    ) -> None:
        self._job, self._environments, self._say, self._warn = job, environments, say, warn
        self._beat, self._silence, self.places, self._name = beat, SILENCE * beat, places, name
        self.about: Any = None
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()  # rung by `wake`
        self._rope.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._replicas: dict[int, _Replica] = {}
        self._said: set[str] = set()
        self._served = False  # whether any has been ready
        self._unborn = list(range(len(environments)))
        self._at_once = 1 if one_by_one else len(environments)
        try:
            self._start_more()
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        return len(self._environments) * self.places

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [replica.process.pid for replica in self._replicas.values()]

    @property
    def ready(self) -> int:
        """The number of ready processes."""
        return sum(one.ready for one in list(self._replicas.values()))

    def free(self) -> list[int]:
        """See `TextEngine`; places of the process with the fewest questions come first."""
        ready = [one for one in self._replicas.values() if one.ready]
        ready.sort(key=lambda one: (len(one.places.asked), one.number))
        return [one.number * self.places + place for one in ready for place in one.places.free()]

    def submit(self, place: int, question: Any) -> None:
        number, its_place = divmod(place, self.places)
        one = self._replicas[number]
        one.places.asked.add(its_place)
        self._send(one, (its_place, question))

    def cancel(self, place: int) -> None:
        number, its_place = divmod(place, self.places)
        one = self._replicas[number]
        one.places.cancelled.add(its_place)
        self._send(one, (its_place, None))

    def wake(self) -> None:
        with suppress(OSError):  # the pipe is full of wake-ups already, or closed
            self._rope.send(b"!")

    def step(self, seconds: float | None = None) -> list[Event]:
        due = min(one.heard for one in self._replicas.values()) + self._silence
        patience = max(0.0, due - monotonic())
        found: list[Event] = []
        for key, _ in self._selector.select(patience if seconds is None else min(seconds, patience)):
            if key.data is None:
                self._bell.recv(1 << 10)
                continue
            one: _Replica = key.data[0]
            what = key.data[1]
            if self._replicas.get(one.number) is not one:
                continue  # it was just replaced
            if what == "questions":
                self._write(one)
            elif what == "errors":
                self._pass_on(one)
            else:
                found += self._hear(one)
        for each in list(self._replicas.values()):
            if monotonic() - each.heard > self._silence:
                found += self._bury(each, f"gave no sign of life for {self._silence:.0f} s")
        return found

    def close(self) -> None:
        for one in self._replicas.values():
            self._end(one)
        self._replicas.clear()
        for left in (self._selector, self._bell, self._rope):
            left.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_more(self) -> None:
        for number in self._unborn[: self._at_once]:
            self._unborn.remove(number)
            self._replicas[number] = self._born(number, Places(self.places))

    def _born(self, number: int, places: Places) -> _Replica:
        process = subprocess.Popen(
            child_command("specctl.text_engine.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, **self._environments[number]},
            start_new_session=True,
        )
        questions, answers, errors = _pipes(process)
        one = _Replica(number, process, Frames(answers.fileno()), places)
        for stream in (questions, answers, errors):
            os.set_blocking(stream.fileno(), False)
        self._selector.register(answers, selectors.EVENT_READ, (one, "answers"))
        self._selector.register(errors, selectors.EVENT_READ, (one, "errors"))
        self._send(one, (number, self._job, self._beat))
        return one

    def _send(self, one: _Replica, value: Any) -> None:
        one.unsent += framed(value)
        self._write(one)

    def _write(self, one: _Replica) -> None:
        """Write as much as the pipe takes, and watch for room for the rest."""
        questions = _pipes(one.process)[0]
        with suppress(BlockingIOError, BrokenPipeError):  # the end of its output reports its death
            one.unsent = one.unsent[os.write(questions.fileno(), one.unsent) :]
        watched = questions in self._selector.get_map()
        if one.unsent and not watched:
            self._selector.register(questions, selectors.EVENT_WRITE, (one, "questions"))
        elif not one.unsent and watched:
            self._selector.unregister(questions)

    def _hear(self, one: _Replica) -> list[Event]:
        found: list[Event] = []
        one.heard = monotonic()  # a part of a long answer also counts as a heartbeat
        for kind, value in one.frames.arrived():
            if kind == "ready":
                one.ready = self._served = True
                if value is not None:
                    count, self.about = value
                    one.places.count = min(count, self.places)
                self._start_more()
            elif kind == "answer":
                place, answer = value
                if one.places.answered(place):
                    found.append(Answered(one.number * self.places + place, answer))
            elif kind in ("part", "restarted"):
                place, part = value
                if place not in one.places.cancelled:
                    here = one.number * self.places + place
                    found.append(Part(here, part) if kind == "part" else Restarted(here))
            elif kind == "failed" and (one.ready or not self._served):
                raise value
            elif kind == "failed":  # the others go on; there may be no memory for one more
                return [*found, *self._bury(one, f"cannot be loaded: {value.args[0] if value.args else value}")]
        return [*found, *self._bury(one, None)] if one.frames.ended else found

    def _bury(self, one: _Replica, why: str | None) -> list[Event]:
        """Remove a dead replica and start another in its slot, unless too many have failed there."""
        self._end(one)
        why = why or _how(one.process.returncode, one.said)
        name, alone = self._name or f"replica {one.number + 1}", len(one.places.asked) == 1
        # A question that ends a server's process is given up; the next one may be answered.
        by_question = one.ready and bool(one.places.asked) and self._job.restarts
        lost = one.places.lost(counts=not by_question)
        failures = one.places.failures
        del self._replicas[one.number]
        hopeless = self._name is not None and not self._served  # the only one, and it has never been ready
        if failures <= MOST_FAILURES and not hopeless:
            self._warn(f"{name} {why}{'' if one.ready else ' while it was starting'}; it is started again")
            self._replicas[one.number] = self._born(one.number, one.places)
        elif self._name is not None:
            raise ReplicaError(f"{name} {why}")
        else:
            self._warn(f"{name} {why}, for the {failures}th time in a row; the others go on without it")
            self._start_more()
        if not self._replicas:
            raise ReplicaError(
                f"no replica is left: the last one {why}",
                "Fewer --workers need less memory; what was finished is kept, and --resume goes on from there.",
            )
        places = [one.number * self.places + place for place in lost] if one.ready else []
        return [Lost(place, f"{name} {why}", alone=alone) for place in places]

    def _end(self, one: _Replica) -> None:
        """End a process with all its children, and pass on its last output."""
        if one.frames.ended and hasattr(os, "waitid"):  # it is about to exit, and its exit code is wanted
            os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        self._pass_on(one, last=True)
        for stream in _pipes(one.process):
            with suppress(KeyError, ValueError):
                self._selector.unregister(stream)
            stream.close()

    def _pass_on(self, one: _Replica, *, last: bool = False) -> None:
        """Pass on lines from a replica's standard error; repetitions by other replicas are dropped."""
        errors = _pipes(one.process)[2]
        while True:
            try:
                found = os.read(errors.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not found:
                with suppress(KeyError):
                    self._selector.unregister(errors)
                break
            one.errors += found
        *lines, one.errors = one.errors.split(b"\n")
        if last and one.errors:
            lines, one.errors = [*lines, one.errors], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            one.said = text or one.said
            if text and self._name is not None:
                self._say(text)
            elif text and text not in self._said:
                self._said.add(text)
                self._say(f"replica {one.number + 1}: {text}")


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    """A process's standard input, output and error."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdin, process.stdout, process.stderr


def _how(code: int, said: str) -> str:
    """How a process ended, with its last words where it ended itself."""
    if code < 0 and -code != signal.SIGABRT:
        return f"was ended by signal {-code}"
    last = said.removeprefix("error: ")
    return (f"ended with exit code {code}" if code >= 0 else "aborted") + (f" ({last})" if last else "")
