"""Options that several commands share."""

import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.errors import UsageError, reason
from specctl.policies import POLICIES
from specctl.printable import one_line
from specctl.profile.profile_file import available
from specctl.terminal.output import tell

if TYPE_CHECKING:
    from specctl.policies import Setting
    from specctl.profile import ResolvedProfile

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
    """What --policy sets in a profile, by dotted key."""
    from specctl.profile import parse_policy

    return {"draft.policy": policy and parse_policy(policy)}


def warn(text: str) -> None:
    """Print a warning on standard error."""
    tell(text, "warning")


def warn_never_stopping(settings: "Iterable[Setting]") -> None:
    """Warn of each policy whose threshold no token reaches."""
    for label, most in {
        one.word: one.longest_draft for each in settings for one in each.levels if one.never_stops
    }.items():
        warn(f"{label} never stops a draft before its limit: it is a slower constant:draft_length={most}")


def warn_unused(resolved: "Sequence[ResolvedProfile]") -> None:
    """Tell what further profiles say that the first one decides for all: a run has one engine and one way to sample."""
    from specctl.reporting.placing import listed

    first, *others = resolved
    for one in others:
        if keys := one.unused(first.profile):
            are = "is" if len(keys) == 1 else "are"
            whose = f"for all of a run it is as in the first profile, {first.name}"
            warn(f"{one.name}: {listed(keys)} {are} not used: {whose}")


def text_of(path: Path, what: str) -> str:
    """The text of a small file that an option names; raises UsageError, which says what it was to be."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"cannot read {what} {path}: {why}") from error


def schema_of(path: Path) -> Any:
    """The JSON schema in a file; raises UsageError where it is none."""
    try:
        schema = json.loads(text_of(path, "the JSON schema"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {reason(error)}") from error
    if not isinstance(schema, dict | bool):
        raise UsageError(f"{path} is not a JSON schema: an object is expected, or true for any JSON")
    return schema
