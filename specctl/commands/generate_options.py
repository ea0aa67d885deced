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
