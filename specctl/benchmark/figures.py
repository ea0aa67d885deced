"""The figures of a report, each readable by itself. Needs matplotlib, imported when a figure is drawn."""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING

import numpy as np

from specctl.benchmark.cost_model import CostModel
from specctl.benchmark.digest import Digest
from specctl.benchmark.hierarchy_figures import speed_by_window, where_it_pays
from specctl.benchmark.looks import Look, looks
from specctl.benchmark.summaries import Summary
from specctl.errors import UsageError
from specctl.observing.results import BASELINE, Entrant, RoundFacts, Run
from specctl.reporting.style import (
    BASELINE_COLOUR,
    FAINT,
    INK,
    MissingDataError,
    Picture,
    label_ends,
    label_points,
    page,
    panels,
    shorten,
    style,
    tint,
)
from specctl.reporting.table import show_interval
from specctl.statistics.pareto import pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROUNDS = 80
_ROW = 0.24
"""Height of one entrant in a panel, in inches."""


Drawing = Callable[[Digest, dict[str, Look]], Picture]


def draw_all(digest: Digest) -> Iterator[tuple[str, Picture | str]]:
    """Each figure's title with the figure, or with why it cannot be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("figures need matplotlib", "Install it with: pip install 'specctl[report]'") from error
    look = looks(digest.results.header.entrants)
    for title, draw in {**FIGURES, **(LEVEL_FIGURES if digest.levels else {})}.items():
        with style():
            try:
                yield title, draw(digest, look)
            except MissingDataError as reason:
                yield title, str(reason)


def speedup_by_category(digest: Digest, look: dict[str, Look]) -> Picture:
    parts = [
        (name, {summary.entrant: summary.speedup for summary in summaries if summary.speedup})
        for name, summaries in _parts(digest)
    ]
    names = [name for name in parts[0][1] if name != BASELINE]
    if not names:
        raise MissingDataError("no entrant shares a prompt with none")
    fastest, speed = max(((name, parts[0][1][name]) for name in names), key=lambda entry: entry[1].of_totals.value)
    picture = page(
        "speedup-by-category",
        "Speedup over target-only decoding",
        f"What to see: over {speed.prompts} prompts {fastest} is fastest at {show_interval(speed.of_totals)} times the "
        "speed of target-only decoding. Points are ratios of total tokens/s, lines 95% bootstrap intervals over "
        "prompts; right of the grey line is faster than without a draft.",
        _height(parts, names),
    )
    for axes, (name, speeds) in zip(
        panels(picture, len(parts), _columns(parts), "times target-only"), parts, strict=True
    ):
        prompts = max((speed.prompts for speed in speeds.values()), default=0)
        _entrant_panel(axes, f"{shorten(name, 24)}, n = {prompts}", names)
        axes.axvline(1, color=BASELINE_COLOUR, linewidth=1)
        for row, entrant in enumerate(names):
            if entrant in speeds:
                value, low, high = speeds[entrant].of_totals
                if low is not None and high is not None:
                    axes.plot([low, high], [row, row], color=look[entrant].colour, linewidth=2, solid_capstyle="butt")
                axes.plot(value, row, look[entrant].marker, color=look[entrant].colour, markersize=6)
                _beside(axes, row, f"{value:.2f}")
    return picture


def lengths_by_category(digest: Digest, look: dict[str, Look]) -> Picture:
    parts = [(name, [summary for summary in summaries if summary.draft_length]) for name, summaries in _parts(digest)]
    names = [summary.entrant for summary in parts[0][1]]
    if not names:
        raise MissingDataError("nobody drafted")
    keenest = max(parts[0][1], key=lambda summary: summary.acceptance_rate or 0)
    picture = page(
        "lengths-by-category",
        "Drafted and accepted tokens per round, and the acceptance rate",
        f"What to see: the dark part of a bar is what verification kept, the pale rest was drafted in vain; "
        f"{keenest.entrant} wastes least, {keenest.acceptance_rate:.0%} accepted overall. Means over rounds; the "
        "percentage at the right is accepted / drafted.",
        _height(parts, names),
    )
    for axes, (name, summaries) in zip(
        panels(picture, len(parts), _columns(parts), "tokens per round"), parts, strict=True
    ):
        prompts = max((summary.prompts for summary in summaries), default=0)
        _entrant_panel(axes, f"{shorten(name, 24)}, n = {prompts}", names)
        for summary in summaries:
            if summary.draft_length and summary.accepted_length:
                row, colour = names.index(summary.entrant), look[summary.entrant].colour
                axes.barh(row, summary.draft_length.mean, 0.7, color=tint(colour, 0.65))
                axes.barh(row, summary.accepted_length.mean, 0.7, color=colour)
                _beside(axes, row, f"{summary.acceptance_rate:.0%}")
    axes.set_xlim(left=0)
    return picture


def verification_against_discard(digest: Digest, look: dict[str, Look]) -> Picture:
    points = [
        (summary.entrant, summary.discard_rate, summary.verification_rate)
        for summary in digest.overall
        if summary.draft_length and summary.discard_rate is not None and summary.verification_rate is not None
    ]
    if not points:
        raise MissingDataError("no entrant's discard rate and verification rate are both known")
    entrants = {entrant.label: entrant for entrant in digest.results.header.entrants}
    front = pareto([(discard, verification) for _, discard, verification in points])
    best = ", ".join(points[index][0] for index in front)
    model = digest.model if digest.model and digest.model.target_ms > digest.model.draft_ms > 0 else digest.bare
    if digest.levels:
        model = None  # two rates do not tell the cost of three models
    lines = (
        ""
        if model is None
        else "Dotted lines join points of equal predicted speed on this machine, as times target-only. "
    )
    prompts = max(summary.prompts for summary in digest.overall)
    picture = page(
        "verification-discard",
        "Target passes against discarded drafts",
        f"What to see: lower left is better; ringed entrants are not beaten in both ({best}). {lines}"
        f"n = {prompts} prompts; target-only decoding is at (0, 1).",
        4.6,
    )
    (axes,) = panels(
        picture,
        1,
        1,
        "discard rate (rejected drafts per generated token)",
        "verification rate (target passes per generated token)",
    )
    for family in dict.fromkeys(entrants[label].family for label, *_ in points):
        curve = sorted(
            (point for point in points if entrants[point[0]].family == family), key=lambda point: (point[1], point[2])
        )
        if len(curve) > 1:
            axes.plot([x for _, x, _ in curve], [y for *_, y in curve], color=look[curve[0][0]].colour, linewidth=1.2)
    for index, (label, x, y) in enumerate(points):
        if index in front:
            axes.plot(x, y, "o", markersize=13, markerfacecolor="none", markeredgecolor=INK, markeredgewidth=0.9)
        axes.plot(x, y, look[label].marker, color=look[label].colour, markersize=6)
    _widen(axes, points)
    if model is not None:
        _equal_speeds(axes, model)
    names = _point_names([entrants[label] for label, *_ in points])
    label_points(axes, [(x, y, name) for name, (_, x, y) in zip(names, points, strict=True)])
    return picture


def accepted_histogram(digest: Digest, look: dict[str, Look]) -> Picture:
    from matplotlib.ticker import MaxNLocator

    shown = {summary.entrant: summary.accepted_length for summary in digest.overall if summary.accepted_length}
    if not shown:
        raise MissingDataError("no entrant had a draft accepted in rounds that can be seen")
    lengths = {
        name: [round_.accepted for run in digest.results.of(name) for round_ in _drafting(run)] for name in shown
    }
    longest = max(int(np.quantile(values, 0.99, method="higher")) for values in lengths.values())
    more = f"; the last bar holds {longest} and more" if longest < max(map(max, lengths.values())) else ""
    widest, spread = max(shown.items(), key=lambda item: item[1].sd)
    picture = page(
        "accepted-lengths",
        "How many drafts a round gets accepted",
        f"What to see: the wider the distribution, the more there is to gain from stopping at the right moment; widest "
        f"for {widest} (sd {spread.sd:.1f}). The dashed line is the mean; the target's own token is not counted{more}.",
        1.35 * -(-len(shown) // _columns(shown)) + 0.3,
    )
    grid = panels(picture, len(shown), _columns(shown), "accepted tokens", "% of rounds")
    for axes, (name, values) in zip(grid, lengths.items(), strict=True):
        shares = np.bincount(np.minimum(values, longest), minlength=longest + 1) / len(values)
        axes.bar(range(longest + 1), 100 * shares, 0.85, color=look[name].colour)
        axes.axvline(float(np.mean(values)), color=INK, linestyle="--", linewidth=1)
        axes.set_title(f"{shorten(name, 24)}, n = {len(values)} rounds")
        axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return picture


def draft_length_over_rounds(digest: Digest, look: dict[str, Look]) -> Picture:
    names = [summary.entrant for summary in digest.overall if summary.draft_length]
    candidates: dict[tuple[str, int], dict[str, Run]] = {}
    for run in digest.results.runs:
        if run.entrant in names and any(_drafting(run)):
            candidates.setdefault((run.prompt, run.length), {}).setdefault(run.entrant, run)
    if not candidates:
        raise MissingDataError("nobody drafted in rounds that can be seen")
    fullest = max(map(len, candidates.values()))
    ordered = sorted(
        (item for item in candidates.items() if len(item[1]) == fullest),
        key=lambda item: sum(len(_drafting(run)) for run in item[1].values()),
    )
    (prompt, _), runs = ordered[len(ordered) // 2]  # Neither the easiest nor the hardest.
    shown = [name for name in names if name in runs]
    rounds = {name: _drafting(runs[name]) for name in shown}
    most = min(MOST_ROUNDS, max(map(len, rounds.values())))
    cut = f" (the first {MOST_ROUNDS})" if max(map(len, rounds.values())) > MOST_ROUNDS else ""
    picture = page(
        "draft-length-over-rounds",
        f"Draft length round by round, prompt {shorten(prompt)}",
        f"What to see: a policy that reads the text has a ragged outline, long where drafting is easy; a constant "
        f"one is flat. One bar a round{cut}: dark accepted, pale discarded. Fewer rounds is fewer target passes.",
        0.85 * len(shown) + 0.3,
    )
    for axes, name in zip(panels(picture, len(shown), 1, "round"), shown, strict=True):
        drawn = rounds[name][:most]
        places = range(1, len(drawn) + 1)
        axes.bar(places, [round_.drafted for round_ in drawn], 0.9, color=tint(look[name].colour, 0.65))
        axes.bar(places, [round_.accepted for round_ in drawn], 0.9, color=look[name].colour)
        axes.set_title(f"{shorten(name, 40)}: {len(rounds[name])} rounds for {runs[name].tokens} tokens")
        axes.set_xlim(0.4, most + 0.6)
        axes.grid(axis="y")
    picture.figure.supylabel("tokens drafted", fontsize=9)
    return picture


def wall_time(digest: Digest, look: dict[str, Look]) -> Picture:
    del look  # Here colours mean parts of the time.
    parts = {"draft": "#E69F00", "verify": "#0072B2", "prefill": "#999999", "other": "#D55E00"}
    names = [summary.entrant for summary in digest.overall]
    if not any(summary.wall for summary in digest.overall):
        raise MissingDataError("no entrant's time is known in parts")
    idlest = max(digest.overall, key=lambda summary: summary.wall.get("other", 0.0))
    prompts = max(summary.prompts for summary in digest.overall)
    picture = page(
        "wall-time",
        "Where the time goes, per generated token",
        f"What to see: shorter is faster; a good policy saves more verify time than it spends on drafts. Other is the "
        f"loop itself, at most {idlest.wall.get('other', 0.0):.1%} ({idlest.entrant}). Percentages are shares of the "
        f"bar; n = {prompts} prompts.",
        _ROW * 1.3 * len(names) + 0.8,
    )
    (axes,) = panels(picture, 1, 1, "milliseconds per token")
    _entrant_panel(axes, "", names)
    longest = max(summary.ms_per_token for summary in digest.overall)
    for row, summary in enumerate(digest.overall):
        left = 0.0
        for part, share in summary.wall.items():
            width = share * summary.ms_per_token
            axes.barh(row, width, 0.75, left, color=parts[part], label=part, edgecolor="white", linewidth=0.5)
            if width > 0.045 * longest:
                ink = INK if part == "draft" else "white"
                axes.text(left + width / 2, row, f"{share:.0%}", ha="center", va="center", color=ink, fontsize=8)
            left += width
        if not summary.wall:
            axes.barh(row, summary.ms_per_token, 0.75, color="white", edgecolor=FAINT, hatch="///", label="not visible")
        _beside(axes, row, f"{summary.ms_per_token:.2f} ms")
    labels = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(labels.values(), labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False)
    axes.set_xlim(left=0)
    return picture


def speedup_by_length(digest: Digest, look: dict[str, Look]) -> Picture:
    lengths = sorted(digest.by_length)
    if len(lengths) < 2:
        raise MissingDataError("all runs have the same length limit")
    curves: dict[str, list[tuple[int, float, float, float]]] = {}
    for length in lengths:
        for summary in digest.by_length[length]:
            if summary.speedup and summary.entrant != BASELINE:
                value, low, high = summary.speedup.of_totals
                curves.setdefault(summary.entrant, []).append(
                    (length, value, value if low is None else low, value if high is None else high)
                )
    if not curves:
        raise MissingDataError("no entrant shares a prompt with none")
    prompts = max(summary.prompts for summary in digest.overall)
    picture = page(
        "speedup-by-length",
        "Speedup by generated length",
        f"What to see: whether a policy's gain lasts as the text grows. Ratios of total tokens/s over target-only "
        f"decoding with 95% bootstrap intervals; n = {prompts} prompts.",
        4.0,
    )
    (axes,) = panels(picture, 1, 1, "token limit", "times target-only")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, list(map(str, lengths)))
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.axhline(1, color=BASELINE_COLOUR, linewidth=1)
    ends = []
    for order, (name, curve) in enumerate(curves.items()):
        # A little apart, so that intervals at the same length can be told from each other.
        x = [length * 2 ** (0.02 * (order - (len(curves) - 1) / 2)) for length, *_ in curve]
        y = [value for _, value, *_ in curve]
        axes.plot(x, y, color=look[name].colour, marker=look[name].marker, markersize=5, linewidth=1.5)
        axes.vlines(
            x, [low for *_, low, _ in curve], [high for *_, high in curve], color=look[name].colour, linewidth=1
        )
        ends.append((x[-1], y[-1], shorten(name), look[name].colour))
    label_ends(axes, ends)
    return picture


def _parts(digest: Digest) -> list[tuple[str, list[Summary]]]:
    parts = list(digest.by_category.items()) if len(digest.by_category) > 1 else []
    return [("all prompts", digest.overall), *parts]


def _height(parts: Sized, names: Sequence[str]) -> float:
    return (_ROW * len(names) + 0.85) * -(-len(parts) // _columns(parts))


def _columns(parts: Sized) -> int:
    return 3 if len(parts) in (3, 5, 6, 9) else min(4, len(parts))


def _entrant_panel(axes: "Axes", title: str, names: Sequence[str]) -> None:
    axes.set_title(title)
    axes.set_yticks(range(len(names)), [shorten(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _beside(axes: "Axes", row: int, text: str) -> None:
    axes.text(1.01, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)


def _drafting(run: Run) -> list[RoundFacts]:
    return [round_ for round_ in run.rounds if round_.stop is not None]


def _point_names(entrants: Sequence[Entrant]) -> list[str]:
    """Labels; where a name has several settings, the name (or that of its head) with what differs between them."""
    names = []
    for entrant in entrants:
        same = [other for other in entrants if other.family == entrant.family]
        differing = [key for key in entrant.values if len({repr(other.values.get(key)) for other in same}) > 1]
        values = ", ".join(f"{key} {entrant.values[key]}" for key in differing)
        head = entrant.setting.head_label if entrant.setting is not None else None
        names.append(f"{head or entrant.name} {values}" if differing and entrant.drafts == (0,) else entrant.label)
    return names


def _widen(axes: "Axes", points: Sequence[tuple[str, float, float]]) -> None:
    """Leave room around the points, and so much that small differences do not look large."""
    axes.set_xlim(_range([x for _, x, _ in points], least=0.2))
    axes.set_ylim(_range([y for _, _, y in points], least=0.1))


def _range(values: Sequence[float], least: float) -> tuple[float, float]:
    middle, half = (min(values) + max(values)) / 2, max(0.68 * (max(values) - min(values)), least / 2)
    return max(0.0, middle - half), middle + half


def _equal_speeds(axes: "Axes", model: CostModel) -> None:
    from matplotlib.ticker import MaxNLocator

    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    slowest = model.target_ms / model.latency(right, top)
    fastest = model.target_ms / model.latency(left, bottom)
    for speed in MaxNLocator(7).tick_values(slowest, fastest):
        if not slowest < speed < fastest:
            continue
        ends = [model.verification_rate_at(speed, discard) for discard in (left, right)]
        axes.plot([left, right], ends, ":", color=FAINT, linewidth=0.9, zorder=0, scalex=False, scaley=False)
        # Where the line leaves the frame: at the right, else at the bottom.
        across, up = right, ends[1]
        if up < bottom:
            across, up = left + (right - left) * (ends[0] - bottom) / (ends[0] - ends[1]), bottom
        axes.annotate(
            f"{speed:.4g}x",
            (across, up),
            xytext=(3, 2),
            textcoords="offset points",
            fontsize=8,
            color=FAINT,
            annotation_clip=False,
        )


FIGURES: dict[str, Drawing] = {
    "Speedup by category": speedup_by_category,
    "Drafted and accepted length by category": lengths_by_category,
    "Verification rate against discard rate": verification_against_discard,
    "Accepted lengths": accepted_histogram,
    "Draft length over rounds": draft_length_over_rounds,
    "Wall time": wall_time,
    "Speedup by length": speedup_by_length,
}

LEVEL_FIGURES: dict[str, Drawing] = {
    "When a third model pays": where_it_pays,
    "Speed by window": speed_by_window,
}
"""Drawn where several drafts are loaded."""
