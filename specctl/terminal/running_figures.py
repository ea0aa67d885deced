"""The running figures of a generation, as text."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from rich.text import Text

from specctl.metrics import Metrics, shown_rates
from specctl.records import Round


class Figure(NamedTuple):
    """A name and its value, both ready to be shown."""

    label: str
    value: str

    @property
    def text(self) -> Text:
        return Text.assemble((self.label, "dim"), " ", (self.value, "bold"))


def running_figures(metrics: Metrics, max_new_tokens: int, rounds: Sequence[Round]) -> list[Figure]:
    """The figures to show, the most important first; no threshold for a policy without one.

    In a hierarchy every draft, named by its key in the profile, has figures for its forward passes per generated token,
    its redundancy and its threshold.
    """
    figures = [
        Figure("tokens", f"{metrics.generated_tokens} of {max_new_tokens}"),
        Figure("tokens/s", f"{metrics.tokens_per_second:.1f}"),
        *(Figure(label, value) for label, value in shown_rates(metrics)),
    ]
    thresholds = _thresholds(rounds)
    if len(metrics.levels) < 2:
        return [*figures, *(Figure("threshold", f"{value:.3f}") for value in thresholds[:1] if value is not None)]
    for key, level in zip(_keys(), metrics.levels, strict=False):
        passes = level.forwards / metrics.generated_tokens if metrics.generated_tokens else 0.0
        figures.append(Figure(f"{key} passes/token", f"{passes:.3f}"))
        figures.append(Figure(f"{key} redundancy", f"{level.redundancy:.3f}"))
    figures += [
        Figure(f"{key} threshold", f"{value:.3f}")
        for key, value in zip(_keys(), thresholds, strict=False)
        if value is not None
    ]
    return figures


def _thresholds(rounds: Sequence[Round]) -> list[float | None]:
    """Thresholds of the draft and of each level below it, from the last round that has every level."""
    round_ = next((candidate for candidate in reversed(rounds) if candidate.inner), rounds[-1] if rounds else None)
    found: list[float | None] = []
    while round_ is not None:
        found.append(round_.threshold)
        round_ = round_.inner[-1] if round_.inner else None
    return found


def _keys() -> Iterator[str]:
    """The drafts' keys in a profile, from the target's own draft down."""
    return (".".join(["draft"] * depth) for depth in count(1))


def column(figures: Iterable[Figure], width: int) -> list[Text]:
    """One figure per line, label left and value right, each line ``width`` cells."""
    return [
        Text.assemble((figure.label, "dim"), (figure.value.rjust(width - len(figure.label)), "bold"))
        for figure in figures
    ]


def flow(figures: Iterable[Figure], width: int) -> list[Text]:
    """Figures side by side on as few lines of ``width`` cells as possible; no figure is split across lines."""
    lines: list[Text] = []
    for figure in figures:
        entry = figure.text
        entry.truncate(width, overflow="ellipsis")
        if lines and lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry)
    return lines
