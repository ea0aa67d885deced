"""The figures of a benchmark's report. Matplotlib is imported when a figure is drawn."""

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specctl.benchmark.cost_model import CandidateLevels, CostModel
from specctl.benchmark.digest import Digest, standings
from specctl.benchmark.summaries import Summary
from specctl.observing.results import BASELINE, Candidate, Run
from specctl.profile.wording import short_names
from specctl.records import RoundSummary
from specctl.reporting.placing import placing
from specctl.reporting.style import (
    BASELINE_COLOUR,
    FAINT,
    INK,
    MARKERS,
    PALETTE,
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
from specctl.statistics import Floats, pareto

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Look:
    """How a candidate is drawn in every figure."""

    colour: str
    marker: str


def looks(candidates: Sequence[Candidate]) -> dict[str, Look]:
    """One colour per family with tints for its further settings, and grey for the baseline."""
    names = list(dict.fromkeys(candidate.family for candidate in candidates if candidate.label != BASELINE))
    found = {}
    for candidate in candidates:
        if candidate.label == BASELINE:
            found[candidate.label] = Look(BASELINE_COLOUR, "o")
            continue
        same = [other.label for other in candidates if other.family == candidate.family]
        index = names.index(candidate.family)
        lightness = 0.6 * same.index(candidate.label) / len(same)
        found[candidate.label] = Look(tint(PALETTE[index % len(PALETTE)], lightness), MARKERS[index % len(MARKERS)])
    return found


ROW = 0.24  # Height of one candidate in a panel, in inches


def parts_of(digest: Digest) -> list[tuple[str, list[Summary]]]:
    """All prompts, then each category if there are several: the name of each part and its summaries."""
    parts = list(digest.by_category.items()) if len(digest.by_category) > 1 else []
    return [("all prompts", digest.overall), *parts]


def panel_height(parts: Sized, names: Sequence[str]) -> float:
    """Inches that a page of one panel per part needs, with one row per name in each."""
    return (ROW * len(names) + 0.85) * -(-len(parts) // panel_columns(parts))


def panel_columns(parts: Sized) -> int:
    """Number of panels in a row of the page."""
    return 3 if len(parts) in (3, 5, 6, 9) else min(4, len(parts))


def candidate_panel(axes: "Axes", title: str, names: Sequence[str]) -> None:
    """Prepare axes with one row per candidate, the first on top."""
    axes.set_title(title)
    axes.set_yticks(range(len(names)), [shorten(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def note_after(axes: "Axes", across: float, row: int, text: str) -> None:
    """Write a text after the end of a row's bar at ``across``, inside the panel."""
    axes.annotate(text, (across, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)


def drafting_rounds(run: Run) -> list[RoundSummary]:
    """The rounds of a run in which a draft ran."""
    return [round_ for round_ in run.rounds if round_.stop is not None]


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
    del look  # Colours stand for parts of the time here.
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
        beside = axes.get_yaxis_transform()
        axes.text(1.01, row, f"{summary.ms_per_token:.2f} ms", transform=beside, va="center", fontsize=8)
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


MOST_ROUNDS = 80


def lengths_by_category(digest: Digest, look: dict[str, Look]) -> Picture:
    parts = [(name, [summary for summary in summaries if summary.draft_length]) for name, summaries in parts_of(digest)]
    names = [summary.candidate for summary in parts[0][1]]
    if not names:
        raise MissingDataError("no candidate drafted a token")
    keenest = max(parts[0][1], key=lambda summary: summary.acceptance_rate or 0)
    picture = page(
        "lengths-by-category",
        "Drafted and accepted tokens per round, and the acceptance rate",
        f"What to see: the dark part of a bar was accepted, the pale part was discarded; "
        f"{keenest.candidate} wastes least, {keenest.acceptance_rate:.0%} accepted overall. Means over rounds; the "
        "percentage after a bar is accepted / drafted.",
        panel_height(parts, names),
    )
    for axes, (name, summaries) in zip(
        panels(picture, len(parts), panel_columns(parts), "tokens per round"), parts, strict=True
    ):
        prompts = max((summary.prompts for summary in summaries), default=0)
        candidate_panel(axes, f"{shorten(name, 24)}, n = {prompts}", names)
        for summary in summaries:
            if summary.draft_length and summary.accepted_length:
                row, colour = names.index(summary.candidate), look[summary.candidate].colour
                axes.barh(row, summary.draft_length.mean, 0.7, color=tint(colour, 0.65))
                axes.barh(row, summary.accepted_length.mean, 0.7, color=colour)
                note_after(axes, summary.draft_length.mean, row, f"{summary.acceptance_rate:.0%}")
    axes.margins(x=0.16)
    axes.set_xlim(left=0)
    return picture


def accepted_histogram(digest: Digest, look: dict[str, Look]) -> Picture:
    from matplotlib.ticker import MaxNLocator

    shown = {summary.candidate: summary.accepted_length for summary in digest.overall if summary.accepted_length}
    if not shown:
        raise MissingDataError("no candidate has visible rounds with accepted draft tokens")
    lengths = {
        name: [round_.accepted for run in digest.results.of(name) for round_ in drafting_rounds(run)] for name in shown
    }
    longest = max(int(np.quantile(values, 0.99, method="higher")) for values in lengths.values())
    more = f"; the last bar contains {longest} and more" if longest < max(map(max, lengths.values())) else ""
    widest, spread = max(shown.items(), key=lambda item: item[1].sd)
    picture = page(
        "accepted-lengths",
        "Accepted tokens per round",
        f"What to see: the wider the distribution, the more there is to gain from stopping at the right moment; widest "
        f"for {widest} (sd {spread.sd:.1f}). The dashed line is the mean; the target's own token is not counted{more}.",
        1.35 * -(-len(shown) // panel_columns(shown)) + 0.3,
    )
    grid = panels(picture, len(shown), panel_columns(shown), "accepted tokens", "% of rounds")
    for axes, (name, values) in zip(grid, lengths.items(), strict=True):
        shares = np.bincount(np.minimum(values, longest), minlength=longest + 1) / len(values)
        axes.bar(range(longest + 1), 100 * shares, 0.85, color=look[name].colour)
        axes.axvline(float(np.mean(values)), color=INK, linestyle="--", linewidth=1)
        axes.set_title(f"{shorten(name, 24)}, n = {len(values)} rounds")
        axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return picture


def draft_length_over_rounds(digest: Digest, look: dict[str, Look]) -> Picture:
    names = [summary.candidate for summary in digest.overall if summary.draft_length]
    by_prompt: dict[tuple[str, int], dict[str, Run]] = {}
    for run in digest.results.runs:
        if run.candidate in names and any(drafting_rounds(run)):
            by_prompt.setdefault((run.prompt, run.length), {}).setdefault(run.candidate, run)
    if not by_prompt:
        raise MissingDataError("no candidate has visible rounds with draft tokens")
    fullest = max(map(len, by_prompt.values()))
    ordered = sorted(
        (item for item in by_prompt.items() if len(item[1]) == fullest),
        key=lambda item: sum(len(drafting_rounds(run)) for run in item[1].values()),
    )
    (prompt, _), runs = ordered[len(ordered) // 2]  # a prompt of medium difficulty
    shown = [name for name in names if name in runs]
    rounds = {name: drafting_rounds(runs[name]) for name in shown}
    most = min(MOST_ROUNDS, max(map(len, rounds.values())))
    cut = f" (the first {MOST_ROUNDS})" if max(map(len, rounds.values())) > MOST_ROUNDS else ""
    picture = page(
        "draft-length-over-rounds",
        f"Draft length round by round, prompt {shorten(prompt)}",
        f"What to see: an adaptive policy has a ragged outline, long where drafting is easy; a constant one is "
        f"flat. One bar per round{cut}: dark accepted, pale discarded. Fewer rounds are fewer target passes.",
        0.85 * len(shown) + 0.3,
    )
    for axes, name in zip(panels(picture, len(shown), 1, "round"), shown, strict=True):
        drawn = rounds[name][:most]
        numbers = range(1, len(drawn) + 1)
        axes.bar(numbers, [round_.drafted for round_ in drawn], 0.9, color=tint(look[name].colour, 0.65))
        axes.bar(numbers, [round_.accepted for round_ in drawn], 0.9, color=look[name].colour)
        axes.set_title(f"{shorten(name, 40)}: {len(rounds[name])} rounds for {runs[name].tokens} tokens")
        axes.set_xlim(0.4, most + 0.6)
        axes.grid(axis="y")
    picture.figure.supylabel("tokens drafted", fontsize=9)
    return picture


def verification_against_discard(digest: Digest, look: dict[str, Look]) -> Picture:
    # Parallel drafts overlap with verification, so the same rates have another cost.
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
    # Wide enough that small differences do not look large.
    axes.set_xlim(_range([x for _, x, _ in points], least=0.2))
    axes.set_ylim(_range([y for _, _, y in points], least=0.1))
    if model is not None:
        _equal_speeds(axes, model)
    names = _point_names([candidates[label] for label, *_ in points])
    label_points(axes, [(x, y, name) for name, (_, x, y) in zip(names, points, strict=True)])
    return picture


def _point_names(candidates: Sequence[Candidate]) -> list[str]:
    """Short labels: the policy's or its head's name, with the settings that differ within its family."""
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
        # The label stands where the line leaves the frame: at the right, else at the bottom.
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


_RATIOS = np.geomspace(1, 200, 121)
_LEAST_WINDOWS = 3


def where_it_pays(digest: Digest, look: dict[str, Look]) -> Picture:
    del look  # Colours stand for a ratio of speeds here.
    names = short_names(digest.results.header.drafts)
    chains = {tuple(level.draft for level in one.levels) for one in digest.levels if one.nested}
    if len(names) != 2 or len(chains) != 1 or all(one.nested for one in digest.levels):
        raise MissingDataError("this figure needs hierarchies of the same two drafts, and each draft alone")
    (chain,) = chains
    middle, lowest = (names[draft] for draft in chain)
    nested = [one for one in digest.levels if one.nested]
    plain = [one for one in digest.levels if not one.nested]
    costs = _costs(chain, *np.meshgrid(_RATIOS, _RATIOS))
    gain = _least(plain, costs) / _least(nested, costs)
    best = max(nested, key=lambda one: float((_least(plain, costs) / _least([one], costs)).mean()))
    fitted = digest.model is not None and digest.model.explains and min(digest.model.drafts_ms) > 0
    here = _here(digest.model if fitted else digest.bare, chain)
    star = ""
    if here is not None:
        own = _costs(chain, *map(np.array, here))
        star = (
            f"The star is this machine, 1 : {here[0]:.1f} : {here[0] * here[1]:.1f}: at that point the hierarchy "
            f"reaches {float(_least(plain, own) / _least(nested, own)):.2f} times that speed. "
        )
    picture = page(
        "where-the-hierarchy-pays",
        "When a third model pays, by the cost model",
        f"What to see: {_verdict(gain, best.candidate)} {star}Forward passes are measured; only "
        f"their costs t_{lowest} : t_{middle} : t_target vary.",
        4.2,
    )
    (axes,) = panels(picture, 1, 1, f"t_{middle} / t_{lowest}", f"t_target / t_{middle}")
    _map(axes, gain)
    if here:
        axes.plot(*np.clip(here, _RATIOS[0], _RATIOS[-1]), "*", color=INK, markersize=11)
    return picture


def speed_by_window(digest: Digest, look: dict[str, Look]) -> Picture:
    speeds = {summary.candidate: summary.tokens_per_second for summary in digest.overall}
    families: dict[str, list[Candidate]] = {}
    for candidate in digest.results.header.candidates:
        if candidate.label in speeds and window(candidate) is not None:
            families.setdefault(candidate.family, []).append(candidate)
    curves = {
        family: sorted((window(candidate) or 0, speeds[candidate.label]) for candidate in candidates)
        for family, candidates in families.items()
        if len({window(candidate) for candidate in candidates}) >= _LEAST_WINDOWS
    }
    if not curves:
        raise MissingDataError(f"no policy ran with {_LEAST_WINDOWS} or more windows")
    falls = {family: 1 - min(y for _, y in curve) / max(y for _, y in curve) for family, curve in curves.items()}
    names = {family: _family_name(families[family][0], digest.results.header.drafts) for family in curves}
    steadiest = min(falls, key=lambda family: falls[family])
    picture = page(
        "speed-by-window",
        "Speed by the window of the lowest draft",
        f"What to see: a flat curve needs no tuning. {names[steadiest]} is the steadiest, "
        f"{falls[steadiest]:.0%} between its best and its worst window. The window is the longest draft that "
        f"the lowest model may write; n = {max(summary.prompts for summary in digest.overall)} prompts.",
        4.0,
    )
    (axes,) = panels(picture, 1, 1, "window (tokens)", "tokens/s")
    axes.grid(axis="y")
    ends = []
    for family, curve in curves.items():
        style = look[families[family][0].label]
        x, y = [size for size, _ in curve], [speed for _, speed in curve]
        axes.plot(x, y, color=style.colour, marker=style.marker, markersize=4, linewidth=1.5)
        ends.append((x[-1], y[-1], shorten(names[family], 40), style.colour))
    axes.set_ylim(bottom=0)
    label_ends(axes, ends)
    return picture


def window(candidate: Candidate) -> int | None:
    """The longest draft that the candidate's lowest model may write; None if its policy has no such setting."""
    if candidate.setting is None:
        return None
    values = candidate.setting.levels[-1].all_values
    found = values.get("draft_length" if "max_draft" not in values else "max_draft")
    return found if isinstance(found, int) else None


def _family_name(candidate: Candidate, drafts: list[str]) -> str:
    families = (
        (level.family for level in candidate.setting.levels) if candidate.setting is not None else (candidate.name,)
    )
    known = short_names(drafts)
    names = [f"@{known[draft]}" if drafts else "" for draft in candidate.drafts]
    return " < ".join(family + name for family, name in zip(families, names, strict=True))


def _costs(chain: Sequence[int], middle: Floats, target: Floats) -> list[Floats]:
    """The cost of a pass of each draft and of the target, in passes of the lowest draft.

    Args:
        chain: the indices of the middle and the lowest draft.
        middle: cost of a pass of the middle model.
        target: cost of a pass of the target, in passes of the middle model.
    """
    costs = [np.ones_like(middle), np.ones_like(middle), middle * target]
    costs[chain[0]] = middle
    return costs


def _least(candidates: Sequence[CandidateLevels], costs: Sequence[Floats]) -> Floats:
    """The least time per token among candidates."""
    least: Floats = np.min([one.per_token(costs) for one in candidates], 0)
    return least


def _verdict(gain: Floats, best: str) -> str:
    if gain.max() <= 1:
        return (
            f"no costs in view make a hierarchy faster than the best candidate with one draft or none; at best it "
            f"reaches {gain.max():.2f} times that speed. The lines are multiples of that speed."
        )
    if gain.min() >= 1:
        return f"at all costs in view, a hierarchy (mostly {best}) is faster than one draft or none."
    return (
        f"on the orange side of the thick line the best hierarchy (mostly {best}) is faster than the best candidate "
        "with one draft or none; thin lines are multiples of that speed."
    )


def _here(model: CostModel | None, chain: Sequence[int]) -> tuple[float, float] | None:
    if model is None or min(*model.drafts_ms, model.target_ms) <= 0:
        return None
    middle, lowest = (model.drafts_ms[draft] for draft in chain)
    return middle / lowest, model.target_ms / middle


def _map(axes: "Axes", gain: Floats) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):  # plain numbers: our style reads no mathematics in labels
        axis.set_major_formatter(LogFormatter())
        axis.set_minor_formatter(LogFormatter())
    spread = max(float(np.abs(np.log(gain)).max()), 1e-3)
    shades = np.exp(np.linspace(-spread, spread, 13))
    axes.contourf(_RATIOS, _RATIOS, gain, levels=shades, cmap="PuOr_r", norm=LogNorm(shades[0], shades[-1]), alpha=0.7)
    if gain.min() < 1 < gain.max():
        axes.contour(_RATIOS, _RATIOS, gain, levels=[1.0], colors=INK, linewidths=1.5)
    faint = [ratio for ratio in (0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0) if gain.min() < ratio < gain.max()]
    if faint:
        lines = axes.contour(_RATIOS, _RATIOS, gain, levels=faint, colors=BASELINE_COLOUR, linewidths=0.7)
        axes.clabel(lines, fmt="%.1fx", fontsize=8)


Drawing = Callable[[Digest, dict[str, Look]], Picture]

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
"""Drawn only where several drafts are loaded."""


def draw_all(digest: Digest) -> Iterator[tuple[str, Picture | str]]:
    """Yield the title of each figure with the figure, or with the reason why it cannot be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    look = looks(digest.results.header.candidates)
    for title, draw in {**FIGURES, **(LEVEL_FIGURES if digest.levels else {})}.items():
        with style():
            try:
                yield title, draw(digest, look)
            except MissingDataError as reason:
                yield title, str(reason)
