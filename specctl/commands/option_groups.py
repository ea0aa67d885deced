"""The options that several commands offer, in groups: what a command gets is an object with their values."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from specctl.commands.grouped_command import But, option
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
    warn_never_stopping,
)
from specctl.profile.schema import FILTERS, GRAMMARS, MOST_LOGPROBS, Engine
from specctl.terminal.output import tell, write_out, write_sentence

if TYPE_CHECKING:
    from specctl.profile import ResolvedProfile
    from specctl.reporting.table import Table
    from specctl.terminal.progress import TerminalProgress

LIMIT = "Most new tokens {}. Default: profile, else 256."


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Which models."""

    profile: str | None = option(
        "The models and their settings, by name or path. Default: --target and --draft, else SPECCTL_PROFILE, else the "
        "embedded models.",
        "--profile -p NAME",
        autocompletion=complete_profile,
    )
    target: str | None = option(
        "Target model: a folder or hub id. With --profile it replaces the profile's; without, the policy is "
        "cost-optimal, and a --target without --draft runs alone.",
        "--target --model MODEL",
    )
    draft: str | None = option(
        "Draft model, or prompt:lookup to copy from the text. prompt:lookup+MODEL does both in turn. With --profile it "
        "replaces the profile's draft.",
        "MODEL",
    )


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What of the profile is replaced, and how it runs."""

    set_: SetOption = None
    engine: str | None = option(
        "How forward passes run. auto: the fastest that is installed and can run the models. Default: profile, else "
        "auto.",
        panel=RUNNING,
        metavar="|".join(get_args(Engine)),
    )
    threads: int | None = option(
        "Threads for passes on the CPU. Default: measured at start.",
        "N",
        panel=RUNNING,
        min=1,
    )
    check: bool = option(
        "After the first rejected token, compare the target with a fresh read of the text; stop if they differ.",
        "--check",
        default=False,
        panel=RUNNING,
    )
    force: ForceOption = False
    foreign_head: bool = option(
        "Use the draft's head even if it was trained on another draft, with a warning.",
        "--foreign-head",
        default=False,
        panel=RUNNING,
    )
    trust_remote_code: bool = option(
        "Let a profile found in ./profiles run code that comes with its models.",
        "--trust-remote-code",
        default=False,
        panel=RUNNING,
    )

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
        if resolved.profile.draft is not None:
            warn_never_stopping([resolved.profile.draft.setting])
        return resolved


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How texts are sampled."""

    panel = SAMPLING
    max_new_tokens: int | None = option(
        LIMIT.format("for each prompt"), "--max-new-tokens -n --max-tokens N", panel="", min=1
    )
    temperature: float | None = option(
        "Sampling temperature; 0, the default, is greedy.", "-t --temperature T", panel="", min=0
    )
    top_k: int | None = option("Keep the k likeliest tokens; 0 keeps all.", "K", min=0)
    top_p: float | None = option("Keep the likeliest tokens of this total probability; 1 keeps all.", "P")
    min_p: float | None = option("Keep tokens of at least this share of the top probability; 0 keeps all.", "P")
    typical_p: float | None = option(
        "Keep the tokens that are about as likely as the distribution is uncertain, of this total probability; 1 keeps "
        "all.",
        "P",
    )
    epsilon_cutoff: float | None = option("Keep tokens of at least this probability; 0 keeps all.", "P")
    eta_cutoff: float | None = option(
        "The same with a lower bound where the distribution is uncertain; 0 keeps all.", "P"
    )
    top_h: float | None = option(
        "Keep the likeliest tokens that have this part of the entropy together; 0 keeps all.", "P"
    )
    verification: Literal["token", "block"] | None = option(
        "When sampling, verify draft tokens one by one or as a block, which keeps more of them; the text has the "
        "target's distribution with both."
    )
    seed: int | None = option("Seed of all random draws. Default: 0.", "N", min=0)
    stop: list[str] | None = option("End the text before this string appears. Repeatable.", "TEXT")
    json_schema: Path | None = option(
        "Write only JSON that fits the schema in this file. A record may have its own `schema`.", "FILE"
    )
    regex: str | None = option("Write only text that matches as a whole.", "REGEX")
    grammar: Path | None = option("Write only text of the Lark grammar in this file.", "FILE")

    logprobs: int | None = option(
        "Add to JSON results the target's log-probability of each token, and the N likeliest ids with theirs.",
        "N",
        min=0,
        max=MOST_LOGPROBS,
    )

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


FewSamplingOptions = Annotated[SamplingOptions, But((*FILTERS, "stop", "logprobs", *GRAMMARS))]
"""Without those that shape the distribution and the end of a text."""
LimitOptions = Annotated[FewSamplingOptions, But(("temperature", "verification", "seed"))]
"""The length of texts alone."""


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """What is shown of the outcome."""

    report: Path | None = option("Write report.md, report.html and figures here.", "DIR")
    json_: JsonOption = False
    progress: bool | None = option(
        "Show progress on standard error: bars on a terminal, else a line every few seconds. Default: bars, or lines "
        "after 10 seconds.",
        "--progress/--no-progress",
        panel=RUNNING,
        show_default=False,
    )
    quiet: bool = option("Print only warnings and errors on standard error.", "--quiet -q", default=False)

    def outcome(self, document: Any, tables: "Iterable[Table]", *texts: str) -> None:
        """Print a JSON document or, as was asked for, tables and lines of text behind them."""
        from rich.console import Console

        from specctl.files import write_line
        from specctl.reporting.console import print_tables

        if self.json_:
            write_line(sys.stdout, document)
            return
        print_tables(Console(), tables)
        for text in texts:  # what has several lines is copied as it is
            (write_out if "\n" in text else write_sentence)(text)

    def written(self, paths: "Iterable[Path]") -> None:
        """Say which files were written, unless nothing is to be said; all figures, each of two files, in one line."""
        figures: dict[Path, list[str]] = {}
        for path in () if self.quiet else paths:
            if path.suffix in (".png", ".svg"):
                figures.setdefault(path.parent, []).append(path.stem)
            else:
                tell(f"wrote {path}")
        for folder, names in figures.items():
            tell(f"wrote figures to {folder}, as PNG and SVG: {', '.join(dict.fromkeys(names))}")

    def bars(self) -> "TerminalProgress":
        """Progress on standard error."""
        from rich.console import Console

        from specctl.terminal.progress import TerminalProgress

        return TerminalProgress(Console(stderr=True, quiet=self.quiet), self.progress)
