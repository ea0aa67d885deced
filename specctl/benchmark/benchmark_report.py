"""The report of a benchmark."""

import shlex
from pathlib import Path
from typing import Any

from specctl.benchmark.digest import Digest
from specctl.benchmark.figures.benchmark_figures import draw_all
from specctl.benchmark.tables.benchmark_tables import tables
from specctl.benchmark.verdict import verdict
from specctl.errors import UsageError
from specctl.reporting.document import write_document
from specctl.reporting.style import Picture


def write_report(digest: Digest, folder: Path) -> list[Path]:
    """Write tables, figures and their provenance into the folder; return the paths of the files.

    A figure that the results have no data for is replaced by a line with the reason.

    Raises:
        UsageError: there is no run to report, or matplotlib is missing.
        OutputError: a file cannot be written.
    """
    if not digest.results.runs:
        raise UsageError("there is no finished run to report")
    found = list(draw_all(digest))
    return write_document(
        "Speculative decoding benchmark",
        tables(digest),
        [picture for _, picture in found if isinstance(picture, Picture)],
        _provenance(digest),
        folder,
        command="bench",
        verdict=verdict(digest),
        remarks=[f"{title}: not drawn, {reason}." for title, reason in found if not isinstance(reason, Picture)],
        profile=digest.results.header.profile,
    )


def _provenance(digest: Digest) -> dict[str, str]:
    header = digest.results.header
    expected = f" of {digest.expected_runs}" if digest.expected_runs else ""
    return {
        "Command": shlex.join(header.argv),
        "Started": header.created,
        "Prompts": _pairs(header.suite),
        "Runs": f"{digest.finished}{expected}, repeats {header.repeats}, "
        f"length limits {', '.join(map(str, header.lengths)) or 'of the profile'}"
        f"{f', {header.batch} prompts at once' if header.batch > 1 else ''}",
        "Sampling": _pairs(header.sampling),
        "Devices": _pairs(header.devices),
        "Engines": _pairs(header.engines),
        "Versions": _pairs(header.versions),
        "Candidates": "; ".join(
            f"{candidate.label} ({_pairs(candidate.values)})" if candidate.values else candidate.label
            for candidate in header.candidates
        ),
    }


def _pairs(values: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
