"""The tables of a comparison of policies."""

from specctl.reporting.table import Table
from tools.comparison.standings import EARLY, Comparison


def comparison_tables(found: Comparison) -> list[Table]:
    """The tables of speeds, of costs that change halfway, and of the two guards."""
    columns = (
        "costs",
        "prompts",
        "best setting in hindsight",
        "over none",
        "of the best",
        "of the papers' best",
        "of the bandit",
        "of the one-step bound",
        "of the signal bound",
        "of the oracle",
        "best: of the signal bound",
        "best: of the oracle",
    )
    rows = tuple(
        (
            line.regime,
            line.part,
            line.best,
            f"{line.own / line.none:.2f}",
            *(_share(line.own, whole) for whole in (line.fixed, line.paper, line.bandit, line.one_step)),
            *(_share(speed, whole) for speed in (line.own, line.fixed) for whole in (line.bound, line.oracle)),
        )
        for line in found.lines
    )
    return [
        Table(
            "cost-optimal, from nothing, compared with every policy",
            columns,
            rows,
            labels=3,
            note="Shares of tokens/s, by replay. The best setting, the bounds and the oracle know these prompts.",
        ),
        Table(
            "Costs that change halfway through the prompts",
            ("costs", "best setting in hindsight", "of the best"),
            tuple((name, label, f"{share:.1%}") for name, label, share in found.changing),
            labels=2,
        ),
        Table(
            "Guards",
            ("costs", f"first {EARLY} rounds from nothing over those after learning", "over none, draft never right"),
            tuple((name, f"{found.early[name]:.1%}", f"{found.useless[name]:.1%}") for name in found.early),
        ),
    ]


def _share(speed: float, whole: float) -> str:
    return f"{speed / whole:.1%}"
