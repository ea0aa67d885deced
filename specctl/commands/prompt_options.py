"""The options that choose the prompts which a command runs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.commands.options import PROMPTS
from specctl.errors import UsageError
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.prompts.suites import Suite


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Which prompts."""

    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            metavar="NAME",
            help="Name of a prompt suite, such as gsm8k. Default of bench, analyze and calibrate: embedded.",
            rich_help_panel=PROMPTS,
        ),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="FILE", help="A local copy of the suite, in its original format.", rich_help_panel=PROMPTS
        ),
    ] = None
    input_: Annotated[
        str | None,
        typer.Option(
            "--input", "-i", metavar="FILE|-", help="Records to run instead of a suite.", rich_help_panel=PROMPTS
        ),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, metavar="N", help="Use only the first N prompts.", rich_help_panel=PROMPTS),
    ] = None
    category: Annotated[
        list[str] | None,
        typer.Option(
            "--category", metavar="NAME", help="Use only prompts of this category; repeatable.", rich_help_panel=PROMPTS
        ),
    ] = None
    samples_per_category: Annotated[
        int | None,
        typer.Option(
            "--samples-per-category",
            min=1,
            metavar="N",
            help="Use a seeded random sample of N prompts of each category.",
            rich_help_panel=PROMPTS,
        ),
    ] = None

    def read_by(self, outputs: Outputs) -> None:
        """Keep the files that they name from being an output."""
        outputs.reads("input", self.input_)
        outputs.reads("data", self.data)

    def chosen(self, seed: int) -> "Suite":
        """The prompts, of which ``seed`` draws a sample.

        Raises:
            UsageError: options contradict each other, or the prompts cannot be read.
        """
        if self.input_ is not None and (self.suite is not None or self.data is not None):
            raise UsageError("--input replaces the suite", "leave out --input, or --suite and --data")
        from specctl.prompts.suites import EMBEDDED, load_records, load_suite

        chosen: dict[str, Any] = {
            "limit": self.limit,
            "categories": self.category or [],
            "samples_per_category": self.samples_per_category,
            "seed": seed,
        }
        if self.input_ is not None:
            return load_records(sys.stdin.buffer if self.input_ == "-" else Path(self.input_), **chosen)
        return load_suite(self.suite or EMBEDDED, data=self.data, **chosen)
