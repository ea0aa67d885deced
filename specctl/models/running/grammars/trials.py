"""Trials of grammars: a separate process compiles each in a fork, so that a slow or large one can be killed.

The program imports neither torch nor numpy, so it starts at once. It reads grammars from standard input, answers each
with a line of JSON on standard output, and ends with the process that started it. A grammar that exceeds its time is
restarted with more time and lower priority. It waits only for others of the same level.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import IO, Any
from weakref import finalize

from specctl.processes import child_command

SECONDS = (0.1, 1.0, 10.0)  # Processor seconds for the first, second and third try of a grammar
NICE = (0, 10, 19)  # The niceness of each try
MEMORY = 512 << 20  # Bytes that compiling may add
OUT_OF_MEMORY = 9
_SENT = frozenset({signal.SIGABRT, signal.SIGKILL, signal.SIGBUS})
"""Signals that kill a process out of memory, from the library or the system."""

Form = str | Mapping[str, Any]  # A tokenizer as JSON, see `Backend` in `specctl.models.files.tokenizer`
Answer = dict[str, Any]
Maker = Callable[[Mapping[str, str]], Answer]
"""Compiles a grammar's ``kind`` and ``text``; the answer has the ``grammar`` to compile, or an ``error``."""


def library_maker(tokenizer: Form, eos: list[int]) -> Maker:
    """The `Maker` for a tokenizer."""
    from specctl.models.running.grammars.grammar_text import compiled, grammar_text, library_tokens, one_line

    tokens = library_tokens(tokenizer, eos)

    def make(asked: Mapping[str, str]) -> Answer:
        try:
            text = grammar_text(asked["kind"], asked["text"], checked=True)
            compiled(tokens, text.grammar)
        except ValueError as error:
            return {"error": f"{asked['kind']}: {error}"}
        except RecursionError:
            return {"error": f"{asked['kind']}: it is nested too deeply"}
        except MemoryError:
            raise
        except Exception as error:  # libraries raise various errors over unexpected input
            return {
                "error": f"{asked['kind']}: it cannot be read ({type(error).__name__}: {one_line(str(error))[:200]})"
            }
        return {"grammar": text.grammar, "schema": text.schema}

    make({"kind": "json_schema", "text": "{}"})  # so that imports happen before the forks
    return make


