"""Trials of grammars: a process of their own compiles each in a fork, so that a slow or large one can be ended.

The program imports neither torch nor numpy, so that it starts at once. It reads grammars from standard input, answers
each with a line of JSON on standard output, and ends with the process that started it. A grammar that takes longer than
most is started again with more time and less priority; it waits only for others of its level.
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

SECONDS = (0.1, 1.0, 10.0)  # Seconds of processor time of the first, second and third try of a grammar
NICE = (0, 10, 19)  # The niceness of each try
MEMORY = 512 << 20  # Bytes that compiling may add
OUT_OF_MEMORY = 9
_SENT = frozenset({signal.SIGABRT, signal.SIGKILL, signal.SIGBUS})
"""Signals that end a process which gets no memory, from the library or the system."""

Answer = dict[str, Any]
Maker = Callable[[Mapping[str, str]], Answer]
"""Compiles a grammar's ``kind`` and ``text``; the answer has the ``grammar`` to compile, or an ``error``."""


def library_maker(tokenizer: str, eos: list[int]) -> Maker:
    """The `Maker` of a tokenizer, given as the library ``tokenizers`` serialises it."""
    from llguidance import LLTokenizer

    from specctl.models.running.grammars.grammar_text import compiled, grammar_text, one_line

    tokens = LLTokenizer(tokenizer, eos_token=eos)

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
        except Exception as error:  # of libraries, over what they did not expect
            return {
                "error": f"{asked['kind']}: it cannot be read ({type(error).__name__}: {one_line(str(error))[:200]})"
            }
        return {"grammar": text.grammar, "schema": text.schema}

    make({"kind": "json_schema", "text": "{}"})  # imports happen before the forks
    return make


@dataclass(slots=True)
class Trial:
    """A grammar that is tried."""

    asked: Mapping[str, str]  # the request
    level: int = 0  # how many tries have taken too long
    # the id of its process, while there is one, and the pipe on which that answers
    process: tuple[int, int] | None = None
    read: bytearray = field(default_factory=bytearray)  # the answer so far

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
        """End its process, and give the status with which it ended."""
        assert self.process is not None
        process, reading = self.process
        self.process = None
        os.close(reading)
        os.kill(process, signal.SIGKILL)  # it may have ended already, and is waited for below
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _try(make: Maker, asked: Mapping[str, str], level: int, writing: int) -> None:
    os.closerange(3, writing)  # so that no reader waits for this process to close what the other one had open
    os.closerange(writing + 1, 256)
    os.nice(NICE[level])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (size := _size()) is not None:
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, SECONDS[level])  # ends the process by SIGPROF
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
    """The size of this process's address space in bytes; None where the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


class Trials:
    """All grammars that are tried.

    Args:
        make: compiles one.
        report: receives the answer about each, with its ``number``.
    """

    def __init__(self, make: Maker, report: Callable[[Answer], None]) -> None:
        self._make, self._report = make, report
        self._trials: dict[int, Trial] = {}

    def hear(self, asked: Mapping[str, Any]) -> None:
        """Try a grammar, or end the trial of one whose request has only its number."""
        if "text" in asked:
            self._trials[asked["number"]] = Trial(asked)
        elif (trial := self._trials.pop(asked["number"], None)) is not None and trial.process is not None:
            trial.end()
        self._begin()

    @property
    def pipes(self) -> dict[int, int]:
        """The number of each trial that has a process, by its pipe."""
        return {trial.process[1]: number for number, trial in self._trials.items() if trial.process is not None}

    def read(self, number: int) -> None:
        """Read from a trial's process; when it has ended, report the answer or try again."""
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
        """At each level begin the first trial, if none of that level has a process."""
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


def main(maker: Callable[[str, list[int]], Maker] = library_maker) -> None:
    """Try the grammars that arrive on standard input, until that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides what Ctrl-C ends
    asked, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(0, 2)  # a library that ends a process says so there

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
        pass  # the reader has ended


class _Lines:
    """The lines of JSON that arrive on a descriptor.

    Attributes:
        ended: whether the other end is closed.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._parts: list[bytes] = []
        self.ended = False

    def arrived(self) -> Iterator[Any]:
        """Read once, waiting if there is nothing, and return the complete lines."""
        found = os.read(self._descriptor, 1 << 20)
        self.ended = not found
        self._parts.append(found)
        if b"\n" in found:
            *lines, rest = b"".join(self._parts).split(b"\n")
            self._parts = [rest]
            yield from map(json.loads, lines)


PROGRAM = "specctl.models.running.grammars.trials"

Inbox = SimpleQueue[Any]  # Receives the `Answer` about a grammar; None without one


class TrialProcess:
    """Tries grammars for one tokenizer. Its process starts at once, to be ready, and again where it has ended.

    Args:
        tokenizer: as the library ``tokenizers`` serialises it.
        eos: ids that end a text.
    """

    def __init__(self, tokenizer: str, eos: Set[int]) -> None:
        self._about = {"tokenizer": tokenizer, "eos": sorted(eos)}
        self._lock = Lock()
        self._numbers = count(1)
        self._inboxes: dict[int, Inbox] = {}
        self._ended = Event()
        self._end: Any = None
        self._start()

    def ask(self, kind: str, text: str, inbox: Inbox) -> int:
        """Have a grammar tried; the answer comes to the inbox. Returns the number of the trial."""
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
        with suppress(OSError):  # it has ended, of which its inboxes hear
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()


def _listen(answers: IO[bytes], inboxes: dict[int, Inbox], ended: Event) -> None:
    for line in answers:
        if not line.endswith(b"\n"):  # it was killed over this one
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
    with suppress(ProcessLookupError, PermissionError):  # its group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with suppress(OSError):  # it ended before it read everything
        process.stdin.close()
    process.stdout.close()
