"""Options of `specctl generate` about its prompt, its records and how it samples."""

from typing import Annotated

import typer

from specctl.commands.options import SAMPLING

RECORDS = "Records"

FileOption = Annotated[
    str | None,
    typer.Option("-f", "--file", metavar="FILE|-", help="Read the PROMPT from this file; - is standard input."),
]

LongestOption = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        "--max-tokens",
        min=1,
        metavar="N",
        help="Maximum number of tokens to generate. Default: the profile's; 256 unless it says.",
    ),
]

TopKOption = Annotated[
    int | None,
    typer.Option(min=0, metavar="K", help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=SAMPLING),
]

TopPOption = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="Keep the likeliest tokens of this total probability; 1 keeps all.", rich_help_panel=SAMPLING
    ),
]

MinPOption = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Keep tokens of at least this share of the top probability; 0 keeps all.",
        rich_help_panel=SAMPLING,
    ),
]

RecordSeedOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Seed of all random draws, by default 0; every record has draws of its own.",
        rich_help_panel=SAMPLING,
    ),
]

StopOption = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End the text before this string appears. Repeatable.", rich_help_panel=SAMPLING),
]

SystemOption = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt of every chat.")]

InputOption = Annotated[
    str | None,
    typer.Option(
        "-i",
        "--input",
        metavar="FILE|-",
        help="Records to answer, one JSON object per line, with prompt, messages or turns, and settings of their "
        "own such as max_tokens; all keys are in docs/words.md.",
        rich_help_panel=RECORDS,
    ),
]

OutputOption = Annotated[
    str,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE|-",
        help="Write results here instead of to standard output.",
        show_default=False,
        rich_help_panel=RECORDS,
    ),
]

ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue an interrupted run: keep the results in --output and answer only records whose id is not "
        "there. The id of a record without one is its line number. Policies that learn start from nothing again. "
        "What other models, settings or prompts made is refused.",
        rich_help_panel=RECORDS,
    ),
]

AnywayOption = Annotated[
    bool,
    typer.Option("--anyway", help="Let --resume go on with the results of another run.", rich_help_panel=RECORDS),
]
