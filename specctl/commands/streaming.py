"""Where results of `generate` go: records through a pipe, one prompt to a person."""

import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specctl.errors import RecordError, UsageError
from specctl.files import write_line
from specctl.jsonl import Finished, Record, error_line, result_line
from specctl.metrics import Metrics
from specctl.records import Completion, ExtraToken, Round
from specctl.round_trace import trace_line
from specctl.terminal.live import LiveView, Origin, Piece

if TYPE_CHECKING:
    from specctl.decoding.answers import Answerer, OnRound

ORIGINS = {ExtraToken.CORRECTION: Origin.CORRECTION, ExtraToken.BONUS: Origin.BONUS}


@contextmanager
def open_input(path: str) -> Iterator[IO[bytes]]:
    """A file, or standard input for ``-``, as bytes; raises UsageError where it cannot be read."""
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        stream = Path(path).open("rb")  # noqa: SIM115 - closed below; the error is opening's alone
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    with stream:
        yield stream


def read_prompt() -> str:
    """All of standard input, less the line break that ``echo`` and editors end it with."""
    with open_input("-") as stream:
        try:
            text = stream.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 text ({error.reason} at byte {error.start})") from error
    return text.removesuffix("\n").removesuffix("\r")


@contextmanager
def open_output(path: str, *, append: bool = False) -> Iterator[IO[str]]:
    """A file, or standard output for ``-``, as UTF-8 text; raises UsageError where it cannot be written."""
    if path == "-":
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", newline="\n")
        yield sys.stdout
        return
    try:
        stream = Path(path).open("a" if append else "w", encoding="utf-8", newline="\n")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    with stream:
        yield stream


def start_over(stream: IO[str]) -> None:
    """Empty a file that was opened to append; a device or a pipe has nothing to take back."""
    if stream is not sys.stdout and stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.truncate(0)


def check_distinct(source: str | None, output: str, trace: str | None) -> None:
    """Raise UsageError where two of input, output and trace are one file, for the one would spoil the other.

    Args:
        source: path, ``-`` for standard input, None where nothing is read.
        output: path, or ``-`` for standard output.
        trace: as ``output``; None for none.
    """
    places = {"input": (source, sys.stdin), "output": (output, sys.stdout), "trace": (trace, sys.stdout)}
    seen: dict[object, str] = {}
    for role, (path, standard) in places.items():
        if path is None or (place := _place(path, standard, role)) is None:
            continue
        if place in seen:
            raise UsageError(f"{seen[place]} and {role} are the same file", "give each a file of its own")
        seen[place] = role


def _place(path: str, standard: IO[str], role: str) -> object:
    """What tells a file from others; None for what can be shared."""
    try:
        found = os.fstat(standard.fileno()) if path == "-" else Path(path).stat()
        if stat.S_ISREG(found.st_mode):
            return found.st_dev, found.st_ino
    except (OSError, ValueError):  # nothing there yet
        if path != "-":
            return Path(path).absolute()
    return "standard output" if path == "-" and role != "input" else None


def count_lines(path: str | None) -> int | None:
    """Lines of a regular file that are not blank; None for anything else, whose end nobody knows."""
    if path is None or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return sum(1 for line in file if line.strip())


def tracer(record: Record, sink: IO[str] | None) -> "OnRound | None":
    """Writes every round of a record to ``sink``; None where there is no sink."""
    if sink is None:
        return None
    return lambda turn, _, round_: write_line(sink, trace_line(record, turn, round_))


