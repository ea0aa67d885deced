"""The common style of all figures: page, colours, labels that do not overlap."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import fill
from typing import TYPE_CHECKING, Any

from specctl.errors import UsageError, pip_install
from specctl.printable import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0
INK, FAINT, GRID = "#222222", "#666666", "#dddddd"
BASELINE_COLOUR = "#777777"
# Okabe and Ito's colours, then Tol's: distinct with any common kind of colour blindness.
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#332288",
    "#882255",
    "#999933",
    "#000000",
)
_Box = tuple[float, float, float, float]
_LINE = 10.0  # Height of a label in points
MARKERS = "osD^vP*Xhp"
_STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "svg.fonttype": "path",
    "svg.hashsalt": "specctl",
    "text.parse_math": False,  # a $ in a name is shown as it is
}


def require_matplotlib() -> None:
    """Raise UsageError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise UsageError("figures need matplotlib", pip_install("matplotlib"))


@contextmanager
def style() -> Iterator[None]:
    """A context in which figures have our style, regardless of the user's matplotlib settings.

    Characters that the font lacks are drawn as boxes without a warning, since the tables have them too.

    Raises:
        UsageError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib

    settings: Any = {name: value for name, value in matplotlib.rcParamsDefault.items() if name != "backend"}
    settings.update(_STYLE)
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from")
        yield


class MissingDataError(Exception):
    """The results lack what the figure shows; the message names it."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A finished figure; ``name`` is the name of its file without a suffix."""

    name: str
    title: str
    caption: str
    figure: "Figure"


def tint(colour: str, lightness: float) -> str:
    """The colour mixed with white."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * lightness):02x}" for channel in channels)


def page(name: str, title: str, caption: str, height: float) -> Picture:
    """An empty picture with its title above and a caption below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height + 0.7), layout="constrained", facecolor="white")
    figure.suptitle(one_line(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(fill(one_line(caption), 125), x=0.01, ha="left", fontsize=8.5, color=FAINT)
    return Picture(name, title, caption, figure)


def panels(picture: Picture, count: int, columns: int, across: str, up: str = "") -> "list[Axes]":
    """``count`` axes in rows with common scales; the outer ones are labelled."""
    columns = min(columns, count)
    rows = -(-count // columns)
    grid: list[Axes] = picture.figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel().tolist()
    for left_over in grid[count:]:
        left_over.remove()
    for lowest in grid[max(0, count - columns) : count]:
        lowest.tick_params(labelbottom=True)
        lowest.set_xlabel(across)
    for leftmost in grid[:count:columns]:
        leftmost.set_ylabel(up)
    return grid[:count]


def shorten(text: str, limit: int = 30) -> str:
    """The text on one line, cut to the limit, without control characters, which SVG forbids."""
    line = " ".join(one_line(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def label_points(axes: "Axes", points: Sequence[tuple[float, float, str]]) -> None:
    """Write each text (x, y, text) next to its point, at a place without another point or text."""
    from matplotlib.patheffects import withStroke

    axes.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]
    inches = axes.get_figure(root=True).dpi_scale_trans  # type: ignore[union-attr]
    spots = [72 * inches.inverted().transform(axes.transData.transform((x, y))) for x, y, _ in points]
    left, bottom, right, top = 72 * axes.get_window_extent().transformed(inches.inverted()).get_points().ravel()
    taken: list[_Box] = [(across - 7, up - 7, across + 7, up + 7) for across, up in spots]
    for (x, y, text), (across, up) in zip(points, spots, strict=True):
        text = one_line(text)
        width = 4.6 * len(text)
        best, fewest = (0.0, 0.0), 10**6
        for shift in _shifts(width):
            box = across + shift[0], up + shift[1], across + shift[0] + width, up + shift[1] + _LINE
            outside = box[0] < left or box[2] > right or box[1] < bottom or box[3] > top
            overlaps = sum(_overlap(box, other) for other in taken) + 100 * outside
            if overlaps < fewest:
                best, fewest = shift, overlaps
        taken.append((across + best[0], up + best[1], across + best[0] + width, up + best[1] + _LINE))
        axes.annotate(
            text,
            (x, y),
            xytext=best,
            textcoords="offset points",
            fontsize=8,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )


def label_ends(axes: "Axes", ends: Iterable[tuple[float, float, str, str]]) -> None:
    """Write texts (x, y, text, colour) in a column right of the axes, each joined to the end of its curve."""
    low, high = axes.get_ylim()
    gap = 0.045 * (high - low)
    height = low - gap
    for x, y, text, colour in sorted(ends, key=lambda end: end[1]):
        height = max(y, height + gap)
        axes.annotate(
            one_line(text),
            (x, y),
            xytext=(1.04, height),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.9, "relpos": (0, 0.5), "shrinkB": 4},
        )


def _shifts(width: float) -> Iterator[tuple[float, float]]:
    """Candidate offsets of a text from its point, in points, best first."""
    for step in (0, 1, -1, 2, -2, 3, -3, 4, -4):
        for start in (10.0, -width - 10, -width / 2):
            if step or start != -width / 2:
                yield start, -4.0 + step * (_LINE + 1)


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