@dataclass(slots=True)
class Trial:
    """A grammar on trial."""

    asked: Mapping[str, str]  # the request
    level: int = 0  # the number of tries that exceeded their time
    # its process id and the pipe with the answer, while a process runs
    process: tuple[int, int] | None = None
    read: bytearray = field(default_factory=bytearray)  # the part of the answer read so far

    def begin(self, make: Maker) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            try:
                _try(make, self.asked, self.level, writing)
            finally:
                os._exit(1)
        os.close(writing)
        self.process = process, reading
        self.read.clear()

    def end(self) -> int:
        """Kill its process and return the exit status."""
        assert self.process is not None
        process, reading = self.process
        self.process = None
        os.close(reading)
        os.kill(process, signal.SIGKILL)  # it may have exited already; waited for below
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _try(make: Maker, asked: Mapping[str, str], level: int, writing: int) -> None:
    os.closerange(3, writing)  # otherwise readers of the other process's pipes would wait for this one too
    os.closerange(writing + 1, 256)
    os.nice(NICE[level])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (size := _size()) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS[level])  # kills the process by SIGPROF
    before = resource.getrusage(resource.RUSAGE_SELF)
    try:
        answer = make(asked)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    after = resource.getrusage(resource.RUSAGE_SELF)
    answer["seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    answer["bytes"] = max(0, after.ru_maxrss - before.ru_maxrss) * (1 if sys.platform == "darwin" else 1024)
    left = memoryview(json.dumps(answer).encode())
    while left:
        left = left[os.write(writing, left) :]
    os._exit(0)


def _size() -> int | None:
    """The size of this process's address space in bytes; None if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


class Trials:
    """All grammars on trial.

    Args:
        make: compiles a grammar.
        report: called with each answer, including its ``number``.
    """

    def __init__(self, make: Maker, report: Callable[[Answer], None]) -> None:
        self._make, self._report = make, report
        self._trials: dict[int, Trial] = {}

    def hear(self, asked: Mapping[str, Any]) -> None:
        """Start a trial, or end the trial with this number if the request has nothing else."""
        if "text" in asked:
            self._trials[asked["number"]] = Trial(asked)
        elif (trial := self._trials.pop(asked["number"], None)) is not None and trial.process is not None:
            trial.end()
        self._begin()

    @property
    def pipes(self) -> dict[int, int]:
        """The number of each running trial, by its pipe."""
        return {trial.process[1]: number for number, trial in self._trials.items() if trial.process is not None}

    def read(self, number: int) -> None:
        """Read from a trial's process; after its end, report the answer or try again."""
        trial = self._trials[number]
        assert trial.process is not None
        if found := os.read(trial.process[1], 1 << 20):
            trial.read += found
            return
        status = os.waitstatus_to_exitcode(os.waitpid(trial.process[0], 0)[1])
        os.close(trial.process[1])
        trial.process = None
        if status == -signal.SIGPROF and trial.level + 1 < len(SECONDS):
            trial.level += 1
        else:
            del self._trials[number]
            answer = json.loads(trial.read) if status == 0 else {"error": f"{trial.asked['kind']}: {_why(status)}"}
            self._report({**answer, "number": number})
        self._begin()

    def close(self) -> None:
        for trial in self._trials.values():
            if trial.process is not None:
                trial.end()

    def _begin(self) -> None:
        """At each level without a process, start the first waiting trial."""
        for level in range(len(SECONDS)):
            alike = [trial for trial in self._trials.values() if trial.level == level]
            if alike and all(trial.process is None for trial in alike):
                alike[0].begin(self._make)


def _why(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"compiling it takes more than {SECONDS[-1]:g} seconds"
    if status == OUT_OF_MEMORY or -status in _SENT:
        return f"compiling it takes more than {MEMORY >> 20} MiB of memory"
    return f"llguidance fails over it (its process ended with {status})"


def main(maker: Callable[[Form, list[int]], Maker] = library_maker) -> None:
    """Try the grammars from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides what Ctrl-C ends
    asked, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(0, 2)  # a library that aborts would write to standard error

    def report(answer: Answer) -> None:
        left = memoryview(json.dumps(answer).encode() + b"\n")
        while left:
            left = left[os.write(answers, left) :]

    lines = _Lines(asked)
    about: Any = None
    try:
        while about is None and not lines.ended:
            about, *waiting = [*lines.arrived()] or [None]
        if about is None:
            return
        trials = Trials(maker(about["tokenizer"], about["eos"]), report)
        try:
            for one in waiting:
                trials.hear(one)
            while not lines.ended:
                pipes = trials.pipes
                ready = select.select([asked, *pipes], [], [])[0]
                for pipe in pipes.keys() & ready:
                    trials.read(pipes[pipe])
                if asked in ready:
                    for one in lines.arrived():
                        trials.hear(one)
        finally:
            trials.close()
    except BrokenPipeError:
        pass  # the reader has exited


class _Lines:
    """The lines of JSON from a file descriptor.

    Attributes:
        ended: whether the other end is closed.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._parts: list[bytes] = []
        self.ended = False

    def arrived(self) -> Iterator[Any]:
        """Read once, waiting for input if there is none, and return the complete lines."""
        found = os.read(self._descriptor, 1 << 20)
        self.ended = not found
        self._parts.append(found)
        if b"\n" in found:
            *lines, rest = b"".join(self._parts).split(b"\n")
            self._parts = [rest]
            yield from map(json.loads, lines)


PROGRAM = "specctl.models.running.grammars.trials"

Inbox = SimpleQueue[Any]  # Receives the `Answer` about a grammar; None if there will be none


class TrialProcess:
    """Tries grammars for one tokenizer. Its process starts in advance, and again after it has ended.

    Args:
        tokenizer: as JSON.
        eos: ids that end a text.
    """

    def __init__(self, tokenizer: Form, eos: Set[int]) -> None:
        self._about = {"tokenizer": tokenizer, "eos": sorted(eos)}
        self._lock = Lock()
        self._numbers = count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._ended = Event()
        self._end: Any = None
        self._start()

    def ask(self, kind: str, text: str, inbox: Inbox) -> int:
        """Request a trial; the answer is put into the inbox. Returns the trial's number."""
        with self._lock:
            if self._ended.is_set():
                self._start()
            number = next(self._numbers)
            self._inboxes[number] = inbox
            self._tell({"number": number, "kind": kind, "text": text})
            if self._ended.is_set() and self._inboxes.pop(number, None) is not None:
                inbox.put(None)
        return number

    def give_up(self, number: int) -> None:
        """End a trial."""
        with self._lock:
            if self._inboxes.pop(number, None) is not None:
                self._tell({"number": number})

    def _start(self) -> None:
        if self._end is not None:
            self._end()
        self._inboxes, self._ended = {}, Event()
        self._process = process = subprocess.Popen(
            child_command(PROGRAM), stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
        )
        assert process.stdout is not None
        self._end = finalize(self, _end, process)
        listens = process.stdout, self._inboxes, self._ended
        Thread(target=_listen, args=listens, name="grammars tried", daemon=True).start()
        self._tell(self._about)

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # the process has ended, which its inboxes learn separately
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()


def _listen(answers: IO[bytes], inboxes: dict[int, Inbox], ended: Event) -> None:
    for line in answers:
        if not line.endswith(b"\n"):  # the process died over this grammar
            break
        answer = json.loads(line)
        if (inbox := inboxes.pop(answer["number"], None)) is not None:
            inbox.put(answer)
    ended.set()
    while inboxes:
        inboxes.popitem()[1].put(None)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and its trials with it."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(ProcessLookupError, PermissionError):  # its process group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with suppress(OSError):  # it ended before it read everything
        process.stdin.close()
    process.stdout.close()
