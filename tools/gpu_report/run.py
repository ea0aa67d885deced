"""Runs the parts of the report one after the other within a time limit and writes what they found.

    python -m tools.gpu_report.run FOLDER [--minutes 10] [--parts machine eager] [--rehearse]

A part that crashes or hangs ends alone. FOLDER gets ``report.md`` and ``report.jsonl``, which are written again after
every part. Exits with 1 if something did not hold or a part did not end well.
"""

import argparse
import sys
from pathlib import Path
from time import perf_counter

from tools.gpu_report.parts import PARTS
from tools.gpu_report.process import Outcome, run_part
from tools.gpu_report.record import facts_in
from tools.gpu_report.report import Report

LEAST = 10.0
"""Seconds that must be left for another part to begin."""
PATIENCE = 5
"""By how much longer a part may take in a rehearsal: the CPU simulates the device."""


def main(arguments: list[str] | None = None) -> int:
    names = [part.name for part in PARTS]
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_report.run", description=summary)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=10, help="for all parts together (default: 10)")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument(
        "--rehearse", action="store_true", help="without a device: tiny models on the CPU and on pretended devices"
    )
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    began = perf_counter()
    report = Report(rehearsal=given.rehearse, minutes=given.minutes)
    for part in PARTS:
        if part.name not in given.parts:
            continue
        left = given.minutes * 60 - (perf_counter() - began)
        limit = part.limit * (PATIENCE if given.rehearse else 1)
        if left < min(LEAST, limit):
            outcome = Outcome("skipped", 0.0, [], "no time was left")
        elif not given.rehearse and facts_in(report.lines).get("devices") == 0:
            outcome = Outcome("skipped", 0.0, [], "there is no CUDA device; --rehearse does without")
        else:
            print(f"{perf_counter() - began:5.0f} s  {part.title}", file=sys.stderr, flush=True)
            outcome = run_part(part, min(limit, left), facts_in(report.lines), rehearse=given.rehearse)
        report.add(part, outcome)
        report.write(given.folder)
    report.seconds = perf_counter() - began
    report.write(given.folder)
    print(f"wrote {given.folder / 'report.md'} and {given.folder / 'report.jsonl'}: {report.verdict}")
    return 0 if report.well else 1


if __name__ == "__main__":
    sys.exit(main())
