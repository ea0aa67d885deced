"""Shows what was found for several texts at once: as a table, and as plain values."""

from collections.abc import Sequence
from typing import Any

from specctl.calibration.batch_sizes import BatchSize
from specctl.calibration.search import Calibration
from specctl.calibration.speedup_cells import plain_interval, speedup_cells
from specctl.policies import NONE
from specctl.reporting.table import UNKNOWN, UP, Table


def by_size(found: Calibration, sizes: Sequence[BatchSize]) -> Table:
    """A row for one text and for each number of texts."""
    alone = next(one for one in found.ranking if one.score.setting == NONE)
    entries = [(1, found.winner, alone, found.ranked("constant"))]
    for size in sizes:
        constants = (one for one in size.ranking if one.score.setting.policy == "constant")
        none = next(one for one in size.ranking if one.score.setting == NONE)
        entries.append((size.rows, size.winner, none, next(constants, None)))
    rows = tuple(
        (
            str(texts),
            winner.score.setting.label,
            f"{winner.score.tokens_per_second:.1f}",
            *speedup_cells(winner.speedup),
            f"{none.score.tokens_per_second:.1f}",
            UNKNOWN if best is None else best.score.setting.label,
            UNKNOWN if best is None else f"{best.score.tokens_per_second:.1f}",
        )
        for texts, winner, none, best in entries
    )
    replayed = ", ".join(f"{size.candidates} at {size.rows}" for size in sizes)
    return Table(
        "Best settings by texts at once",
        (
            "texts",
            "policy",
            f"tokens/s{UP}",
            f"speedup{UP}",
            "95% interval",
            f"none, tokens/s{UP}",
            "best constant",
            f"its tokens/s{UP}",
        ),
        rows,
        labels=2,
        note="Of all texts together, predicted by replaying them so many at once with costs measured so. "
        f"Replayed together: {replayed}.",
    )


def size_document(size: BatchSize) -> dict[str, Any]:
    """The numbers of one row with those of every policy, as plain values."""
    return {
        "texts": size.rows,
        "chosen": size.winner.score.setting.table,
        "candidates": size.candidates,
        "share_of_resamples": round(size.choice.share, 4),
        "ranking": [
            {
                "policy": one.score.setting.table,
                "tokens_per_second": round(one.score.tokens_per_second, 2),
                "speedup": plain_interval(one.speedup),
            }
            for one in size.ranking
        ],
    }
