"""`specctl generate`: text from a pair, live in a terminal or as JSONL through a pipe."""

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.commands.answering import REPLICA, load_answerers
from specctl.commands.files import resolve_profile, spare_profile
from specctl.commands.options import (
    CheckOption,
    DraftOption,
    EngineOption,
    ForceOption,
    ForeignHeadOption,
    MinPOption,
    PolicyOption,
    ProfileOption,
    ProgressOption,
    QuietOption,
    SetOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    TrustOption,
    VerificationOption,
    sampling_flags,
    warn,
)
from specctl.commands.replicating import ClusterOption, KeepWarmOption, Replication, WorkersOption
from specctl.errors import UsageError
from specctl.files import write_line
from specctl.jsonl import InputFormat, Record, result_line
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.replicas.replica import Replicas

RECORDS = "Records"
SHOWN = "What is shown"


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            show_default=False,
            help="Text to continue; - reads all of standard input as one prompt, without its last line break.",
        ),
    ] = None,
    profile: ProfileOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    policy: PolicyOption = None,
    set_: SetOption = None,
    engine: EngineOption = None,
    threads: ThreadsOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("-n", "--max-new-tokens", min=1, metavar="N", help="Maximum number of tokens to generate."),
    ] = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    verification: VerificationOption = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Seed of all random draws; every record has draws of its own."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the text before this string appears. Repeatable.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Apply the target's chat template to prompts, or use them as they are."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt of every chat.")] = None,
    input_: Annotated[
        str | None,
        typer.Option(
            "-i",
            "--input",
            metavar="FILE|-",
            help="Records to answer, one JSON object per line, with prompt, messages or turns, and settings of their "
            "own such as max_tokens; all keys are in docs/words.md.",
            rich_help_panel=RECORDS,
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE|-",
            help="Write results here instead of to standard output.",
            show_default=False,
            rich_help_panel=RECORDS,
        ),
    ] = "-",
    input_format: Annotated[
        InputFormat,
        typer.Option(help="Whether an input line is a JSON object or a plain-text prompt.", rich_help_panel=RECORDS),
    ] = "jsonl",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an interrupted run: keep the results in --output and answer only records whose id is not "
            "there. The id of a record without one is its line number. Policies that learn start from nothing again. "
            "What other models, settings or prompts made is refused.",
            rich_help_panel=RECORDS,
        ),
    ] = False,
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Let --resume go on with the results of another run.", rich_help_panel=RECORDS),
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the result for PROMPT as one JSON document.", rich_help_panel=SHOWN)
    ] = False,
    rounds: Annotated[
        bool, typer.Option("--rounds", help="Add every round to the JSON results.", rich_help_panel=SHOWN)
    ] = False,
    token_ids: Annotated[
        bool,
        typer.Option("--token-ids", help="Add the generated token ids to the JSON results.", rich_help_panel=SHOWN),
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="Write a JSON line per round, with each draft token and its signals.",
            rich_help_panel=SHOWN,
        ),
    ] = None,
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live",
            help="Show a live panel, or print the text as it grows. Default: live for a PROMPT in a terminal.",
            rich_help_panel=SHOWN,
        ),
    ] = None,
    workers: WorkersOption = None,
    cluster: ClusterOption = None,
    keep_warm: KeepWarmOption = None,
    check: CheckOption = False,
    force: ForceOption = False,
    foreign_head: ForeignHeadOption = False,
    trust_remote_code: TrustOption = False,
    progress: ProgressOption = None,
    quiet: QuietOption = False,
) -> None:
    """Generate text: exactly what the target alone would write, but faster.

    With a PROMPT, prints its completion.

    With --input, or with records on standard input, answers each with one line of JSON.

    A record that cannot be answered gets a line with the error, and the exit code is 1.

    Examples:

    [cyan]specctl generate "Once upon a time" -n 100[/]

    [cyan]specctl generate -i prompts.jsonl -o answers.jsonl --resume[/]

    [cyan]ls | specctl generate --input-format text -t 0.8 | jq .completion[/]
    """
    piped = sys.stdin is not None and not sys.stdin.isatty()
    from_stream = input_ is not None or (prompt is None and piped)
    if prompt is None and not from_stream:
        raise UsageError("there is nothing to generate from", "give a PROMPT, or records with --input FILE")
    if prompt is not None and input_ is not None:
        raise UsageError("PROMPT and --input exclude each other", "leave one of them out")
    if from_stream and json_:
        raise UsageError(
            "--json works only with a PROMPT", "leave it out: every record is answered with a line of JSON"
        )
    if not from_stream and (rounds or token_ids) and not json_:
        raise UsageError("--rounds and --token-ids work only with JSON results", "add --json")
    if not from_stream and resume:
        raise UsageError("--resume works only with records", "leave it out, or give records with --input FILE")
    replication = Replication.of(workers, cluster, keep_warm)
    if replication is not None and (not from_stream or live):
        what = "--live" if from_stream else "a PROMPT"
        raise UsageError(f"replicas answer records, and {what} is shown by one process", "leave out --workers")
    if anyway and not resume:
        raise UsageError("--anyway says how --resume goes on", "add --resume, or leave it out")
    if resume and output == "-":
        raise UsageError("--resume needs the results of the earlier run", "name their file with --output FILE")

    if prompt is not None and os.path.isfile(prompt):
        warn(f"{prompt} is a file, and its name is the prompt; did you mean -i {prompt}?")

    from specctl.profile import parse_policy

    flags = sampling_flags(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        verification=verification,
        seed=seed,
        stop=stop or None,
    )
    flags |= {"prompt.chat": chat, "prompt.system": system, "draft.policy": policy and parse_policy(policy)}
    flags |= {"check": check or None, "engine": engine, "threads": threads}
    found = resolve_profile(profile, set_, flags, target=target, draft=draft, trust_remote_code=trust_remote_code)
    resolved = found.profile
    only_prompts = not from_stream or input_format == "text"
    if resolved.prompt.system is not None and not resolved.prompt.chat and only_prompts:
        raise UsageError("a system prompt needs the chat template", "add --chat")

    from rich.console import Console

    from specctl import streams
    from specctl.commands import streaming
    from specctl.commands.record_run import RecordFlags, RecordRun
    from specctl.observing.replicated_records import ReplicatedRecords
    from specctl.replicas.window import arriving
    from specctl.terminal.loading import TerminalProgress, resumable

    console = Console(stderr=True)
    shown_progress = TerminalProgress(console, False if quiet else progress)
    with ExitStack() as stack:
        outputs = stack.enter_context(Outputs(force=force))
        outputs.reads("input", (input_ or "-") if from_stream or prompt == "-" else None)
        spare_profile(outputs, found)
        source = stack.enter_context(streams.open_input(input_ or "-")) if from_stream else None
        sink = outputs.file("output", output, resumed=resume if from_stream else None)
        traced = outputs.file("trace", trace, resumed=resume if from_stream else None)
        run = None
        if source is not None:
            asked = RecordFlags(input_ or "-", input_format, resume, anyway, force, quiet, rounds, token_ids, trace)
            run = RecordRun(outputs, resolved, asked, sink, traced, console, keeps_turns=replication is None)
            if not run.left:
                run.begin()
                raise typer.Exit(1 if run.finished is not None and run.finished.failed else 0)
        text = streams.read_prompt() if prompt == "-" else prompt or ""
        total = streams.count_lines(input_) if from_stream else None
        expected = (total or 0) * resolved.sampling.max_new_tokens
        loading: dict[str, Any] = {"quiet": quiet, "traced": traced is not None, "foreign_head": foreign_head}
        replicas: Replicas | None = None
        if replication is not None:
            starting = replication.start(resolved, REPLICA, loading, shown_progress, expected)
            replicas = stack.enter_context(starting)
        else:
            answerer = load_answerers(resolved, shown_progress, expected_tokens=expected, **loading)()
        view = partial(streaming.view_of, resolved, console)
        if run is not None and source is not None:
            run.begin()
            answers: streaming.AnswersRecords
            records: Iterable[Any] = run.records(source)
            if replicas is not None:
                answers = ReplicatedRecords(replicas, sink, traced, run.finished, rounds, token_ids)
                if total is None:
                    records = arriving(run.records(streams.apart(source)))
            else:
                from specctl.observing.record_stream import RecordStream, trace_alone

                watch = streaming.live_watch(answerer, view) if live else trace_alone
                answers = RecordStream(answerer, sink, traced, run.finished, rounds, token_ids, watch, run.turns)
            # Results and panels on the same terminal show the progress themselves.
            silent = live or (output == "-" and sys.stdout.isatty())
            bar = TerminalProgress(console, False) if silent else shown_progress
            kept = None if quiet or output == "-" else output
            with resumable(console, kept), run.summing_up(answers.tally):
                complete = streaming.answer_records(answers, records, total, bar)
            if not complete:
                raise typer.Exit(1)
            return

        sink.begin()
        if traced is not None:
            traced.begin()
        from specctl.observing.record_stream import tracer

        record = Record(1, 1, {"prompt": text})
        on_round = tracer(record, traced)
        if json_:
            completions = answerer.answer(record, on_round)
            write_line(sink, result_line(record, completions, rounds=rounds, token_ids=token_ids))
            return
        shown = live if live is not None else console.is_terminal and sys.stdout.isatty() and not quiet
        streaming.show_prompt(answerer, record, sink, on_round, view(text) if shown else None)
