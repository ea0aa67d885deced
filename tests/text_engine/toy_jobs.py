"""Replicas without models: what they do is said by the question."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from specctl.errors import ModelError, UsageError
from specctl.records import Completion, FinishReason
from specctl.text_engine.engine import Answered, Part
from specctl.text_engine.here import HereEngine


def echo(*, number, **setup):
    """Answers a question with what it says, after doing what it asks for."""
    if setup.get("fails") or number in setup.get("failing", ()):
        raise ModelError("there is no such model", "look for it")
    if "ends" in setup:
        _end(setup["ends"])

    def answer(question):
        if "seconds" in question:
            time.sleep(question["seconds"])
        if question.get("dies") or _first(question.get("dies_once")):
            os.kill(os.getpid(), signal.SIGKILL)
        if "says" in question:
            print(question["says"], file=sys.stderr, flush=True)
        if "prints" in question:
            print(question["prints"], flush=True)
        if "ends" in question:
            _end(question["ends"])
        if "raises" in question:
            raise UsageError(question["raises"], "a hint")
        if "stops" in question:
            os.kill(os.getpid(), signal.SIGSTOP)
        return {
            "said": question.get("said"),
            "by": number,
            "pid": os.getpid(),
            "threads": os.environ["OMP_NUM_THREADS"],
            "folder": os.getcwd(),
        }

    return answer


class Rows:
    """The engine of a process, which answers as `echo` does once all that are there have been asked for."""

    def __init__(self, number, count):
        self._act, self.count, self.asked = echo(number=number), count, {}
        self._woken = threading.Event()

    def free(self):
        return [row for row in range(self.count) if row not in self.asked]

    def submit(self, place, question):
        self.asked[place] = question

    def cancel(self, place):
        del self.asked[place]

    def step(self, seconds=None):
        together = len(self.asked)
        found = [Answered(row, {**self._act(asked), "together": together}) for row, asked in self.asked.items()]
        self.asked.clear()
        return found or self.rest(seconds)

    def rest(self, seconds):
        self._woken.wait(seconds)
        self._woken.clear()
        return []

    def wake(self):
        self._woken.set()


def rows(*, number, count):
    """Several at once."""
    return Rows(number, count)


class Clerk(Rows):
    """Tells the words of a question one by one; one that ends with an ellipsis has no end but being cancelled."""

    def __init__(self, number, places):
        super().__init__(number, places)
        self.about, self._told = {"by": number}, set()

    def cancel(self, place):
        super().cancel(place)
        self._told.discard(place)

    def step(self, seconds=None):
        found = []
        for place, question in [*self.asked.items()]:
            if place in self._told:
                continue
            self._act(question)
            found += [Part(place, word) for word in question["said"].split()]
            if question["said"].endswith("..."):
                self._told.add(place)
            else:
                del self.asked[place]
                found.append(Answered(place, question["said"]))
        return found or self.rest(seconds)


def clerk(*, number, places):
    """Answers in parts."""
    return Clerk(number, places)


def records(*, number, traced, **_):
    """Stands for `specctl.commands.loading.replica`: a completion is the prompt in capitals."""
    act = echo(number=number)

    def write(request):
        act(request.record.data.get("act", {}))
        text = request.record.data["prompt"]
        if traced:
            for index in range(3):
                yield {"kind": "round", "id": request.record.id, "turn": 0, "round": index, "steps": []}
        done = Completion((1,), 0, tuple(range(len(text))), text.upper(), FinishReason.LENGTH, (), 0.0, 0.0, 0.0)
        return [done.summary]

    return HereEngine(write)


def _end(last_words):
    """End the process as a library does that cannot go on."""
    print(last_words, file=sys.stderr, flush=True)
    os._exit(3)


def _first(path):
    """Whether a file is not there yet; it is there afterwards."""
    if path is None or Path(path).exists():
        return False
    Path(path).touch()
    return True


def writer(*, number, path, **setup):
    """As `echo`, and writes to a file while it loads."""
    Path(path).write_bytes(Path(path).read_bytes() + b" ")
    return echo(number=number, **setup)


def reader(*, number, profile, **_):  # noqa: ARG001
    """Answers with hashes of the weights that it read while it was loaded."""
    from specctl.models.files.checkpoint import files_hash, locate

    tables = {"target": profile.target, "draft": profile.draft}
    read = {role: files_hash(locate(table, role).weight_files()) for role, table in tables.items()}
    return lambda question: {**read, "said": question}
