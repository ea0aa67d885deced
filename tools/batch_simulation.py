"""Replay the texts of a trace several at once: ``python -m tools.batch_simulation TRACE``.

For each number of texts and each table of prices (`tools.scale.roofline`) the tokens/s of the target alone, and how
much faster policies are: each constant length, of which the best is shown, the others with their default values, and
``cost-optimal`` deciding for each text alone and for all together. A trace is recorded by
``specctl calibrate --trace TRACE``; texts are repeated until each place of the batch has had several.
"""

import argparse
from pathlib import Path

from specctl.policies import NONE, Setting
from specctl.replay.costs import CostTable
from specctl.replay.play import replay_together
from specctl.replay.trace_files import TraceSet, read_traces
from tools.scale.roofline import PAIRS, price_table

LENGTHS = (1, 2, 3, 4, 5, 6, 8)
EACH = 6
"""Texts of each place of the batch, at least."""


def standing(traces: TraceSet, rows: int, costs: CostTable) -> tuple[float, dict[str, float]]:
    """Tokens/s of the target alone, and by name how many times as fast the policies are."""
    texts, eos = traces.traces * (EACH * rows // len(traces.traces) + 1), frozenset(traces.header.eos)

    def rate(setting: Setting, *, jointly: bool = True) -> float:
        return replay_together(setting, texts, rows, costs, eos, jointly=jointly).tokens_per_second

    none = rate(NONE)
    constants = {k: rate(Setting.of({"name": "constant", "draft_length": k})) / none for k in LENGTHS}
    best = max(constants, key=lambda length: constants[length])
    found = {f"best K = {best}": constants[best]}
    found |= {name: rate(Setting(name)) / none for name in ("svip", "max-confidence")}
    found["alone"] = rate(Setting("cost-optimal"), jointly=False) / none
    found["joint"] = rate(Setting("cost-optimal")) / none
    return none, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--prices", choices=PAIRS, nargs="+", default=[*PAIRS])
    given = parser.parse_args()
    traces = read_traces(given.trace)
    for name in given.prices:
        costs = price_table(*PAIRS[name], tuple(given.rows))
        for rows in given.rows:
            none, found = standing(traces, rows, costs)
            best, joint = next(iter(found.values())), found["joint"]
            figures = "  ".join(f"{key} {value:.2f}" for key, value in found.items())
            print(f"{name:5} {rows:3} rows  none {none:6.0f} tokens/s  {figures}  joint / best K {joint / best:.3f}")


if __name__ == "__main__":
    main()
