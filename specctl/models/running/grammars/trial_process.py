"""The process in which grammars are tried before this one compiles them: what is ended there holds up nothing here."""

import json
import os
import signal
import subprocess
from collections.abc import Set
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import IO, Any
from weakref import finalize

from specctl.processes.children import child_command

PROGRAM = "specctl.models.running.grammars.trial_program"

Inbox = SimpleQueue[Any]
"""Takes the answer about a grammar, a `dict` of ``specctl.models.running.grammars.trial_program``; None without one."""


class TrialProcess:
    """Tries grammars for one tokenizer. It starts at once, to be ready when it is asked, and anew where it has ended.

    Args:
        tokenizer: as the library ``tokenizers`` writes it down.
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
        """Have a grammar tried; the answer comes to the inbox. Gives the number of the trial."""
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
    with suppress(OSError):  # what it was not told any more
        process.stdin.close()
    process.stdout.close()
