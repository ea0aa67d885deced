"""The program of a local replica: questions on standard input, answers on what was standard output.

It ends as soon as its standard input does, and so with the process that started it, however that ends.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from specctl.replicas.frames import Frames, framed
from specctl.replicas.job import portable
from specctl.replicas.places import Attendant, answer_several


def main() -> None:
    """Load what the first frame asks for, then answer each further one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one decides what Ctrl-C ends
    asked, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
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
    try:
        Thread(target=_receive, args=(asked, questions), name="questions", daemon=True).start()
        number, job, seconds = questions.get()
        Thread(target=beat, args=(seconds,), name="signs of life", daemon=True).start()
        answer = job.begin(number)
        send("ready", (answer.places, answer.about) if isinstance(answer, Attendant) else None)
        if isinstance(answer, Attendant):
            answer.attend(
                questions,
                lambda place, found: send("part", (place, found)),
                lambda place, found: send("answer", (place, found)),
            )
        elif callable(answer):
            for place, question in _each(questions):
                send("answer", (place, answer(question)))
        else:
            answer_several(answer, questions, lambda place, found: send("answer", (place, found)))
    except BrokenPipeError:
        pass  # nobody is left who could be told
    except Exception as error:  # raised again where the replica was started
        send("failed", portable(error))
    ended.set()
    sys.stderr.flush()
    os._exit(0)  # threads of libraries may not end


def _each(questions: "SimpleQueue[Any]") -> Iterator[Any]:
    while True:
        yield questions.get()


def _receive(descriptor: int, questions: "SimpleQueue[Any]") -> None:
    frames = Frames(descriptor)
    while not frames.ended:
        for value in frames.arrived():
            questions.put(value)
    os._exit(1)
