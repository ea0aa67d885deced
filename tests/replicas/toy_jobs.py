"""Replicas that import no torch: what they do is said by the question."""

import os
import signal
import sys
import time
from pathlib import Path

from specctl.errors import ModelError, UsageError
from specctl.replicas.places import Attendant
from specctl.replicas.replica import Answered


def echo(*, number, **setup):
    """Answers a question with what it says, after doing what it asks for."""
    if setup.get("fails") or number in setup.get("failing", ()):
        raise ModelError("there is no such model", "look for it")

    def answer(question):
        if "seconds" in question:
            time.sleep(question["seconds"])
        if question.get("dies") or _first(question.get("dies_once")):
            os.kill(os.getpid(), signal.SIGKILL)
        if "says" in question:
            print(question["says"], file=sys.stderr, flush=True)
        if "prints" in question:
            print(question["prints"], flush=True)
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
    """Replicas of one process, which answer as `echo` does once all that are there have been asked for."""

    def __init__(self, number, count):
        self._act, self.count, self._asked = echo(number=number), count, {}

    def idle(self):
        return [row for row in range(self.count) if row not in self._asked]

    def ask(self, replica, question):
        self._asked[replica] = question

    def wait(self, seconds=None):  # noqa: ARG002
        together = len(self._asked)
        found = [Answered(row, {**self._act(asked), "together": together}) for row, asked in self._asked.items()]
        self._asked.clear()
        return found


def rows(*, number, count):
    """Several at once."""
    return Rows(number, count)


class Clerk(Attendant):
    """Tells the words of a question one by one; one that ends with an ellipsis has no end but being withdrawn."""

    def __init__(self, number, places):
        self._act, self.places, self.about = echo(number=number), places, {"by": number}

    def attend(self, questions, part, answer):
        open_ = {}
        while True:
            place, question = questions.get()
            if question is None:
                if open_.pop(place, None):
                    answer(place, "withdrawn")
                continue
            self._act(question)
            for word in question["said"].split():
                part(place, word)
            if question["said"].endswith("..."):
                open_[place] = question
            else:
                answer(place, question["said"])


def clerk(*, number, places):
    """Answers in parts."""
    return Clerk(number, places)


def records(*, number, traced, **_):
    """Stands for `specctl.commands.loading.replica`: a completion is the prompt in capitals."""
    act = echo(number=number)

    def answer(question):
        act(question["data"].get("act", {}))
        text = question["data"]["prompt"]
        rounds = [{"kind": "round", "id": question["id"], "turn": 0, "round": index, "steps": []} for index in range(3)]
        line = {**question["data"], "id": question["id"], "completion": text.upper(), "line": question["line"]}
        line["metrics"] = {"generated_tokens": len(text)}
        return {"trace": rounds if traced else [], "line": line, "tokens": len(text), "fine": True}

    return answer


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
