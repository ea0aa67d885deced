"""The flags that several commands share, in groups, with their meaning."""

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from specctl.commands.requests import RUNNING, But, option
from specctl.errors import UsageError, reason
from specctl.outputs import Outputs
from specctl.policies import POLICIES
from specctl.printable import one_line
from specctl.profile.profile_file import available
from specctl.profile.schema import FILTERS, GRAMMARS, MOST_LOGPROBS, Engine
from specctl.terminal.output import print_message, write_out, write_sentence

if TYPE_CHECKING:
    from specctl.policies import Setting
    from specctl.profile import ResolvedProfile
    from specctl.prompts.suites import Suite
    from specctl.reporting.style import Picture
    from specctl.reporting.table import Table
    from specctl.terminal.progress import TerminalProgress
    from specctl.text_engine.row_count import Batch


SAMPLING, PROMPTS = "Sampling", "Prompts"  # Help headings of options that most runs leave out


def complete_profile(incomplete: str) -> list[tuple[str, str]]:
    return [(name, _description(path)) for name, path in available().items() if name.startswith(incomplete)]


def _description(path: Path) -> str:
    try:
        # Reading a pipe would wait for its writer.
        description = tomllib.loads(path.read_text(encoding="utf-8") if path.is_file() else "").get("description", "")
    except (OSError, ValueError, RecursionError):
        return ""  # completion in a shell cannot show an error
    return " ".join(one_line(str(description)).split())


def complete_policy(incomplete: str) -> list[tuple[str, str]]:
    return [
        (name, (cls.__doc__ or "").partition("\n")[0]) for name, cls in POLICIES.items() if name.startswith(incomplete)
    ]


PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME[:K=V,...]",
        autocompletion=complete_policy,
        help="Stopping policy, with settings: svip:threshold=0.4. Default: the profile's. In a hierarchy it stops the "
        "target's own draft.",
    ),
]

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a profile value: sampling.temperature=0.7. Repeatable.",
    ),
]

TemplateOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        show_default=False,
        help="Use the chat template, or send the text as it is. Default: profile, else the template if there is one.",
    ),
]

ForceOption = Annotated[bool, typer.Option("--force", help="Replace output files that exist.", rich_help_panel=RUNNING)]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def policy_flag(policy: str | None) -> dict[str, Any]:
    """The profile values that --policy sets, by dotted key."""
    from specctl.profile import parse_policy

    return {"draft.policy": policy and parse_policy(policy)}


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print_message(text, "warning")


def warn_never_stopping(settings: "Iterable[Setting]") -> None:
    """Warn of each policy whose threshold no token reaches."""
    for label, most in {
        one.word: one.longest_draft for each in settings for one in each.levels if one.never_stops
    }.items():
        warn(f"{label} never stops a draft before its limit: it is a slower constant:draft_length={most}")


def warn_unused(resolved: "Sequence[ResolvedProfile]") -> None:
    """Warn of settings ignored in further profiles: the first one sets the engine and the sampling."""
    from specctl.reporting.placing import listed

    first, *others = resolved
    for one in others:
        if keys := one.unused(first.profile):
            are = "is" if len(keys) == 1 else "are"
            warn(f"{one.name}: {listed(keys)} {are} not used: the first profile, {first.name}, decides for the run")


