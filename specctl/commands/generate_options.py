"""Options of `specctl generate` about its records and what is shown of them."""

from dataclasses import dataclass

from specctl.commands.grouped_command import option
from specctl.jsonl import InputFormat

RECORDS, SHOWN = "Records", "What is shown"


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Which records are answered, and where the results go."""

    panel = RECORDS
    input_: str | None = option(
        "Records to answer, one JSON object per line, with prompt, messages or turns, and settings of their own such "
        "as max_tokens; all keys are in docs/words.md.",
        "-i --input FILE|-",
    )
    output: str = option(
        "Write results here instead of to standard output.", "-o --output FILE|-", default="-", show_default=False
    )
    input_format: InputFormat = option(
        "Whether an input line is a JSON object or a plain-text prompt.", default="jsonl"
    )
    resume: bool = option(
        "Continue an interrupted run: keep the results in --output and answer only records whose id is not there. The "
        "id of a record without one is its line number. Policies that learn start from nothing again. What other "
        "models, settings or prompts made is refused.",
        "--resume",
        default=False,
    )
    anyway: bool = option("Let --resume go on with the results of another run.", "--anyway", default=False)

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
        "Show a live panel, or print the text as it grows. Default: live for a PROMPT in a terminal.",
        "--live/--no-live",
    )
