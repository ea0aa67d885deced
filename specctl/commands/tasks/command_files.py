"""Files that several commands read and write: profiles with what they name, and reports."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.outputs import Outputs

if TYPE_CHECKING:
    from specctl.profile import ResolvedProfile


def spare_profile(outputs: Outputs, resolved: "ResolvedProfile", *, heads: bool = True) -> None:
    """Keep a profile's files and those of its models and heads, where heads are read, from being an output."""
    for file in resolved.files:
        outputs.spare("profile", file)
    profile = resolved.profile
    for table in (profile.target, *(profile.draft.levels if profile.draft is not None else ())):
        outputs.spare("model", os.path.expanduser(table.checkpoint))
        if table.adapter is not None:
            outputs.spare("adapter", os.path.expanduser(table.adapter))
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
