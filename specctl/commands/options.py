"""Options that several commands share."""

import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from specctl.errors import UsageError
from specctl.policies import POLICIES
from specctl.printable import one_line
from specctl.profile.discovery import available
from specctl.profile.schema import Engine
from specctl.terminal.output import tell

if TYPE_CHECKING:
    from specctl.prompts.suites import Suite

SAMPLING, PROMPTS, RUNNING = "Sampling", "Prompts", "How it runs"
"""Headings of the help for options that most runs leave out."""


def complete_profile(incomplete: str) -> list[tuple[str, str]]:
    return [(name, _description(path)) for name, path in available().items() if name.startswith(incomplete)]


def _description(path: Path) -> str:
    try:
        # Reading a pipe would wait for its writer.
        description = tomllib.loads(path.read_text(encoding="utf-8") if path.is_file() else "").get("description", "")
    except (OSError, ValueError, RecursionError):
        return ""  # a shell that completes a name cannot show an error
    return " ".join(one_line(str(description)).split())


def complete_policy(incomplete: str) -> list[tuple[str, str]]:
    return [
        (name, (cls.__doc__ or "").partition("\n")[0]) for name, cls in POLICIES.items() if name.startswith(incomplete)
    ]


ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "-p",
        metavar="NAME",
        autocompletion=complete_profile,
        help="Name or path of a profile: the model pair, its policy and settings. Default: the pair of --target and "
        "--draft, else the profile that SPECCTL_PROFILE names, else the embedded models.",
    ),
]

TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        "--model",
        metavar="MODEL",
        help="Target model, a folder or hub id. With --profile it replaces the profile's target; without, the pair is "
        "--target and --draft, and the policy cost-optimal. A --target alone runs without a draft.",
    ),
]

DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        help="Draft model, a folder or hub id; prompt:lookup copies from the text. With --profile it replaces the "
        "profile's draft.",
    ),
]

ProfileOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        "-p",
        metavar="NAME",
        autocompletion=complete_profile,
        help="Name or path of a profile; repeatable. All must have the same target; each adds its drafts and policies.",
    ),
]

PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME:KEY=VALUE,...",
        autocompletion=complete_policy,
        help="Stopping policy to use instead of the profile's, optionally with settings: svip:threshold=0.4. "
        "In a hierarchy it applies to the target's own draft.",
    ),
]

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a profile value, e.g. sampling.temperature=0.7 or policy.threshold=0.4. Repeatable.",
    ),
]

SuiteOption = Annotated[
    str | None,
    typer.Option(
        "--suite",
        metavar="NAME",
        help="Name of a prompt suite, such as gsm8k. Default of bench, analyze and calibrate: embedded.",
        rich_help_panel=PROMPTS,
    ),
]

SuiteDataOption = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="FILE", help="A local copy of the suite, in its original format.", rich_help_panel=PROMPTS
    ),
]

InputOption = Annotated[
    str | None,
    typer.Option("--input", "-i", metavar="FILE|-", help="Records to run instead of a suite.", rich_help_panel=PROMPTS),
]

LimitOption = Annotated[
    int | None,
    typer.Option("--limit", min=1, metavar="N", help="Use only the first N prompts.", rich_help_panel=PROMPTS),
]

CategoryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--category", metavar="NAME", help="Use only prompts of this category; repeatable.", rich_help_panel=PROMPTS
    ),
]

SamplesOption = Annotated[
    int | None,
    typer.Option(
        "--samples-per-category",
        min=1,
        metavar="N",
        help="Use a seeded random sample of N prompts of each category.",
        rich_help_panel=PROMPTS,
    ),
]

MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        "--max-tokens",
        min=1,
        metavar="N",
        help="Maximum number of tokens to generate for each prompt. Default: the profile's; 256 unless it says.",
    ),
]

TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "-t", "--temperature", min=0, metavar="T", help="Sampling temperature; 0, the default, is greedy decoding."
    ),
]

VerificationOption = Annotated[
    Literal["token", "block"] | None,
    typer.Option(
        help="When sampling, verify draft tokens one by one or as a block, which keeps more of them; the text has the "
        "target's distribution with both.",
        rich_help_panel=SAMPLING,
    ),
]

TemplateOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        show_default=False,
        help="Ask through the target's chat template, or send the text as it is. Default: the profile's; unless it "
        "says, the template where the target has one.",
    ),
]

SeedOption = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Seed of all random draws. Default: 0.", rich_help_panel=SAMPLING)
]

ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        metavar="N",
        help="How many threads passes on the CPU run with. Default: what is faster on this machine as it is now.",
        rich_help_panel=RUNNING,
    ),
]

EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="|".join(get_args(Engine)),
        help="How forward passes run. Default: the profile's; auto takes the fastest that is installed and able.",
        rich_help_panel=RUNNING,
    ),
]

CheckOption = Annotated[
    bool,
    typer.Option(
        "--check",
        help="After the first rejected token, compare the target with a fresh read of the text; stop if they differ.",
        rich_help_panel=RUNNING,
    ),
]

ForceOption = Annotated[bool, typer.Option("--force", help="Replace output files that exist.", rich_help_panel=RUNNING)]

ForeignHeadOption = Annotated[
    bool,
    typer.Option(
        "--foreign-head",
        help="Use the draft's head even if it was trained on another draft, with a warning.",
        rich_help_panel=RUNNING,
    ),
]

TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Let a profile found in ./profiles run code that comes with its models.",
        rich_help_panel=RUNNING,
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

ProgressOption = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Show progress on standard error: bars on a terminal, elsewhere a line every few seconds, by default once "
        "10 seconds have passed.",
        show_default=False,
        rich_help_panel=RUNNING,
    ),
]

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors on standard error.")]


def chosen_prompts(
    suite: str | None,
    data: Path | None,
    input_: str | None,
    limit: int | None,
    category: list[str] | None,
    samples_per_category: int | None,
    seed: int,
) -> "Suite":
    """The prompts that the options of a command choose.

    Raises:
        UsageError: options contradict each other, or the prompts cannot be read.
    """
    if input_ is not None and (suite is not None or data is not None):
        raise UsageError("--input replaces the suite", "leave out --input, or --suite and --data")
    from specctl.prompts.suites import EMBEDDED, load_records, load_suite

    chosen: dict[str, Any] = {
        "limit": limit,
        "categories": category or [],
        "samples_per_category": samples_per_category,
        "seed": seed,
    }
    if input_ is not None:
        return load_records(sys.stdin.buffer if input_ == "-" else Path(input_), **chosen)
    return load_suite(suite or EMBEDDED, data=data, **chosen)


def sampling_flags(**values: Any) -> dict[str, Any]:
    """Values of the ``[sampling]`` table that flags override, by dotted key; None is a flag that was not given."""
    return {f"sampling.{name}": value for name, value in values.items()}


def warn(text: str) -> None:
    """Print a warning on standard error."""
    tell(text, "warning")
