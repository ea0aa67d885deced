"""Running figures of a generation, as people read them."""

from collections.abc import Iterable
from typing import NamedTuple

from rich.text import Text

from specctl.metrics import Metrics


class Figure(NamedTuple):
    """A name and its value, both ready to be shown."""

    label: str
    value: str

    @property
    def text(self) -> Text:
        return Text.assemble((self.label, "dim"), " ", (self.value, "bold"))


def running_figures(metrics: Metrics, max_new_tokens: int, threshold: float | None) -> list[Figure]:
    """The figures to watch, most wanted first; a policy without a threshold has no such line."""
    figures = [
        Figure("tokens", f"{metrics.generated_tokens} of {max_new_tokens}"),
        Figure("tokens/s", f"{metrics.tokens_per_second:.1f}"),
        Figure("acceptance rate", f"{metrics.acceptance_rate:.1%}"),
        Figure("mean acceptance length", f"{metrics.mean_acceptance_length:.2f}"),
        Figure("verification rate", f"{metrics.verification_rate:.3f}"),
        Figure("discard rate", f"{metrics.discard_rate:.3f}"),
    ]
    if threshold is not None:
        figures.append(Figure("threshold", f"{threshold:.3f}"))
    return figures


def column(figures: Iterable[Figure], width: int) -> list[Text]:
    """One figure a line, labels left and values right, each line ``width`` cells."""
    return [
        Text.assemble((figure.label, "dim"), (figure.value.rjust(width - len(figure.label)), "bold"))
        for figure in figures
    ]


def flow(figures: Iterable[Figure], width: int) -> list[Text]:
    """Figures side by side on as few lines as ``width`` cells allow, none broken across two."""
    lines: list[Text] = []
    for figure in figures:
        entry = figure.text
        entry.truncate(width, overflow="ellipsis")
        if lines and lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry)
    return lines
