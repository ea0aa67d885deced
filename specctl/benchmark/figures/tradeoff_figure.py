"""The figure of target passes against discarded drafts. Matplotlib is imported when it is drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specctl.benchmark.cost_model import CostModel
from specctl.benchmark.digest import Digest
from specctl.benchmark.figures.candidate_panels import Look
from specctl.observing.candidate import Candidate
from specctl.reporting.style import FAINT, INK, MissingDataError, Picture, label_points, page, panels
from specctl.statistics.pareto import pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def verification_against_discard(digest: Digest, look: dict[str, Look]) -> Picture:
    # What both rates cost in parallel is another matter.
    candidates = {one.label: one for one in digest.results.header.candidates if not one.parallel}
    points = [
        (summary.candidate, summary.discard_rate, summary.verification_rate)
        for summary in digest.overall
        if summary.candidate in candidates
        and candidates[summary.candidate].engine is None  # another engine changes no rate
        and summary.draft_length
        and summary.discard_rate is not None
        and summary.verification_rate is not None
    ]
    if not points:
        raise MissingDataError("no candidate's discard rate and verification rate are both known")
    front = pareto([(discard, verification) for _, discard, verification in points])
    best = ", ".join(points[index][0] for index in front)
    model = digest.model if digest.model and digest.model.target_ms > digest.model.draft_ms > 0 else digest.bare
    if digest.levels:
        model = None  # two rates do not determine the cost of three models
    lines = ""
    if model is not None and digest.model is not None and not digest.model.explains:
        model = None
        explained = f"{digest.model.r_squared:.2f}"
        lines = f"Lines of equal speed are left out: the fit explains too little of the times (R² {explained}). "
    elif model is not None:
        lines = "Dotted lines join points of equal predicted speed on this machine, in multiples of target-only speed. "
    prompts = max(summary.prompts for summary in digest.overall)
    picture = page(
        "verification-discard",
        "Target passes against discarded draft tokens",
        f"What to see: lower left is better; no candidate beats a ringed one in both rates ({best}). {lines}"
        f"n = {prompts} prompts; target-only decoding is at (0, 1).",
        4.6,
    )
    (axes,) = panels(
        picture,
        1,
        1,
        "discard rate (discarded draft tokens per generated token)",
        "verification rate (target passes per generated token)",
    )
    for family in dict.fromkeys(candidates[label].family for label, *_ in points):
        curve = sorted(
            (point for point in points if candidates[point[0]].family == family), key=lambda point: (point[1], point[2])
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
    names = _point_names([candidates[label] for label, *_ in points])
    label_points(axes, [(x, y, name) for name, (_, x, y) in zip(names, points, strict=True)])
    return picture


def _point_names(candidates: Sequence[Candidate]) -> list[str]:
    """Short labels: the name of the policy or of its head, with the settings that differ within its family."""
    names = []
    for candidate in candidates:
        same = [other for other in candidates if other.family == candidate.family]
        differing = [key for key in candidate.values if len({repr(other.values.get(key)) for other in same}) > 1]
        values = ", ".join(f"{key} {candidate.values[key]}" for key in differing)
        head = candidate.setting.head_label if candidate.setting is not None else None
        names.append(
            f"{head or candidate.name} {values}" if differing and candidate.drafts == (0,) else candidate.label
        )
    return names


def _widen(axes: "Axes", points: Sequence[tuple[str, float, float]]) -> None:
    """Widen the axes around the points, so that small differences do not look large."""
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
        # The label is where the line leaves the frame: at the right, else at the bottom.
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
