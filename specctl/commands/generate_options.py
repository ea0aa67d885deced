"""Options of `specctl generate` about its prompt and how it samples."""

from typing import Annotated

import typer

from specctl.commands.options import SAMPLING

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
