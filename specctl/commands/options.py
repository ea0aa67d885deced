"""Options that several commands share."""

import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.errors import UsageError
from specctl.policies import POLICIES
from specctl.profile.discovery import available

if TYPE_CHECKING:
    from specctl.prompts.suites import Suite


def _complete_profile(incomplete: str) -> list[tuple[str, str]]:
    return [(name, _description(path)) for name, path in available().items() if name.startswith(incomplete)]


def _description(path: Path) -> str:
    try:
        description = tomllib.loads(path.read_text(encoding="utf-8")).get("description", "")
    except (OSError, ValueError):
        return ""  # completing is no moment to complain
    return " ".join(str(description).split())


def _complete_policy(incomplete: str) -> list[tuple[str, str]]:
    return [
        (name, (cls.__doc__ or "").partition("\n")[0]) for name, cls in POLICIES.items() if name.startswith(incomplete)
    ]


ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "-p",
        metavar="NAME",
        envvar="SPECCTL_PROFILE",
        autocompletion=_complete_profile,
        help="Profile by name or path: the model pair, its policy and its settings. Without it, the embedded family.",
    ),
]

ProfileOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        "-p",
        metavar="NAME",
        autocompletion=_complete_profile,
        help="Profile by name or path; of several with the same target, each brings its drafts and policies.",
    ),
]

PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME:KEY=VALUE,...",
        autocompletion=_complete_policy,
        help="Stopping policy instead of the profile's (in a hierarchy its top draft's), with settings if wanted: "
        "svip:threshold=0.4",
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

ProfileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", show_default=False, autocompletion=_complete_profile, help="Profile by name or path."
    ),
]

ProfileArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME...", show_default=False, autocompletion=_complete_profile, help="Profiles by name or path."
    ),
]

SuiteOption = Annotated[
    str | None,
    typer.Option(
        "--suite", help="Named prompts, such as gsm8k; bench, analyze and calibrate have embedded as default."
    ),
]

SuiteDataOption = Annotated[
    Path | None, typer.Option("--data", metavar="FILE", help="A local copy of the suite, in the data set's own format.")
]

InputOption = Annotated[
    str | None, typer.Option("--input", "-i", metavar="FILE|-", help="Records to run instead of a suite.")
]

LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many prompts.")]

CategoryOption = Annotated[
    list[str] | None, typer.Option("--category", help="Only prompts of this category; repeatable.")
]

SamplesOption = Annotated[
    int | None,
    typer.Option("--samples-per-category", min=1, help="A seeded sample of so many prompts of each category."),
]

MaxNewTokensOption = Annotated[
    int | None, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate for a prompt.")
]

ForceOption = Annotated[
    bool, typer.Option("--force", help="Use the draft's head even if it was trained on another draft, with a warning.")
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on standard error but errors.")]


def chosen_prompts(
    suite: str | None,
    data: Path | None,
    input_: str | None,
    limit: int | None,
    category: list[str] | None,
    samples_per_category: int | None,
    seed: int,
) -> "Suite":
    """The prompts that a command's options choose.

    Raises:
        UsageError: options contradict each other, or the prompts cannot be had.
    """
    if input_ is not None and (suite is not None or data is not None):
        raise UsageError("--input takes the place of a suite", "leave out --suite and --data, or --input")
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


def warn(text: str) -> None:
    """Say on standard error what may surprise."""
    print(f"warning: {text}", file=sys.stderr)
