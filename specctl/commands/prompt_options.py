"""The options that choose the prompts which a command runs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.commands.grouped_command import option
from specctl.commands.options import PROMPTS
from specctl.errors import UsageError
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.prompts.suites import Suite


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Which prompts."""

    panel = PROMPTS
    suite: str | None = option(
        "Prompt suite, such as gsm8k. Default of bench, analyze and calibrate: embedded.", "NAME"
    )
    data: Path | None = option("A local copy of the suite, in its original format.", "FILE")
    input_: str | None = option("Records to run instead of a suite.", "--input -i FILE|-")
    limit: int | None = option("Use only the first N prompts.", "N", min=1)
    category: list[str] | None = option("Use only prompts of this category; repeatable.", "NAME")
    samples_per_category: int | None = option("Use a seeded random sample of N prompts per category.", "N", min=1)

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
