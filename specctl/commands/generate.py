"""`specctl generate`: text from a pair, live in a terminal or as JSONL through a pipe."""

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from specctl.commands.flags import (
    LIMIT,
    PairOptions,
    PolicyOption,
    ReplicaOptions,
    RunOptions,
    SamplingOptions,
    ShowOptions,
    TemplateOption,
    policy_flag,
    protect_profile,
    warn,
)
from specctl.commands.loading import REPLICA, load_answering, start_replicas
from specctl.commands.requests import But, grouped, option
from specctl.errors import UsageError
from specctl.files import write_line
from specctl.jsonl import InputFormat, Record, result_line
from specctl.outputs import OutputFile, Outputs
from specctl.streams import apart, count_lines, open_input, read_prompt

if TYPE_CHECKING:
    from specctl.profile import Profile, ResolvedProfile
    from specctl.terminal.progress import TerminalProgress
    from specctl.text_engine.engine import TextEngine
    from specctl.text_engine.row_count import Batch


RECORDS, SHOWN = "Records", "What is shown"


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Options of records and results."""

    panel = RECORDS
    input_: str | None = option(
        "JSON lines with prompt, messages or turns. Each may have settings of its own, such as max_tokens.",
        "-i --input FILE|-",
    )
    output: str = option(
        "Write results here, not to standard output.", "-o --output FILE|-", default="-", show_default=False
    )
    input_format: InputFormat = option("Format of an input line: a JSON object or a prompt.", default="jsonl")
    resume: bool = option(
        "Continue an interrupted run of --output. Only records whose id is not there are answered; a "
        "record without an id has its line number. Rejects results of other models, settings or prompts. Adaptive "
        "policies start afresh.",
        "--resume",
        default=False,
    )
    anyway: bool = option("Let --resume continue the results of another run.", "--anyway", default=False)

    @property
    def source(self) -> str:
        """The file of records, ``-`` for standard input."""
        return self.input_ or "-"


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """Options of a result's fields and of the display."""

    panel = SHOWN
    json_: bool = option("Print the result for PROMPT as one JSON document.", "--json", default=False)
    rounds: bool = option("Add every round to the JSON results.", "--rounds", default=False)
    token_ids: bool = option("Add the generated token ids to the JSON results.", "--token-ids", default=False)
    trace: str | None = option("Write a JSON line per round, with each draft token and its signals.", "FILE|-")
    live: bool | None = option(
        "Show a live panel. Default: yes for a PROMPT in a terminal.",
        "--live/--no-live",
    )


GENERATE_HELP = {
    "max_new_tokens": LIMIT.format("for each prompt"),
    "seed": "Seed of all random draws. Default: 0. Every record has draws of its own.",
}


