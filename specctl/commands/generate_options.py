"""Options of `specctl generate` about its records and what is shown of them."""

from dataclasses import dataclass
from typing import Annotated

import typer

from specctl.jsonl import InputFormat

RECORDS, SHOWN = "Records", "What is shown"


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Which records are answered, and where the results go."""

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
    ] = None
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
    ] = "-"
    input_format: Annotated[
        InputFormat,
        typer.Option(help="Whether an input line is a JSON object or a plain-text prompt.", rich_help_panel=RECORDS),
    ] = "jsonl"
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an interrupted run: keep the results in --output and answer only records whose id is not "
            "there. The id of a record without one is its line number. Policies that learn start from nothing again. "
            "What other models, settings or prompts made is refused.",
            rich_help_panel=RECORDS,
        ),
    ] = False
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Let --resume go on with the results of another run.", rich_help_panel=RECORDS),
    ] = False

    @property
    def source(self) -> str:
        """The file of records, ``-`` for standard input."""
        return self.input_ or "-"


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """What a result holds, and what is shown beside it."""

    json_: Annotated[
        bool, typer.Option("--json", help="Print the result for PROMPT as one JSON document.", rich_help_panel=SHOWN)
    ] = False
    rounds: Annotated[
        bool, typer.Option("--rounds", help="Add every round to the JSON results.", rich_help_panel=SHOWN)
    ] = False
    token_ids: Annotated[
        bool,
        typer.Option("--token-ids", help="Add the generated token ids to the JSON results.", rich_help_panel=SHOWN),
    ] = False
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="Write a JSON line per round, with each draft token and its signals.",
            rich_help_panel=SHOWN,
        ),
    ] = None
    live: Annotated[
        bool | None,
        typer.Option(
            "--live/--no-live",
            help="Show a live panel, or print the text as it grows. Default: live for a PROMPT in a terminal.",
            rich_help_panel=SHOWN,
        ),
    ] = None