@dataclass(slots=True)
class RecordStream:
    """Answers records in order, each written as soon as it is finished.

    Attributes:
        answerer: does the work.
        sink: where result lines go.
        traced: where trace lines go, if anywhere.
        finished: what an earlier run has left there.
        console: shows progress; None for silence.
        view: makes a live panel for a prompt; None for none.
    """

    answerer: "Answerer"
    sink: IO[str]
    traced: IO[str] | None
    finished: Finished | None
    console: Console | None
    view: Callable[[str], LiveView] | None
    rounds: bool
    token_ids: bool

    def run(self, records: Iterator[Record], total: int | None) -> bool:
        """Answer them all; whether every one could be, those of an earlier run included."""
        with self._progress() as progress:
            task = progress.add_task("", total=total)
            metrics, fine = Metrics(), True
            for record in records:
                if self.finished is None or not self.finished.take(record):
                    fine &= self._answer(record, metrics)
                rate = f"{metrics.tokens_per_second:.0f} tokens/s" if metrics.sequences else ""
                progress.update(task, advance=1, description=rate)
        return fine and not (self.finished is not None and self.finished.failed)

    def _answer(self, record: Record, metrics: Metrics) -> bool:
        try:
            with self._watched(record) as on_round:
                completions = self.answerer.answer(record, on_round)
        except RecordError as error:
            write_line(self.sink, error_line(record, error))
            return False
        for completion in completions:
            metrics.add(completion.summary)
        write_line(self.sink, result_line(record, completions, rounds=self.rounds, token_ids=self.token_ids))
        return True

    @contextmanager
    def _watched(self, record: Record) -> Iterator["OnRound | None"]:
        trace = tracer(record, self.traced)
        if self.view is None or record.error is not None:
            yield trace
            return
        with self.view(_opening(record)) as view:
            yield Watcher(self.answerer, view, trace)

    def _progress(self) -> Progress:
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        text = TextColumn("{task.description}")
        return Progress(*columns, text, console=self.console, disable=self.console is None or self.view is not None)


def _opening(record: Record) -> str:
    """What a record shows before anything is generated."""
    if "messages" in record.data:
        return "\n".join(message["content"] for message in record.data["messages"])
    return "\n".join(record.data["turns"][:1]) if "turns" in record.data else str(record.data["prompt"])


class Watcher:
    """Passes rounds on to a view and a sink as pieces of text, and remembers the text.

    Attributes:
        shown: the pieces, in order.
        written: how many characters have gone to the sink; what may be part of a stop string has not.
    """

    def __init__(
        self, answerer: "Answerer", view: LiveView | None, trace: "OnRound | None", sink: IO[str] | None = None
    ) -> None:
        from specctl.decoding.text import TextStream

        self._stream: Callable[[Sequence[int]], TextStream] = partial(TextStream, answerer.prompts.tokenizer)
        self._view, self._trace, self._sink = view, trace, sink
        self._text: TextStream | None = None
        self._turn = -1
        self._stops = answerer.settings.stop
        self.shown = ""
        self.written = 0

    def __call__(self, turn: int, prompt: Sequence[int], round_: Round) -> None:
        if self._trace is not None:
            self._trace(turn, prompt, round_)
        if self._text is None or turn != self._turn:
            self._turn, self._text = turn, self._stream(prompt)
        accepted = [step.token for step in round_.steps[: round_.accepted]]
        pieces = [Piece(self._text.push(accepted), Origin.ACCEPTED)] if accepted else []
        if round_.extra is not None and round_.extra_kind is not None:
            pieces.append(Piece(self._text.push([round_.extra]), ORIGINS[round_.extra_kind]))
        self.shown += "".join(piece.text for piece in pieces)
        if self._view is not None:
            self._view.on_round(round_, pieces)
        if self._sink is not None and not any(stop in self.shown for stop in self._stops):
            held = max((len(stop) - 1 for stop in self._stops), default=0)
            safe = max(self.written, len(self.shown) - held)
            self._sink.write(self.shown[self.written : safe])
            self._sink.flush()
            self.written = safe

    def rest(self) -> str:
        """What was held back for a character that never came to its end."""
        return self._text.flush() if self._text is not None else ""


def show_prompt(
    answerer: "Answerer", record: Record, sink: IO[str], trace: "OnRound | None", view: LiveView | None
) -> None:
    """Answer one prompt with plain text on ``sink``: below a live panel, or as it grows where there is none.

    An interrupt leaves what was generated until then.
    """
    watcher = Watcher(answerer, view, trace, sink if view is None else None)
    completion: Completion | None = None
    try:
        with view or nullcontext():
            (completion,) = answerer.answer(record, watcher)
            if view is not None:
                view.finish(completion)
    finally:
        text = watcher.shown + watcher.rest() if completion is None else completion.text
        sink.write(text[watcher.written :] + "\n" * bool(text or completion))
        sink.flush()
