"""Files that several commands read and write: profiles with what they name, and reports."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specctl.commands.options import warn
from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.profile import ResolvedProfile


def resolve_profile(
    name: str | None,
    overrides: Sequence[str] | None,
    flags: Mapping[str, Any] = MappingProxyType({}),
    *,
    target: str | None,
    draft: str | None,
    trust_remote_code: bool,
) -> "ResolvedProfile":
    """`specctl.profile.resolve` with the models of --target and --draft.

    Warns where a profile of ./profiles hides another, and of what a profile says about models that the flags replace.
    """
    from specctl.profile import resolve

    flags = {"target.model": target, "draft.model": draft, **flags}
    resolved = resolve(name, overrides=overrides or (), flags=flags, trust_remote_code=trust_remote_code)
    for note in (*resolved.notes, *resolved.outdated):
        warn(note)
    return resolved


def spare_profile(outputs: Outputs, resolved: "ResolvedProfile", *, heads: bool = True) -> None:
    """Keep a profile's files and those of its models and heads, where heads are read, from being an output."""
    for file in resolved.files:
        outputs.spare("profile", file)
    profile = resolved.profile
    for table in (profile.target, *(profile.draft.levels if profile.draft is not None else ())):
        outputs.spare("model", os.path.expanduser(table.checkpoint))
        if heads and (head := getattr(table, "head", None)) is not None:
            outputs.spare("head", os.path.expanduser(head))


def open_report(outputs: Outputs, folder: Path | None) -> None:
    """Make, check and lock the folder of a report; raises UsageError also where figures cannot be drawn."""
    if folder is None:
        return
    from specctl.reporting.document import REPORT_FILES
    from specctl.reporting.style import require_matplotlib

    require_matplotlib()
    outputs.folder("report", folder, REPORT_FILES)
