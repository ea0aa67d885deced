"""Options that several commands share."""

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from specctl.policies import POLICIES
from specctl.profile.discovery import available


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

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on standard error but errors.")]
