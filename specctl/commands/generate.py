"""`specctl generate`: text from a pair, live in a terminal or as JSONL through a pipe."""

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

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
    spare_profile,
    warn,
)
from specctl.commands.loading import REPLICA, load_answering
from specctl.commands.requests import But, grouped, option
from specctl.errors import UsageError
from specctl.files import write_line
from specctl.jsonl import InputFormat, Record, result_line
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.observing.record_stream import RecordStream
    from specctl.replicas.replica import Replicas


RECORDS, SHOWN = "Records", "What is shown"


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Which records are answered, and where the results go."""

    panel = RECORDS
    input_: str | None = option(
        "JSON lines with prompt, messages or turns. Each may have settings of its own, such as max_tokens.",
        "-i --input FILE|-",
    )
    output: str = option(
        "Write results here, not to standard output.", "-o --output FILE|-", default="-", show_default=False
    )
    input_format: InputFormat = option("What an input line is: a JSON object or a prompt.", default="jsonl")
    resume: bool = option(
        "Continue an interrupted run of --output. Only records whose id is not there are answered; a "
        "record without an id has its line number. Refuses results of other models, settings or prompts. Adaptive "
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
    """What a result holds, and what is shown beside it."""

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


@grouped(usual=USUAL)
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            show_default=False,
            help="Text to continue or answer; - reads standard input. Its last line break is left out.",
        ),
    ] = None,
    models: PairOptions,
    policy: PolicyOption = None,
    run: RunOptions,
    sampling: Annotated[SamplingOptions, But(help=GENERATE_HELP)],
    file: str | None = option("Read the PROMPT from this file; - is standard input.", "-f --file FILE|-"),
    chat: TemplateOption = None,
    system: str | None = option("System prompt of every chat.", "TEXT"),
    records: RecordOptions,
    results: ResultOptions,
    replicas: ReplicaOptions,
    show: Annotated[ShowOptions, But(("report", "json_"))],
) -> None:
    """Generate text: exactly what the target alone would write, but faster.

    Records, of --input or standard input, are answered with a line of JSON each; one that fails gets a line with the
    error, and the exit code is 1.

    Examples:

    [cyan]specctl generate "Once upon a time" -n 100[/]

    [cyan]specctl generate -i prompts.jsonl -o answers.jsonl --resume[/]

    [cyan]ls | specctl generate --input-format text -t 0.8 | jq .completion[/]
    """
    piped = sys.stdin is not None and not sys.stdin.isatty()
    if prompt is not None and file is not None:
        raise UsageError("PROMPT and --file exclude each other", "leave one of them out")
    if prompt == "-":
        prompt, file = None, "-"
    asked = prompt is not None or file is not None
    from_stream = records.input_ is not None or (not asked and piped)
    if not asked and not from_stream:
        raise UsageError(
            "there is nothing to generate from", "give a PROMPT, one in a file with -f FILE, or records with -i FILE"
        )
    if asked and records.input_ is not None:
        which = "PROMPT" if file is None or file == "-" else "--file"
        raise UsageError(f"{which} and --input exclude each other", "leave one of them out")
    if from_stream and results.json_:
        raise UsageError(
            "--json works only with a PROMPT", "leave it out: every record is answered with a line of JSON"
        )
    if not from_stream and (results.rounds or results.token_ids or sampling.logprobs is not None) and not results.json_:
        raise UsageError("--rounds, --token-ids and --logprobs work only with JSON results", "add --json")
    if not from_stream and records.resume:
        raise UsageError("--resume works only with records", "leave it out, or give records with --input FILE")
    replication = replicas.replication
    if replication is not None and (not from_stream or results.live):
        what = "--live" if from_stream else "a PROMPT"
        raise UsageError(f"replicas answer records, and {what} is shown by one process", "leave out --workers")
    batch = replicas.rows
    if batch not in (None, 1, "auto") and not from_stream:
        raise UsageError("--batch and a PROMPT exclude each other", "leave one of them out")
    # Where results and a panel share the terminal, it is left to each of them in turn.
    in_turn = bool(results.live) and records.output == "-" and sys.stdout.isatty()
    if in_turn or (replication is not None and batch is None):
        batch = 1
    if records.anyway and not records.resume:
        raise UsageError("--anyway says how --resume goes on", "add --resume, or leave it out")
    if records.resume and records.output == "-":
        raise UsageError("--resume needs the results of the earlier run", "name their file with --output FILE")

    if prompt is not None and os.path.isfile(prompt):
        warn(f"{prompt} is a file, and its name is the prompt; did you mean -i {prompt}?")

    flags = {**sampling.flags, **policy_flag(policy), "prompt.chat": chat, "prompt.system": system}
    found = run.resolve(models, flags)
    resolved = found.profile
    only_prompts = not from_stream or records.input_format == "text"
    if resolved.prompt.system is not None and resolved.prompt.chat is False and only_prompts:
        raise UsageError("a system prompt needs the chat template", "leave out --raw, or add --chat")

    from rich.console import Console

    from specctl import streams
    from specctl.commands import watching
    from specctl.commands.record_run import RecordRun
    from specctl.observing.replicated_records import ReplicatedRecords
    from specctl.replicas.window import arriving
    from specctl.terminal.progress import TerminalProgress, resumable

    console = Console(stderr=True)
    shown_progress = TerminalProgress(console, False if show.quiet else show.progress)
    with ExitStack() as stack:
        outputs = stack.enter_context(Outputs(force=run.force))
        outputs.reads("input", records.source if from_stream else file)
        spare_profile(outputs, found)
        source = stack.enter_context(streams.open_input(records.source)) if from_stream else None
        sink = outputs.file("output", records.output, resumed=records.resume if from_stream else None)
        traced = outputs.file("trace", results.trace, resumed=records.resume if from_stream else None)
        several = None
        if source is not None:
            several = RecordRun(
                outputs,
                resolved,
                records,
                results,
                sink,
                traced,
                console,
                force=run.force,
                quiet=show.quiet,
                keeps_turns=replication is None,
            )
            if several.left == 0:
                several.begin()
                raise typer.Exit(1 if several.finished is not None and several.finished.failed else 0)
        text = prompt or "" if file is None else streams.read_prompt(file)
        total = streams.count_lines(records.input_) if from_stream else None
        expected = (total or 0) * resolved.sampling.max_new_tokens
        loading: dict[str, Any] = {"quiet": show.quiet, "traced": traced is not None, "foreign_head": run.foreign_head}
        answering: Replicas | None = None
        if replication is not None:
            starting = replication.start(resolved, REPLICA, loading, shown_progress, expected, batch=batch or "auto")
            answering = stack.enter_context(starting)
        else:
            loaded = load_answering(resolved, shown_progress, expected_tokens=expected, **loading)
            left = several.left if several is not None and several.left is not None else total
            if from_stream and (rows := loaded.batch(batch or "auto", left)) is not None:
                answering = stack.enter_context(rows)
            else:
                answerer = loaded.answerer()
        view = watching.view_of(resolved, console)
        if several is not None and source is not None:
            several.begin()
            answers: RecordStream | ReplicatedRecords
            taken: Iterable[Any] = several.records(source)
            if answering is not None:
                turns = several.turns if replication is None else None
                watch = None
                if results.live and replication is None:
                    watch = watching.watch_with(loaded.answerer(), stack.enter_context(view))
                answers = ReplicatedRecords(
                    answering, sink, traced, several.finished, results.rounds, results.token_ids, turns, watch
                )
                if total is None:
                    taken = arriving(several.records(streams.apart(source)))
            else:
                from specctl.observing import record_stream

                alone = watching.watch_with(answerer, view) if results.live else record_stream.trace_alone
                answers = record_stream.RecordStream(
                    answerer, sink, traced, several.finished, results.rounds, results.token_ids, alone, several.turns
                )
            # Results and panels on the same terminal show the progress themselves.
            silent = results.live or (records.output == "-" and sys.stdout.isatty())
            bar = TerminalProgress(console, False) if silent else shown_progress
            kept = None if show.quiet or records.output == "-" else records.output
            counting = bar.counting("records", total)
            with resumable(console, kept), several.summing_up(answers.tally), counting as advance:
                complete = answers.run(taken, advance)
            if not complete:
                raise typer.Exit(1)
            return

        sink.begin()
        if traced is not None:
            traced.begin()
        from specctl.observing.record_stream import tracer

        record = Record(1, 1, {"prompt": text})
        on_round = tracer(record, traced)
        if results.json_:
            completions = answerer.answer(record, on_round)
            write_line(sink, result_line(record, completions, rounds=results.rounds, token_ids=results.token_ids))
            return
        plain = not console.is_terminal or not sys.stdout.isatty() or show.quiet
        shown = results.live if results.live is not None else not plain
        watching.show_prompt(answerer, record, sink, on_round, view if shown else None)
