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
from specctl.commands.generate_options import (
    RECORDS,
    AnywayOption,
    FileOption,
    InputOption,
    LongestOption,
    MinPOption,
    OutputOption,
    RecordSeedOption,
    ResumeOption,
    StopOption,
    SystemOption,
    TopKOption,
    TopPOption,
)
from specctl.commands.options import (
    CheckOption,
    DraftOption,
    EngineOption,
    ForceOption,
    ForeignHeadOption,
    PolicyOption,
    ProfileOption,
    ProgressOption,
    QuietOption,
    SetOption,
    TargetOption,
    TemperatureOption,
    TemplateOption,
    ThreadsOption,
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

SHOWN = "What is shown"


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            show_default=False,
            help="Text to continue or to answer; - reads all of standard input as one prompt, without its last line "
            "break.",
        ),
    ] = None,
    profile: ProfileOption = None,
    target: TargetOption = None,
    draft: DraftOption = None,
    policy: PolicyOption = None,
    set_: SetOption = None,
    engine: EngineOption = None,
    threads: ThreadsOption = None,
    max_new_tokens: LongestOption = None,
    temperature: TemperatureOption = None,
    file: FileOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    verification: VerificationOption = None,
    seed: RecordSeedOption = None,
    stop: StopOption = None,
    chat: TemplateOption = None,
    system: SystemOption = None,
    input_: InputOption = None,
    output: OutputOption = "-",
    input_format: Annotated[
        InputFormat,
        typer.Option(help="Whether an input line is a JSON object or a plain-text prompt.", rich_help_panel=RECORDS),
    ] = "jsonl",
    resume: ResumeOption = False,
    anyway: AnywayOption = False,
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
    if prompt is not None and file is not None:
        raise UsageError("PROMPT and --file exclude each other", "leave one of them out")
    if prompt == "-":
        prompt, file = None, "-"
    asked = prompt is not None or file is not None
    from_stream = input_ is not None or (not asked and piped)
    if not asked and not from_stream:
        raise UsageError(
            "there is nothing to generate from", "give a PROMPT, one in a file with -f FILE, or records with -i FILE"
        )
    if asked and input_ is not None:
        which = "PROMPT" if file is None or file == "-" else "--file"
        raise UsageError(f"{which} and --input exclude each other", "leave one of them out")
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
    if resolved.prompt.system is not None and resolved.prompt.chat is False and only_prompts:
        raise UsageError("a system prompt needs the chat template", "leave out --raw, or add --chat")

    from rich.console import Console

    from specctl import streams
    from specctl.commands import streaming
    from specctl.commands.record_run import RecordFlags, RecordRun
    from specctl.observing.replicated_records import ReplicatedRecords
    from specctl.replicas.window import arriving
    from specctl.terminal.work_progress import TerminalProgress, resumable

    console = Console(stderr=True)
    shown_progress = TerminalProgress(console, False if quiet else progress)
    with ExitStack() as stack:
        outputs = stack.enter_context(Outputs(force=force))
        outputs.reads("input", (input_ or "-") if from_stream else file)
        spare_profile(outputs, found)
        source = stack.enter_context(streams.open_input(input_ or "-")) if from_stream else None
        sink = outputs.file("output", output, resumed=resume if from_stream else None)
        traced = outputs.file("trace", trace, resumed=resume if from_stream else None)
        run = None
        if source is not None:
            wanted = RecordFlags(input_ or "-", input_format, resume, anyway, force, quiet, rounds, token_ids, trace)
            run = RecordRun(outputs, resolved, wanted, sink, traced, console, keeps_turns=replication is None)
            if not run.left:
                run.begin()
                raise typer.Exit(1 if run.finished is not None and run.finished.failed else 0)
        text = prompt or "" if file is None else streams.read_prompt(file)
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
