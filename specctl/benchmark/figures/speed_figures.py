"""Figures of how fast each candidate was and where its time went. Matplotlib is imported when a figure is drawn."""

from specctl.benchmark.digest import Digest
from specctl.benchmark.figures.candidate_panels import (
    ROW,
    Look,
    candidate_panel,
    note_after,
    note_right,
    panel_columns,
    panel_height,
    parts_of,
)
from specctl.benchmark.verdict import standings
from specctl.observing.results import BASELINE
from specctl.reporting.placing import placing
from specctl.reporting.style import (
    BASELINE_COLOUR,
    FAINT,
    INK,
    MissingDataError,
    Picture,
    label_ends,
    page,
    panels,
    shorten,
)


def speedup_by_category(digest: Digest, look: dict[str, Look]) -> Picture:
    parts = [
        (name, {summary.candidate: summary.speedup for summary in summaries if summary.speedup})
        for name, summaries in parts_of(digest)
    ]
    names = [name for name in parts[0][1] if name != BASELINE]
    if not names:
        raise MissingDataError("no candidate shares a prompt with none")
    picture = page(
        "speedup-by-category",
        "Speedup over target-only decoding",
        f"What to see: {placing(standings(digest))}. Points are ratios of total tokens/s, lines 95% bootstrap "
        "intervals over prompts; right of the grey line is faster. Lines that overlap may still be of "
        "candidates that differ: they ran the same prompts.",
        panel_height(parts, names),
    )
    for axes, (name, speeds) in zip(
        panels(picture, len(parts), panel_columns(parts), "times target-only"), parts, strict=True
    ):
        prompts = max((speed.prompts for speed in speeds.values()), default=0)
        candidate_panel(axes, f"{shorten(name, 24)}, n = {prompts}", names)
        axes.axvline(1, color=BASELINE_COLOUR, linewidth=1)
        for row, candidate in enumerate(names):
            if candidate in speeds:
                value, low, high, _ = speeds[candidate].of_totals
                if low is not None and high is not None:
                    axes.plot([low, high], [row, row], color=look[candidate].colour, linewidth=2, solid_capstyle="butt")
                axes.plot(value, row, look[candidate].marker, color=look[candidate].colour, markersize=6)
                note_after(axes, value if high is None else high, row, f"{value:.2f}")
        axes.margins(x=0.16)
    return picture


def wall_time(digest: Digest, look: dict[str, Look]) -> Picture:
    del look  # Here colours mean parts of the time.
    parts = {"draft": "#E69F00", "verify": "#0072B2", "prefill": "#999999", "other": "#D55E00"}
    names = [summary.candidate for summary in digest.overall]
    if not any(summary.wall for summary in digest.overall):
        raise MissingDataError("no candidate's time can be split into parts")
    idlest = max(digest.overall, key=lambda summary: summary.wall.get("other", 0.0))
    prompts = max(summary.prompts for summary in digest.overall)
    picture = page(
        "wall-time",
        "Where the time goes, per generated token",
        f"What to see: shorter is faster; a good policy saves more verify time than it spends on drafts. Other is the "
        f"loop itself, at most {idlest.wall.get('other', 0.0):.1%} ({idlest.candidate}). Percentages are shares of the "
        f"bar; n = {prompts} prompts.",
        ROW * 1.3 * len(names) + 0.8,
    )
    (axes,) = panels(picture, 1, 1, "milliseconds per token")
    candidate_panel(axes, "", names)
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
        note_right(axes, row, f"{summary.ms_per_token:.2f} ms")
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
            if summary.speedup and summary.candidate != BASELINE:
                value, low, high, _ = summary.speedup.of_totals
                curves.setdefault(summary.candidate, []).append(
                    (length, value, value if low is None else low, value if high is None else high)
                )
    if not curves:
        raise MissingDataError("no candidate shares a prompt with none")
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
        # Shifted slightly, so that intervals at the same length do not overlap.
        x = [length * 2 ** (0.02 * (order - (len(curves) - 1) / 2)) for length, *_ in curve]
        y = [value for _, value, *_ in curve]
        axes.plot(x, y, color=look[name].colour, marker=look[name].marker, markersize=5, linewidth=1.5)
        axes.vlines(
            x, [low for *_, low, _ in curve], [high for *_, high in curve], color=look[name].colour, linewidth=1
        )
        ends.append((x[-1], y[-1], shorten(name), look[name].colour))
    label_ends(axes, ends)
    return picture
