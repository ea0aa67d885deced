"""What the commands that train have in common: where their material comes from, what they write, and their course."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from specctl.commands.files import spare_profile
from specctl.commands.options import warn
from specctl.commands.replicating import Replication
from specctl.errors import UsageError
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.profile import Profile, ResolvedProfile
    from specctl.prompts.suites import Suite
    from specctl.terminal.work_progress import TerminalProgress
    from specctl.training.model_card import Report
    from specctl.training.subject import Source, Subject

    Trained = TypeVar("Trained", bound=Subject[Any, Any])


@dataclass(frozen=True, slots=True)
class DataFlags:
    """The flags that say what to train on.

    Attributes:
        name: of the flag that takes data of an earlier run, without dashes; with ``-only`` behind it, of the one that
            stops once they are there.
        earlier: that flag's folder.
        only: the other flag.
        suite, data, input_: the flags that choose prompts.
    """

    name: str
    earlier: Path | None
    only: bool
    suite: str | None
    data: Path | None
    input_: str | None

    def check(self) -> None:
        """Raise UsageError unless they name one source."""
        flag = f"--{self.name}"
        if self.earlier is not None and self.only:
            raise UsageError(f"{flag}-only and {flag} exclude each other", "leave one of them out")
        if self.earlier is not None and any(option is not None for option in (self.suite, self.data, self.input_)):
            raise UsageError(f"{flag} replaces the prompts", f"leave out {flag}, or the options that choose prompts")
        if self.earlier is None and self.suite is None and self.input_ is None:
            # No default: what is trained on the prompts of bench would be evaluated on its own training data.
            hint = f"give --input FILE or --suite NAME, or {flag} DIR"
            raise UsageError("there are no prompts to train on", hint)

    def claim(self, outputs: Outputs, found: "ResolvedProfile", output: Path, *, resume: bool) -> None:
        """Take the output folder, which holds none of what is read.

        Raises:
            OutputError: it cannot be taken.
        """
        outputs.reads("input", self.input_)
        outputs.reads("data", self.data)
        spare_profile(outputs, found, heads=False)
        if self.earlier is not None:
            outputs.spare(self.name, self.earlier)
        outputs.folder("output", output, resumed=resume)


def train(
    data: DataFlags,
    found: "ResolvedProfile",
    kind: str,
    begin: "Callable[[Profile], Trained]",
    finish: "Callable[[Trained, Source[Any, Any], TerminalProgress], Report]",
    *,
    prompts: "Callable[[], Suite]",
    replication: Replication | None,
    output: Path,
    resume: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    progress: bool | None,
) -> None:
    """Collect, train, write and show.

    Args:
        data: what to train on.
        found: the profile.
        kind: what replicas are asked to make; see `specctl.training.subjects.replica`.
        begin: makes the subject; it is what imports torch.
        finish: trains it, and writes what was trained.
        prompts: reads those that the flags choose.
        replication: replicas that collect, if there are to be any.
        output, resume, force, as_json, quiet, progress: the flags.
    """
    from rich.console import Console

    from specctl.files import write_line
    from specctl.reporting.console import print_tables
    from specctl.terminal.work_progress import TerminalProgress, resumable

    shown = TerminalProgress(Console(stderr=True, quiet=quiet), progress)
    with shown.doing("starting"):
        from specctl.models.running.threads import use

        use(found.profile.threads)
        subject = begin(found.profile)
    with Outputs(force=force) as outputs, resumable(shown.console, output):
        data.claim(outputs, found, output, resume=resume)
        if resume and subject.is_finished(output):
            shown.say(f"{output} is finished")
            return
        if data.earlier is not None:
            source = subject.open(data.earlier, shown)
            if not resume:
                subject.start_over(output)
        else:
            replicas = None
            if replication is not None:
                maker = "specctl.training.subjects:replica"
                replicas = partial(replication.start, subject.profile, maker, {"kind": kind}, shown)
            source = subject.collect(output, prompts(), shown, resume=resume, replicas=replicas)
            for identity, reason in source.material.left_out.items():
                warn(f"prompt {identity} is left out: {reason}")
        if data.only:
            return
        report = finish(subject, source, shown)
    if as_json:
        write_line(sys.stdout, report.document)
    else:
        print_tables(Console(), list(report.tables))
