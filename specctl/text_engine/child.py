"""The program of a `ProcessEngine` process: questions arrive on stdin, answers leave on the original stdout."""

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from struct import Struct
from threading import Event, Lock, Thread
from typing import Any

from specctl.errors import reason
from specctl.text_engine.engine import Answered, Part, TextEngine
from specctl.text_engine.job import Job, portable

_LENGTH = Struct("<Q")
_BLOCK = 1 << 20


def framed(value: Any) -> bytes:
    """A value as the bytes of a frame."""
    body = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Reads values from a descriptor; an incomplete frame yields nothing.

    Attributes:
        ended: whether the other end is closed.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = bytearray()
        self.ended = False

    def arrived(self) -> Iterator[Any]:
        """Read once, blocking if there is no data, and yield the complete values."""
        try:
            found = os.read(self._descriptor, _BLOCK)
        except BlockingIOError:
            return
        self.ended = not found
        self._read += found
        while len(self._read) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
            if len(self._read) < end:
                return
            body = bytes(self._read[_LENGTH.size : end])
            del self._read[:end]
            yield pickle.loads(body)


FAILED = 3  # The exit code of a process that failed on a question of a job that `restarts`

Send = Callable[[str, Any], None]
"""Sends an event of a question: ``part``, ``restarted`` or ``answer``, then the question's key and the value."""


class Host:
    """Passes incoming questions to an engine in this process.

    Args:
        engine: answers.
        send: called with the events.
    """

    def __init__(self, engine: TextEngine, send: Send) -> None:
        self._engine, self._send = engine, send
        self._questions: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
        self._waiting: list[tuple[Any, Any]] = []
        self._known: dict[int, Any] = {}  # the key of each place's question

    def put(self, known_by: Any, question: Any) -> None:
        """Take a question, or None to cancel the one with this key. Any thread may call this."""
        self._questions.put((known_by, question))
        self._engine.wake()

    def run(self) -> None:
        """Answer questions forever."""
        while True:
            self._take()
            for event in self._engine.step():
                known_by = self._known.get(event.place)
                if isinstance(event, Answered):
                    del self._known[event.place]
                    answer = event.answer
                    self._send("answer", (known_by, portable(answer) if isinstance(answer, Exception) else answer))
                elif isinstance(event, Part):
                    self._send("part", (known_by, event.value))
                else:
                    self._send("restarted", (known_by, None))

    def _take(self) -> None:
        with suppress(Empty):
            while True:
                known_by, question = self._questions.get_nowait()
                if question is None:
                    self._cancel(known_by)
                else:
                    self._waiting.append((known_by, question))
        while self._waiting and (free := self._engine.free()):
            known_by, question = self._waiting.pop(0)
            self._known[free[0]] = known_by
            self._engine.submit(free[0], question)

    def _cancel(self, known_by: Any) -> None:
        """Drop a question. It is answered with None, which frees its place in the parent process."""
        there = any(one == known_by for one, _ in self._waiting)
        self._waiting = [(one, question) for one, question in self._waiting if one != known_by]
        for place in [place for place, one in self._known.items() if one == known_by]:
            del self._known[place]
            self._engine.cancel(place)
            there = True
        if there:  # else its answer is on the way
            self._send("answer", (known_by, None))


def main() -> None:
    """Load the job in the first frame, then answer the questions in all later frames."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides what Ctrl-C ends
    asked, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # keeps output printed by libraries out of the answers
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    lock, ended = Lock(), Event()

    def send(kind: str, value: Any = None) -> None:
        with lock:
            left = memoryview(framed((kind, value)))
            while left:
                left = left[os.write(answers, left) :]

    def beat(seconds: float) -> None:
        with suppress(OSError):
            while not ended.wait(seconds):
                send("alive")

    questions: SimpleQueue[Any] = SimpleQueue()
    job: Job | None = None
    ready = False
    try:
        Thread(target=_receive, args=(asked, questions.put), name="questions", daemon=True).start()
        number, job, seconds = questions.get()
        Thread(target=beat, args=(seconds,), name="signs of life", daemon=True).start()
        answer = job.begin(number)
        if callable(answer):
            send("ready")
            while True:
                place, question = questions.get()
                send("answer", (place, answer(question)))
        send("ready", (answer.count, getattr(answer, "about", None)))
        ready = True
        host = Host(answer, send)
        Thread(target=_pass_on, args=(questions, host), name="to the engine", daemon=True).start()
        host.run()
    except BrokenPipeError:
        pass  # no process is left to be answered
    except Exception as error:  # raised again in the process that started this one
        if ready and job is not None and job.restarts:
            print(f"the models failed: {type(error).__name__}: {reason(error)}", file=sys.stderr, flush=True)
            os._exit(FAILED)
        send("failed", portable(error))
    ended.set()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries may not end


def _receive(descriptor: int, put: Callable[[Any], None]) -> None:
    frames = Frames(descriptor)
    while not frames.ended:
        for value in frames.arrived():
            put(value)
    os._exit(1)


def _pass_on(questions: "SimpleQueue[Any]", host: Host) -> None:
    while True:
        host.put(*questions.get())
