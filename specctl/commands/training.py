"""What the commands that train have in common: where their material comes from, what they write, and their course."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from specctl.commands.grouped_command import require_unused
from specctl.commands.option_groups import RunOptions, ShowOptions
from specctl.commands.options import warn
from specctl.commands.prompt_options import PromptOptions
from specctl.commands.tasks.command_files import spare_profile
from specctl.commands.tasks.replication import ReplicaOptions
from specctl.errors import UsageError
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.profile import Profile, ResolvedProfile
    from specctl.terminal.progress import TerminalProgress
    from specctl.training.model_card import Report
    from specctl.training.subject import Source, Subject

    Trained = TypeVar("Trained", bound=Subject[Any, Any])


@dataclass(frozen=True, slots=True)
class TrainingFlags:
    """The flags that say what to train on, and where.

    Attributes:
        name: of the flag that takes material of an earlier run, without dashes; with ``-only`` behind it, of the one
            that stops once it is there.
        earlier: that flag's folder.
        only: the other flag.
        prompts: the flags that choose prompts.
        seed: draws a sample of them.
        output: the folder to write.
        resume: whether to continue what an earlier run left there.
        run, replicas, show: as for other commands.
    """

    name: str
    earlier: Path | None
    only: bool
    prompts: PromptOptions
    seed: int
    output: Path
    resume: bool
    run: RunOptions
    replicas: ReplicaOptions
    show: ShowOptions

    def check(self, ctx: typer.Context) -> None:
        """Raise UsageError unless they name one source, and replicas that there can be."""
        flag = f"--{self.name}"
        self.replicas.check_one()  # a value that is none is told before anything is read
        if self.earlier is not None and self.only:
            raise UsageError(f"{flag}-only and {flag} exclude each other", "leave one of them out")
        if self.earlier is not None:
            require_unused(ctx, self.name, "replaces the prompts", only=PromptOptions)
        elif self.prompts.suite is None and self.prompts.input_ is None:
            # No default: what is trained on the prompts of bench would be evaluated on its own training data.
            hint = f"give --input FILE or --suite NAME (embedded for a trial), or {flag} DIR"
            raise UsageError("there are no prompts to train on", hint)

    def claim(self, outputs: Outputs, found: "ResolvedProfile") -> None:
        """Take the output folder, which holds none of what is read.

        Raises:
            OutputError: it cannot be taken.
        """
        self.prompts.read_by(outputs)
        spare_profile(outputs, found, heads=False)
        if self.earlier is not None:
            outputs.spare(self.name, self.earlier)
        outputs.folder("output", self.output, resumed=self.resume)

    def source(self, subject: "Subject[Any, Any]", progress: "TerminalProgress") -> "Source[Any, Any]":
        """Material of an earlier run, or made of the prompts as far as it is missing."""
        if self.earlier is not None:
            source = subject.open(self.earlier, progress)
            if not self.resume:
                subject.start_over(self.output)
            return source
        replicas = None
        if (replication := self.replicas.replication) is not None:
            replicas = partial(replication.start, subject.profile, subject.maker, subject.setup, progress)
        suite, batch = self.prompts.chosen(self.seed), self.replicas.rows or 1
        source = subject.collect(self.output, suite, progress, resume=self.resume, batch=batch, replicas=replicas)
        for identity, reason in source.material.left_out.items():
            warn(f"prompt {identity} is left out: {reason}")
        return source

    def train(
        self,
        found: "ResolvedProfile",
        begin: "Callable[[Profile], Trained]",
        finish: "Callable[[Trained, Source[Any, Any], TerminalProgress], Report]",
    ) -> None:
        """Collect, train, write and show.

        Args:
            found: the profile.
            begin: makes the subject; it is what imports torch.
            finish: trains it, and writes what was trained.
        """
        from specctl.terminal.progress import resumable

        progress = self.show.bars()
        with progress.doing("starting"):
            from specctl.models.running.threads import use

            use(found.profile.threads)
            subject = begin(found.profile)
        with Outputs(force=self.run.force) as outputs, resumable(progress.console, self.output):
            self.claim(outputs, found)
            if self.resume and subject.is_finished(self.output):
                progress.say(f"{self.output} is finished")
                return
            source = self.source(subject, progress)
            if self.only:
                return
            report = finish(subject, source, progress)
        self.show.outcome(report.document, report.tables)
