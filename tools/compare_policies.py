"""Every policy compared with `cost-optimal` and the bounds, by replay, under made-up costs.

``python -m tools.compare_policies TRACE...`` prints the tables for traces written by ``specctl calibrate --trace``.
Nothing is timed and no model runs, so the same files give the same tables on any machine.
"""

import argparse
from pathlib import Path

from specctl.replay.trace_files import read_traces
from specctl.reporting.table import as_markdown
from tools.comparison.standings import compare
from tools.comparison.tables import comparison_tables


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="written by calibrate --trace")
    parser.add_argument("--grid", choices=("paper", "dense"), default="dense", help="settings of the other policies")
    options = parser.parse_args()
    for path in options.traces:
        print(f"# {path}\n")
        for table in comparison_tables(compare(read_traces(path), options.grid)):
            print(as_markdown(table), end="\n\n")


if __name__ == "__main__":
    main()