def text_of(path: Path, what: str) -> str:
    """The text of a small file; raises UsageError, whose message names the file as ``what``."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {what} {path}: {why}") from error


def schema_of(path: Path) -> Any:
    """The JSON schema in a file; raises UsageError for other content."""
    try:
        schema = json.loads(text_of(path, "the JSON schema"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {reason(error)}") from error
    if not isinstance(schema, dict | bool):
        raise UsageError(f"{path} is not a JSON schema: an object is expected, or true for any JSON")
    return schema


LIMIT = "Most new tokens {}. Default: profile, else 256."


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Options that choose models."""

    profile: str | None = option(
        "The models and their settings, by name or path. Default: --target and --draft, else SPECCTL_PROFILE, else the "
        "embedded models.",
        "--profile -p NAME",
        autocompletion=complete_profile,
    )
    target: str | None = option(
        "Target model: a folder, hub id or GGUF file. With --profile it replaces the profile's; without, the policy is "
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
    """Options that override profile values or decide how passes run."""

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
        """The profile of these models with these options and ``flags`` applied; ``flags`` are by dotted key.

        Warns if a profile in ./profiles hides another, and of profile values about models that flags replace.
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
    """Options of sampling."""

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
        """The profile values that they set, by dotted key; None for an option that was not given.

        Raises:
            UsageError: a grammar file cannot be read.
        """
        values = {f"sampling.{one.name}": getattr(self, one.name) for one in fields(self)}
        return {
            **values,
            "sampling.stop": self.stop or None,
            "sampling.json_schema": None if self.json_schema is None else schema_of(self.json_schema),
            "sampling.grammar": None if self.grammar is None else text_of(self.grammar, "the grammar"),
        }


FewSamplingOptions = Annotated[SamplingOptions, But((*FILTERS, "stop", "logprobs", *GRAMMARS))]
"""The sampling options without those that shape the distribution or end a text."""
LimitOptions = Annotated[FewSamplingOptions, But(("temperature", "verification", "seed"))]  # The length alone


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """Options of the output on the screen."""

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
        """Print a JSON document with --json, else tables followed by lines of text."""
        from rich.console import Console

        from specctl.files import write_line
        from specctl.reporting.console import print_tables

        if self.json_:
            write_line(sys.stdout, document)
            return
        print_tables(Console(), tables)
        for text in texts:  # several lines are meant to be copied unchanged
            (write_out if "\n" in text else write_sentence)(text)

    def document(
        self,
        title: str,
        tables: "Sequence[Table]",
        pictures: "Iterable[Picture]",
        facts: Mapping[str, Any],
        *,
        command: str,
        verdict: str = "",
    ) -> None:
        """Write the report if one is requested, with the arguments of `write_document`, and print its files."""
        if self.report is not None:
            from specctl.reporting.document import write_document

            self.written(write_document(title, tables, pictures, facts, self.report, command=command, verdict=verdict))

    def written(self, paths: "Iterable[Path]") -> None:
        """Print the written files, unless --quiet; all figures, with two files each, share one line."""
        figures: dict[Path, list[str]] = {}
        for path in () if self.quiet else paths:
            if path.suffix in (".png", ".svg"):
                figures.setdefault(path.parent, []).append(path.stem)
            else:
                print_message(f"wrote {path}")
        for folder, names in figures.items():
            print_message(f"wrote figures to {folder}, as PNG and SVG: {', '.join(dict.fromkeys(names))}")

    def bars(self) -> "TerminalProgress":
        """Progress on standard error."""
        from rich.console import Console

        from specctl.terminal.progress import TerminalProgress

        return TerminalProgress(Console(stderr=True, quiet=self.quiet), self.progress)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Options that choose prompts."""

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
        """Protect the named input files from being an output."""
        outputs.reads("input", self.input_)
        outputs.reads("data", self.data)

    def chosen(self, seed: int) -> "Suite":
        """The prompts; ``seed`` draws the samples.

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


def protect_profile(outputs: Outputs, resolved: "ResolvedProfile", *, heads: bool = True) -> None:
    """Protect a profile's files, those of its models and, if heads are read, those of heads from being an output."""
    for file in resolved.files:
        outputs.protect("profile", file)
    profile = resolved.profile
    for table in (profile.target, *(profile.draft.levels if profile.draft is not None else ())):
        outputs.protect("model", os.path.expanduser(table.checkpoint))
        if table.adapter is not None:
            outputs.protect("adapter", os.path.expanduser(table.adapter))
        if heads and (head := getattr(table, "head", None)) is not None:
            outputs.protect("head", os.path.expanduser(head))


def open_report(outputs: Outputs, folder: Path | None) -> None:
    """Make, check and lock the folder of a report; raises UsageError also if figures cannot be drawn."""
    if folder is None:
        return
    from specctl.reporting.document import REPORT_FILES
    from specctl.reporting.style import require_matplotlib

    require_matplotlib()
    outputs.folder("report", folder, REPORT_FILES)


REPLICAS = "Replicas"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Replication:
    """The replicas that the flags describe."""

    workers: int | Literal["auto"]  # number of replicas
    cluster: str | None = None  # address of Ray; None for processes on this machine
    warm_seconds: float = 0.0  # time that idle replicas stay in the cluster; 0 to end them with the command


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options of replicas of the pair."""

    panel = REPLICAS
    workers: str | None = option(
        "Replicas of the pair, each with GPUs or cores of its own. auto: as many as the GPUs hold, else one per core.",
        "N|auto",
    )
    cluster: str | None = option(
        "Place the replicas on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT. auto: the one that runs here, else "
        "a new one on this machine.",
        "ADDRESS",
    )
    keep_warm: str | None = option(
        "Keep the replicas in the cluster, such as for 30m, for the next command with this profile.",
        "DURATION",
    )

    batch: str | None = option(
        "Records per forward pass. auto: as many as memory allows and make it faster.",
        "N|auto",
    )

    @property
    def at_once(self) -> "Batch | None":
        """The value of --batch; None without it. Raises UsageError for an invalid one."""
        if self.batch is None:
            return None
        if self.batch == "auto":
            return "auto"
        if not (self.batch.isdecimal() and int(self.batch)):
            raise UsageError(f"--batch needs a number or auto, not {self.batch}", "e.g. --batch 8")
        return int(self.batch)

    def check_one(self) -> None:
        """Raise UsageError for an invalid value, and for replicas together with --batch."""
        if self.replication is not None and self.at_once not in (None, 1):
            raise UsageError("--batch works only in one process, and --workers starts several", "leave one out")

    @property
    def replication(self) -> Replication | None:
        """The replicas; None without any of the flags.

        Raises:
            UsageError: a value is invalid, or --keep-warm is given without --cluster.
        """
        workers = self.workers
        if self.keep_warm is not None and self.cluster is None:
            raise UsageError("--keep-warm needs a cluster that outlives this command", "add --cluster, or leave it out")
        if workers is None and self.cluster is None:
            return None
        if workers not in (None, "auto") and not (workers.isdecimal() and int(workers)):
            raise UsageError(f"--workers needs a number or auto, not {workers}", "e.g. --workers 4")
        count: int | Literal["auto"] = "auto" if workers in (None, "auto") else int(workers)
        return Replication(count, self.cluster, 0.0 if self.keep_warm is None else _seconds(self.keep_warm))


def _seconds(duration: str) -> float:
    """The seconds of a duration such as ``90s``, ``30m``, ``2h`` or ``1d``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", duration)
    if found is None or not float(found[1]):
        raise UsageError(f"--keep-warm {duration} is not a duration", "e.g. --keep-warm 30m")
    return float(found[1]) * _SECONDS[found[2]]


def batch_sizes(text: str | None) -> "tuple[Batch, list[int]]":
    """The batch size of answers, and the batch sizes above 1 that a calibration is for.

    Raises:
        UsageError: the text is neither a list of numbers nor ``auto``.
    """
    if text is None or "," not in text:
        at_once = ReplicaOptions(batch=text).at_once or 1
        return at_once, [] if at_once == "auto" or at_once == 1 else [at_once]
    sizes = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in sizes):
        raise UsageError(f"--batch needs numbers with commas, not {text}", "e.g. --batch 1,4,16")
    numbers = sorted({int(part) for part in sizes} - {1})
    return max([1, *numbers]), numbers


FewReplicaOptions = Annotated[ReplicaOptions, But(("keep_warm",))]  # Omitted by commands that end their replicas
BareReplicaOptions = Annotated[ReplicaOptions, But(("keep_warm", "batch"))]
"""Omitted by commands that end their replicas and have a --batch of their own."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server that replaces local models."""

    panel = "A server"
    url: str | None = option(
        "Ask a running server instead: specctl serve, vLLM, llama.cpp. --model chooses among its models.",
        "URL",
    )
    api_key: str | None = option(
        "The server's key. In the environment other users of the machine do not see it.",
        "KEY",
        envvar="SPECCTL_API_KEY",
        show_default=False,
    )
