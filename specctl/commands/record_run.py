"""A run of `generate` over records: the state left by an earlier run, the provenance of this one, and its summary."""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specctl import streams
from specctl.commands.flags import warn
from specctl.jsonl import Record, read_records
from specctl.observing.progress import Tally
from specctl.outputs import OutputFile, Outputs
from specctl.printable import counted, printable
from specctl.record_settings import ignored_setting
from specctl.resuming import Finished, MadeBy, RunFile, Survey, TurnsFile, distinct, finished_rounds
from specctl.terminal.progress import clock, note

if TYPE_CHECKING:
    from specctl.commands.generate import GenerateRequest
    from specctl.profile import Profile


class RecordRun:
    """One run, from existing results to its summary.

    Attributes:
        finished: the records that an earlier run finished; None without --resume.
        turns: the file of finished turns next to the results; None if results do not go to a file.
        left: the number of records that an earlier run left; None if unknown, or without an earlier run.

    Raises:
        UsageError: the results belong to another run or to other records, or are not results.
    """

    def __init__(
        self,
        request: "GenerateRequest",
        profile: "Profile",
        outputs: Outputs,
        sink: OutputFile,
        traced: OutputFile | None,
        console: Console,
    ) -> None:
        self._profile, self._records, self._results, self._console = profile, request.records, request.results, console
        self._force, self._quiet = request.run.force, request.show.quiet
        # Replicas do not keep the finished turns of an unfinished record.
        self._keeps_turns = request.replicas.replication is None
        self._sink, self._traced = sink, traced
        self._began = time.monotonic()
        self._run_file = RunFile(outputs, sink, force=self._force) if sink.is_file else None
        self.turns = TurnsFile(outputs, sink, force=self._force) if sink.is_file else None
        self._made: MadeBy | None = None
        self._rounds_kept: int | None = None
        self.finished: Finished | None = None
        self.left: int | None = None
        if self._records.resume:
            self._continue()

    def _continue(self) -> None:
        anyway = self._records.anyway
        self.finished = finished = Finished(self._sink.path, anyway=anyway)
        if len(finished) and self._run_file is not None:
            self._made = self._makes()
            for difference in self._run_file.compare(self._made, anyway=anyway):
                self._say(difference)
        survey = streams.from_file(self._records.source, lambda stream: finished.survey(self._distinct(stream)))
        first = survey.first if survey is not None else None
        if first is not None and self._keeps_turns:
            self._find_turns(first, of_this_run=len(finished) > 0)
        if self._traced is not None and self._traced.continued:
            known = survey is not None and not self._force
            turns = self.turns.kept[1] if self.turns is not None else 0
            self._rounds_kept = finished_rounds(self._traced.path, finished, first, known=known, turns=turns)
        self._tell(finished, survey)
        self.left = None if survey is None else survey.left

    def _find_turns(self, first: Record, *, of_this_run: bool) -> None:
        """Look for turns of the first unanswered record; without results, check that the turns belong to this run."""
        if self.turns is None or self._run_file is None:
            return
        self._made = self._made or self._makes()
        if of_this_run or self._run_file.says(self._made):
            self.turns.find(first)

    def _tell(self, finished: Finished, survey: Survey | None) -> None:
        if finished.torn:
            self._say(f"the last line of {self._sink.path} was cut short; its record is answered again")
        if survey is None:
            self._say(f"{counted(len(finished), 'record')} done before")
            return
        left = f"{survey.left} left" if survey.left else "nothing is left to do"
        self._say(f"{survey.kept} of {counted(survey.kept + survey.left, 'record')} done before; {left}")
        if self.turns is not None and (turns := self.turns.kept[1]):
            self._say(f"of the next one, {counted(turns, 'turn')} too")
        if others := len(finished) - survey.kept:
            self._say(f"kept {counted(others, 'other result')} that {self._sink.path} has, of records of another input")

    def begin(self) -> None:
        """Open the outputs for this run: cut off incomplete lines, and record the provenance of the results."""
        self._sink.begin()
        if self.turns is not None:
            self.turns.begin()
        if self._run_file is not None:
            self._run_file.write(self._made or self._makes())
        if self._traced is not None:
            self._traced.begin(self._rounds_kept)

    def records(self, stream: Any) -> Iterator[Record]:
        """The records of the input. Warns once for each field name that looks like a misspelt setting."""
        warned: set[str] = set()
        for record in self._distinct(stream):
            for key, value in record.data.items():
                if key not in warned and (what := ignored_setting(key, value)) is not None:
                    warned.add(key)
                    warn(f"line {record.line}: {what}")
            yield record

    def _distinct(self, stream: Any) -> Iterable[Record]:
        return distinct(read_records(stream, self._records.input_format))

    def _makes(self) -> MadeBy:
        asked, trace = self._results, self._results.trace
        shape: dict[str, Any] = {"--input-format": self._records.input_format}
        shape |= {"--rounds": asked.rounds, "--token-ids": asked.token_ids}
        if trace not in (None, "-"):  # results and trace moved together still belong to the same run
            trace = os.path.relpath(os.path.realpath(trace), os.path.dirname(os.path.realpath(self._sink.path)))
        return MadeBy.of(self._profile, **shape, **{"--trace": trace})

    @contextmanager
    def summing_up(self, tally: Tally) -> Iterator[None]:
        """Print a summary after the block, even after an error, if the results are in a file.

        Its time covers the whole run, loading included.
        """
        try:
            yield
        finally:
            if self.turns is not None:
                self.turns.close()
            if self._run_file is not None and not self._quiet:
                text = self._summary(tally, time.monotonic() - self._began)
                self._console.print(Text(printable(text)), soft_wrap=True)

    def _summary(self, tally: Tally, seconds: float) -> str:
        errors = tally.failed + (self.finished.failed if self.finished is not None else 0)
        took = f"{seconds:.1f} s" if seconds < 60 else clock(seconds)
        kept = [f"{tally.kept} of them kept"] if self.finished is not None else []
        counts = [counted(tally.kept + tally.answered, "record"), *kept, counted(errors, "error"), took]
        return f"{', '.join(counts)}; results are in {self._sink.path}"

    def _say(self, text: str) -> None:
        if not self._quiet:
            note(self._console, text)
