"""Draws the figures of a calibration. Matplotlib is imported when a figure is drawn."""

from collections.abc import Iterator, Sequence

from specctl.calibration.calibration_tables import curve
from specctl.calibration.scores import Score
from specctl.calibration.search import Calibration, Ranked
from specctl.policies import NONE
from specctl.reporting.style import (
    BASELINE_COLOUR,
    FAINT,
    INK,
    PALETTE,
    Picture,
    label_ends,
    page,
    panels,
    shorten,
    style,
)
from specctl.statistics.pareto import pareto


def draw_calibration(found: Calibration) -> Iterator[Picture]:
    """Draw the ranking, target passes against discarded draft tokens, and the curve of the chosen policy if it has one.

    Raises:
        UsageError: matplotlib is not installed.
    """
    with style():
        yield ranking(found)
        yield verification_against_discard(found)
        if len(found.curve) > 2:
            yield threshold_curve(found)


def ranking(found: Calibration) -> Picture:
    entries = [*found.ranking[::-1], found.oracle]
    picture = page(
        "ranking",
        "Predicted speedup of each policy at its best setting",
        "What to see: which policy is fastest on this pair and machine, how sure that is, and how far it is from the "
        "oracle, which knows where the target will disagree (Theorem 4.1). Bars are 95% bootstrap intervals over "
        f"{len(found.reported_on)} prompts{' that did not choose the settings' if found.held_out else ''}.",
        0.8 + 0.32 * len(entries),
    )
    (axes,) = panels(picture, 1, 1, "speedup over target-only decoding")
    for row, entry in enumerate(entries):
        axes.errorbar(
            entry.speedup.value,
            row,
            xerr=_reach(entry),
            fmt="D" if entry is found.oracle else "o",
            color=_colour(entry, found),
            capsize=3,
        )
        axes.annotate(
            f"{entry.speedup.value:.2f}",
            (entry.speedup.value, row),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    chosen = found.winner.score.setting
    names = [
        shorten(entry.score.setting.label, 60) + (" *" if entry.score.setting == chosen else "") for entry in entries
    ]
    axes.set_yticks(range(len(entries)), names)
    axes.set_ylim(-0.6, len(entries) - 0.2)
    axes.axvline(1, color=FAINT, linewidth=0.8, linestyle=":")
    axes.grid(axis="x")
    return picture


def verification_against_discard(found: Calibration) -> Picture:
    families = {name: scores for name, scores in found.families.items() if name != NONE.family}
    fronts = {name: _front(scores) for name, scores in families.items()}
    whole = _front([score for front in fronts.values() for score in front])
    best = {score.setting.family for score in whole}
    picture = page(
        "verification-discard",
        "Target passes against discarded draft tokens, every setting",
        "What to see: lower left is better. Dots are settings; each line joins the settings of one policy (and "
        f"head) that no other of its settings beats in both rates. Named are the {len(best)} policies with a setting "
        "that no setting of any policy beats. The cross is the chosen setting, which was chosen on these "
        f"{len(found.chosen_on)} prompts; target-only decoding is at (0, 1).",
        4.6,
    )
    (axes,) = panels(
        picture,
        1,
        1,
        "discard rate (discarded draft tokens per generated token)",
        "verification rate (target passes per generated token)",
    )
    ends = []
    for index, (name, scores) in enumerate(families.items()):
        colour = PALETTE[index % len(PALETTE)] if name in best else FAINT
        points = [(score.discard_rate, score.verification_rate) for score in scores]
        axes.plot(*zip(*points, strict=True), ".", color=colour, markersize=3, alpha=0.5)
        line = [(score.discard_rate, score.verification_rate) for score in fronts[name]]
        axes.plot(*zip(*line, strict=True), color=colour, linewidth=1.4 if name in best else 0.5)
        if name in best:
            ends.append((*line[-1], shorten(fronts[name][0].setting.family, 34), colour))
    chosen = found.choice.chosen
    if chosen.setting != NONE:
        axes.plot([chosen.discard_rate], [chosen.verification_rate], "x", color=INK, markersize=9, markeredgewidth=2)
    axes.set_xlim(0, 1.05 * max(score.discard_rate for score in whole) + 0.05)
    up = [score.verification_rate for front in fronts.values() for score in front]
    axes.set_ylim(max(0.0, min(up) - 0.05), max(up) + 0.05)
    label_ends(axes, ends)
    return picture


def _front(scores: Sequence[Score]) -> list[Score]:
    """The scores that no other beats in both rates, by discard rate."""
    by_point: dict[tuple[float, float], Score] = {}
    for score in scores:
        by_point.setdefault((score.discard_rate, score.verification_rate), score)
    points = sorted(by_point)
    return [by_point[points[index]] for index in pareto(points)]


def threshold_curve(found: Calibration) -> Picture:
    knob, best = curve(found)
    name = found.curve[0].setting.family
    picture = page(
        "curve",
        f"{name}: predicted speed by {knob}",
        f"What to see: a flat top means that the exact value matters little. Each point is the fastest setting with "
        f"that {knob}; the ring is the chosen setting, the dotted line target-only decoding. "
        f"The setting was chosen on these {len(found.chosen_on)} prompts.",
        3.4,
    )
    (axes,) = panels(picture, 1, 1, knob, "tokens/s")
    across, up = [float(value) for value, _ in best], [score.tokens_per_second for _, score in best]
    axes.plot(across, up, marker=".", color=PALETTE[0])
    chosen = found.choice.chosen
    value = float(chosen.setting.all_values.get(knob, 0))
    axes.plot([value], [chosen.tokens_per_second], "o", mfc="none", ms=11, color=PALETTE[1])
    axes.axhline(found.baseline.tokens_per_second, color=BASELINE_COLOUR, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    return picture


def _reach(entry: Ranked) -> list[list[float]] | None:
    low, high = entry.speedup.low, entry.speedup.high
    if low is None or high is None:
        return None
    return [[max(0.0, entry.speedup.value - low)], [max(0.0, high - entry.speedup.value)]]


def _colour(entry: Ranked, found: Calibration) -> str:
    if entry is found.oracle:
        return PALETTE[2]
    if entry.score.setting == NONE:
        return BASELINE_COLOUR
    return PALETTE[1] if entry.score.setting == found.winner.score.setting else PALETTE[0]
