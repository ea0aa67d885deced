"""A benchmark's report."""

import shlex
from pathlib import Path
from typing import Any

from specctl.benchmark.digest import Digest, digest
from specctl.benchmark.figures import draw_all
from specctl.benchmark.tables import tables
from specctl.errors import UsageError
from specctl.observing.results import RunSet
from specctl.reporting.document import write_document
from specctl.reporting.style import Picture


def write_report(results: RunSet, folder: Path) -> list[Path]:
    """Write tables, figures and where they come from into the folder; return what was written.

    Figures that the results cannot fill are left out, with a line that says why.

    Raises:
        UsageError: there is no run to report, matplotlib is missing, or the folder cannot be written.
    """
    if not results.runs:
        raise UsageError("there is no finished run to report")
    whole = digest(results)
    found = list(draw_all(whole))
    return write_document(
        "Speculative decoding benchmark",
        tables(whole),
        [picture for _, picture in found if isinstance(picture, Picture)],
        _provenance(whole),
        folder,
        remarks=[f"{title}: not drawn, {reason}." for title, reason in found if not isinstance(reason, Picture)],
        profile=results.header.profile,
    )


def _provenance(whole: Digest) -> dict[str, str]:
    header = whole.results.header
    expected = f" of {whole.expected_runs}" if whole.expected_runs else ""
    return {
        "Command": shlex.join(header.argv),
        "Started": header.created,
        "Prompts": _pairs(header.suite),
        "Runs": f"{len(whole.results.runs)}{expected}, repeats {header.repeats}, "
        f"length limits {', '.join(map(str, header.lengths)) or 'of the profile'}",
        "Sampling": _pairs(header.sampling),
        "Devices": _pairs(header.devices),
        "Versions": _pairs(header.versions),
        "Entrants": "; ".join(
            f"{entrant.label} ({_pairs(entrant.values)})" if entrant.values else entrant.label
            for entrant in header.entrants
        ),
    }


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
