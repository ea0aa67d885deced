"""What the commands that train have in common: where their data come from, and what they read and write."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specctl.commands.grouped_command import require_unused
from specctl.commands.prompt_options import PromptOptions
from specctl.commands.tasks.command_files import spare_profile
from specctl.errors import UsageError
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.profile import ResolvedProfile


@dataclass(frozen=True, slots=True)
class DataFlags:
    """The flags that say what to train on.

    Attributes:
        name: of the flag that takes data of an earlier run, without dashes; with ``-only`` behind it, of the one that
            stops once they are there.
        earlier: that flag's folder.
        only: the other flag.
        prompts: the flags that choose prompts.
    """

    name: str
    earlier: Path | None
    only: bool
    prompts: PromptOptions

    def check(self, ctx: typer.Context) -> None:
        """Raise UsageError unless they name one source."""
        flag = f"--{self.name}"
        if self.earlier is not None and self.only:
            raise UsageError(f"{flag}-only and {flag} exclude each other", "leave one of them out")
        if self.earlier is not None:
            require_unused(ctx, self.name, "replaces the prompts", only=PromptOptions)
        elif self.prompts.suite is None and self.prompts.input_ is None:
            # No default: what is trained on the prompts of bench would be evaluated on its own training data.
            hint = f"give --input FILE or --suite NAME, or {flag} DIR"
            raise UsageError("there are no prompts to train on", hint)

    def claim(self, outputs: Outputs, found: "ResolvedProfile", output: Path, *, resume: bool) -> None:
        """Take the output folder, which holds none of what is read.

        Raises:
            OutputError: it cannot be taken.
        """
        self.prompts.read_by(outputs)
        spare_profile(outputs, found, heads=False)
        if self.earlier is not None:
            outputs.spare(self.name, self.earlier)
        outputs.folder("output", output, resumed=resume)