USUAL = (
    "prompt profile target draft policy max_new_tokens temperature chat input_ output input_format resume json_ live"
)
"""The parameters that --help shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """The flags of `specctl generate`; UsageError for conflicting ones."""

    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            show_default=False,
            help="Text to continue or answer; - reads standard input. Its last line break is left out.",
        ),
    ] = None
    models: PairOptions
    policy: PolicyOption = None
    run: RunOptions
    sampling: Annotated[SamplingOptions, But(help=GENERATE_HELP)]
    file: str | None = option("Read the PROMPT from this file; - is standard input.", "-f --file FILE|-")
    chat: TemplateOption = None
    system: str | None = option("System prompt of every chat.", "TEXT")
    records: RecordOptions
    results: ResultOptions
    replicas: ReplicaOptions
    show: Annotated[ShowOptions, But(("report", "json_"))]

    def __post_init__(self) -> None:
        records, results = self.records, self.results
        if self.prompt is not None and self.file is not None:
            raise UsageError("use either PROMPT or --file, not both")
        from_records = self.from_records
        if self.prompt is None and self.file is None and not from_records:
            hint = "give a PROMPT, one in a file with -f FILE, or records with -i FILE"
            raise UsageError("there is nothing to generate from", hint)
        if records.input_ is not None and not (self.prompt is None and self.file is None):
            which = "PROMPT" if self.prompt_file in (None, "-") else "--file"
            raise UsageError(f"use either {which} or --input, not both")
        if from_records and results.json_:
            hint = "leave it out: every record is answered with a line of JSON"
            raise UsageError("--json works only with a PROMPT", hint)
        in_json = results.rounds or results.token_ids or self.sampling.logprobs is not None
        if in_json and not (from_records or results.json_):
            raise UsageError("--rounds, --token-ids and --logprobs work only with JSON results", "add --json")
        if records.resume and not from_records:
            raise UsageError("--resume works only with records", "leave it out, or give records with --input FILE")
        if self.replicas.replication is not None and (results.live or not from_records):
            what = "--live" if from_records else "a PROMPT"
            raise UsageError(f"replicas answer only records, and {what} needs one process", "leave out --workers")
        if self.replicas.at_once not in (None, 1, "auto") and not from_records:
            raise UsageError("use either --batch or a PROMPT, not both")
        if records.anyway and not records.resume:
            raise UsageError("--anyway needs --resume", "add --resume, or leave it out")
        if records.resume and records.output == "-":
            raise UsageError("--resume needs the results of the earlier run", "name their file with --output FILE")

    @property
    def from_records(self) -> bool:
        """Whether records are answered, rather than one prompt."""
        piped = sys.stdin is not None and not sys.stdin.isatty()
        return self.records.input_ is not None or (self.prompt is None and self.file is None and piped)

    @property
    def prompt_file(self) -> str | None:
        """The file with the prompt, ``-`` for standard input; None if the command line has it."""
        return "-" if self.prompt == "-" else self.file

    @property
    def batch(self) -> "Batch":
        """The batch size of answers."""
        # One at a time if results and a panel share the terminal.
        in_turn = bool(self.results.live) and self.records.output == "-" and sys.stdout.isatty()
        asked = self.replicas.at_once
        return 1 if in_turn or (asked is None and self.replicas.replication is not None) else asked or "auto"

    def resolve(self) -> "ResolvedProfile":
        """The profile with the flags applied; raises UsageError for a system prompt without a chat template."""
        own = {"prompt.chat": self.chat, "prompt.system": self.system}
        found = self.run.resolve(self.models, {**self.sampling.flags, **policy_flag(self.policy), **own})
        told = found.profile.prompt
        only_prompts = not self.from_records or self.records.input_format == "text"
        if told.system is not None and told.chat is False and only_prompts:
            raise UsageError("a system prompt needs the chat template", "leave out --raw, or add --chat")
        return found


@grouped(usual=USUAL)
def generate(request: GenerateRequest) -> None:
    """Generate text: exactly what the target alone would write, but faster.

    Records, of --input or standard input, are answered with a line of JSON each; one that fails gets a line with the
    error, and the exit code is 1.

    Examples:

    [cyan]specctl generate "Once upon a time" -n 100[/]

    [cyan]specctl generate -i prompts.jsonl -o answers.jsonl --resume[/]

    [cyan]ls | specctl generate --input-format text -t 0.8 | jq .completion[/]
    """
    if request.prompt is not None and os.path.isfile(request.prompt):
        warn(f"{request.prompt} is a file, and its name is the prompt; did you mean -i {request.prompt}?")
    found = request.resolve()

    from rich.console import Console

    from specctl.terminal.progress import TerminalProgress

    show, resumed = request.show, request.records.resume if request.from_records else None
    progress = TerminalProgress(Console(stderr=True), False if show.quiet else show.progress)
    with ExitStack() as stack:
        outputs = stack.enter_context(Outputs(force=request.run.force))
        outputs.reads("input", request.records.source if request.from_records else request.prompt_file)
        protect_profile(outputs, found)
        source = stack.enter_context(open_input(request.records.source)) if request.from_records else None
        sink = outputs.file("output", request.records.output, resumed=resumed)
        traced = outputs.file("trace", request.results.trace, resumed=resumed)
        if source is None:
            _answer_prompt(request, found.profile, sink, traced, progress)
        elif not _answer_records(request, found.profile, source, outputs, sink, traced, progress):
            raise typer.Exit(1)


def _answer_prompt(
    request: GenerateRequest,
    profile: "Profile",
    sink: OutputFile,
    traced: OutputFile | None,
    progress: "TerminalProgress",
) -> None:
    from specctl.commands.watching import show_prompt, view_of
    from specctl.observing.record_stream import tracer

    file, results, console = request.prompt_file, request.results, progress.console
    record = Record(1, 1, {"prompt": request.prompt if file is None else read_prompt(file)})
    answerer = load_answering(
        profile,
        progress,
        quiet=request.show.quiet,
        traced=traced is not None,
        foreign_head=request.run.foreign_head,
        expected_tokens=0,
    ).answerer()
    sink.begin()
    if traced is not None:
        traced.begin()
    on_round = tracer(record, traced)
    if results.json_:
        completions = answerer.answer(record, on_round)
        write_line(sink, result_line(record, completions, rounds=results.rounds, token_ids=results.token_ids))
        return
    plain = not console.is_terminal or not sys.stdout.isatty() or request.show.quiet
    shown = not plain if results.live is None else results.live
    show_prompt(answerer, record, sink, on_round, view_of(profile, console) if shown else None)


def _answer_records(
    request: GenerateRequest,
    profile: "Profile",
    source: IO[bytes],
    outputs: Outputs,
    sink: OutputFile,
    traced: OutputFile | None,
    progress: "TerminalProgress",
) -> bool:
    """Answer records; returns whether all succeeded."""
    from specctl.commands.record_run import RecordRun
    from specctl.commands.watching import view_of, watch_with
    from specctl.observing.record_stream import RecordStream
    from specctl.terminal.progress import TerminalProgress, resumable
    from specctl.text_engine.dispatch import arriving

    records, results, show, console = request.records, request.results, request.show, progress.console
    replication, batch = request.replicas.replication, request.batch
    several = RecordRun(request, profile, outputs, sink, traced, console)
    if several.left == 0:
        several.begin()
        return several.finished is None or not several.finished.failed
    total = count_lines(records.input_)
    expected = (total or 0) * profile.sampling.max_new_tokens
    setup: dict[str, Any] = {
        "quiet": show.quiet,
        "traced": traced is not None,
        "foreign_head": request.run.foreign_head,
    }
    with ExitStack() as stack:
        engine: TextEngine
        if replication is not None:
            starting = start_replicas(replication, profile, REPLICA, setup, progress, expected, batch=batch)
            engine = stack.enter_context(starting)
        else:
            loaded, view = (
                load_answering(profile, progress, expected_tokens=expected, **setup),
                view_of(profile, console),
            )
            watch = watch_with(loaded.answerer(), view) if results.live else None
            engine = loaded.engine(batch, total if several.left is None else several.left, watch)
            stack.enter_context(engine)
            if results.live and engine.count > 1:
                stack.enter_context(view)
        several.begin()
        answers = RecordStream(
            engine,
            sink,
            traced,
            several.finished,
            results.rounds,
            results.token_ids,
            several.turns if replication is None else None,
            at_once=replication is None,
        )
        taken: Iterable[Any] = several.records(source if total is not None else apart(source))
        if total is None:
            taken = arriving(taken, engine.wake)
        # Results and panels on the same terminal already show progress.
        silent = results.live or (records.output == "-" and sys.stdout.isatty())
        bar = TerminalProgress(console, False) if silent else progress
        kept = None if show.quiet or records.output == "-" else records.output
        counting = bar.counting("records", total)
        with resumable(console, kept), several.summing_up(answers.tally), counting as advance:
            return answers.run(taken, advance)
