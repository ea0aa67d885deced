"""The comparison that the papers draw, as one table."""

from specctl.benchmark.digest import Digest
from specctl.benchmark.papers import sources
from specctl.benchmark.runnable_papers import left_out_lines
from specctl.benchmark.tables.speed_tables import count_differing
from specctl.reporting.table import DOWN, UP, Table, number, percent, show_interval


def paper_table(digest: Digest) -> Table:
    """What the papers report of each policy, with the paper that its settings are from; others come after `none`."""
    header = digest.results.header
    known = sources(header.candidates)
    order = [*(one.label for one in header.candidates if one.label not in known), *known]
    rows = tuple(
        (
            summary.candidate,
            known.get(summary.candidate, ""),
            show_interval(summary.speedup and summary.speedup.of_totals),
            number(summary.mean_acceptance_length, 2),
            percent(summary.acceptance_rate),
            number(summary.draft_rate, 3),
            number(summary.verification_rate, 3),
            count_differing(digest, summary.candidate),
        )
        for summary in sorted(digest.overall, key=lambda one: order.index(one.candidate))
    )
    columns = (
        "candidate",
        "settings of",
        f"speedup (totals){UP}",
        f"mean acceptance length{UP}",
        f"acceptance rate{UP}",
        f"draft rate{DOWN}",
        f"verification rate{DOWN}",
        f"differ{DOWN}",
    )
    note = " ".join(f"{line[0].upper()}{line[1:]}." for line in left_out_lines(header.papers or {}))
    return Table("The papers' policies", columns, rows, labels=2, note=note)
