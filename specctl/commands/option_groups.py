"""The options that several commands offer, in groups: what a command gets is an object with their values."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from specctl.commands.grouped_command import But
from specctl.commands.options import (
    RUNNING,
    SAMPLING,
    ForceOption,
    JsonOption,
    SetOption,
    complete_profile,
    schema_of,
    text_of,
    warn,
)
from specctl.profile.base_tables import GRAMMARS, MOST_LOGPROBS
from specctl.profile.schema import Engine

if TYPE_CHECKING:
    from specctl.profile import ResolvedProfile
    from specctl.terminal.work_progress import TerminalProgress

LIMIT = "Maximum number of tokens {}. Default: the profile's; 256 unless it says."


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Which models."""

    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "-p",
            metavar="NAME",
            autocompletion=complete_profile,
            help="Name or path of a profile: the model pair, its policy and settings. Default: the pair of --target "
            "and --draft, else the profile that SPECCTL_PROFILE names, else the embedded models.",
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "--model",
            metavar="MODEL",
            help="Target model, a folder or hub id. With --profile it replaces the profile's target; without, the pair "
            "is --target and --draft, and the policy cost-optimal. A --target alone runs without a draft.",
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="MODEL",
            help="Draft model, a folder or hub id; prompt:lookup copies from the text, prompt:lookup+MODEL does both "
            "in turn. With --profile it replaces the profile's draft.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What of the profile is replaced, and how it runs."""

    set_: SetOption = None
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="|".join(get_args(Engine)),
            help="How forward passes run. Default: the profile's; auto takes the fastest that is installed and able.",
            rich_help_panel=RUNNING,
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            metavar="N",
            help="How many threads passes on the CPU run with. Default: what is faster on this machine as it is now.",
            rich_help_panel=RUNNING,
        ),
    ] = None
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="After the first rejected token, compare the target with a fresh read of the text; stop if they "
            "differ.",
            rich_help_panel=RUNNING,
        ),
    ] = False
    force: ForceOption = False
    foreign_head: Annotated[
        bool,
        typer.Option(
            "--foreign-head",
            help="Use the draft's head even if it was trained on another draft, with a warning.",
            rich_help_panel=RUNNING,
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Let a profile found in ./profiles run code that comes with its models.",
            rich_help_panel=RUNNING,
        ),
    ] = False

    def resolve(self, models: PairOptions, flags: Mapping[str, Any] = MappingProxyType({})) -> "ResolvedProfile":
        """The profile of these models as these options and ``flags`` change it, by dotted key.

        Warns where a profile of ./profiles hides another, and of what a profile says about models that flags replace.
        """
        from specctl.profile import resolve

        own: dict[str, Any] = {"target.model": models.target, "draft.model": models.draft, "engine": self.engine}
        own |= {"threads": self.threads, "check": self.check or None}
        resolved = resolve(
            models.profile,
            overrides=self.set_ or (),
            flags={**own, **flags},
            trust_remote_code=self.trust_remote_code,
        )
        for note in (*resolved.notes, *resolved.outdated):
            warn(note)
        return resolved


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How texts are sampled."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            "--max-tokens",
            min=1,
            metavar="N",
            help=LIMIT.format("to generate for each prompt"),
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            "-t", "--temperature", min=0, metavar="T", help="Sampling temperature; 0, the default, is greedy decoding."
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(min=0, metavar="K", help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=SAMPLING),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Keep the likeliest tokens of this total probability; 1 keeps all.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Keep tokens of at least this share of the top probability; 0 keeps all.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    verification: Annotated[
        Literal["token", "block"] | None,
        typer.Option(
            help="When sampling, verify draft tokens one by one or as a block, which keeps more of them; the text has "
            "the target's distribution with both.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Seed of all random draws. Default: 0.", rich_help_panel=SAMPLING),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End the text before this string appears. Repeatable.", rich_help_panel=SAMPLING
        ),
    ] = None
    json_schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Only JSON that fits the schema in this file may be written; a record may have its own `schema`.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    regex: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX", help="Only a text that matches as a whole may be written.", rich_help_panel=SAMPLING
        ),
    ] = None
    grammar: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Only what follows the Lark grammar in this file.", rich_help_panel=SAMPLING),
    ] = None

    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MOST_LOGPROBS,
            metavar="N",
            help="Add to JSON results the target's log-probability of each token, and the N likeliest ids with theirs.",
            rich_help_panel=SAMPLING,
        ),
    ] = None

    @property
    def flags(self) -> dict[str, Any]:
        """What they set in a profile, by dotted key; None is an option that was not given.

        Raises:
            UsageError: a file of a grammar cannot be read.
        """
        values = {f"sampling.{one.name}": getattr(self, one.name) for one in fields(self)}
        return {
            **values,
            "sampling.stop": self.stop or None,
            "sampling.json_schema": None if self.json_schema is None else schema_of(self.json_schema),
            "sampling.grammar": None if self.grammar is None else text_of(self.grammar, "the grammar"),
        }


FewSamplingOptions = Annotated[SamplingOptions, But(("top_k", "top_p", "min_p", "stop", "logprobs", *GRAMMARS))]
"""Without those that shape the distribution and the end of a text."""
LimitOptions = Annotated[FewSamplingOptions, But(("temperature", "verification", "seed"))]
"""The length of texts alone."""


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """What is shown of the outcome."""

    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.md, report.html and figures here.")
    ] = None
    json_: JsonOption = False
    progress: Annotated[
        bool | None,
        typer.Option(
            "--progress/--no-progress",
            help="Show progress on standard error: bars on a terminal, elsewhere a line every few seconds, by default "
            "once 10 seconds have passed.",
            show_default=False,
            rich_help_panel=RUNNING,
        ),
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors on standard error.")] = (
        False
    )

    def bars(self) -> "TerminalProgress":
        """Progress on standard error."""
        from rich.console import Console

        from specctl.terminal.work_progress import TerminalProgress

        return TerminalProgress(Console(stderr=True, quiet=self.quiet), self.progress)
