"""The folder that a training writes into: what an earlier run left there."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from specctl.errors import UsageError
from specctl.training.material import INDEX

STATE = "training.safetensors"
"""The state that an interrupted training goes on from; a whole run has none."""


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """What a command writes into its folder, besides `STATE`.

    Args:
        command: its name, for messages.
        data: the folder of data inside it.
        ends: files that it writes last: any of them says that all is written.
        others: further files by which its folder is known.
    """

    command: str
    data: str
    ends: Collection[str]
    others: Collection[str]

    def is_finished(self, output: Path) -> bool:
        """Whether an earlier run into this folder is complete; what it no longer needs is then removed.

        Raises:
            UsageError: the folder holds something, but nothing that the command alone writes.
        """
        held = {path.name.removesuffix(".part") for path in output.iterdir()}
        if held and not held & {self.data, STATE, *self.others}:
            raise UsageError(f"{output} holds nothing that specctl {self.command} has written", "use another folder")
        if not held & set(self.ends):
            return False
        (output / STATE).unlink(missing_ok=True)
        return True

    def start_over(self, output: Path) -> None:
        """Remove what tells that an earlier run into this folder got anywhere."""
        for name in (*self.ends, *self.others, STATE, f"{self.data}/{INDEX}"):
            (output / name).unlink(missing_ok=True)
