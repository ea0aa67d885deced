"""Shows the results of a benchmark, or two of them compared. Torch is never needed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.commands.option_groups import ShowOptions
from specctl.terminal.output import write_out, write_sentence

if TYPE_CHECKING:
    from specctl.observing.results import RunSet


def show_comparison(a: Path, b: Path, as_document: bool) -> None:
    """Print two results files compared, as tables or as one JSON document."""
    from rich.console import Console

    from specctl.benchmark.comparison import compare_files, comparison_json, comparison_tables
    from specctl.files import write_line
    from specctl.reporting.console import print_tables

    comparison = compare_files(a, b)
    if as_document:
        write_line(sys.stdout, comparison_json(comparison))
        return
    console = Console()
    print_tables(console, comparison_tables(comparison))
    if not console.is_terminal:
        write_out("")
    for compared in comparison.candidates:
        write_sentence(compared.verdict)


def show_results(
    results: "RunSet", show: ShowOptions, answers: Path | None, sync_ms: float, *, details: bool = False
) -> None:
    """Print the tables and the verdict, or one JSON document; write the report and the answer files asked for.

    ``details`` are the tables that the report has too; without them one table is shown.
    """
    from specctl.benchmark import report as tables
    from specctl.benchmark.digest import digest, verdict

    whole = digest(results, sync_ms)
    shown = tables.tables(whole) if details else tables.brief_tables(whole)
    show.outcome(tables.as_json(whole), shown, verdict(whole))
    written: list[Path] = []
    if show.report is not None:
        from specctl.benchmark.report import write_report

        written += write_report(whole, show.report)
    if answers is not None:
        from specctl.benchmark.spec_bench import write_answers

        written += write_answers(results, answers)
    show.written(written)
