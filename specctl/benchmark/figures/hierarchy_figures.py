"""Figures of hierarchies of drafts: where they pay, and how much the window of the lowest draft matters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specctl.benchmark.cost_model import CostModel
from specctl.benchmark.digest import Digest
from specctl.benchmark.figures.candidate_panels import Look
from specctl.benchmark.hierarchy_levels import CandidateLevels
from specctl.observing.candidate import Candidate
from specctl.profile.model_names import short_names
from specctl.reporting.style import BASELINE_COLOUR, INK, MissingDataError, Picture, label_ends, page, panels, shorten
from specctl.statistics.intervals import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RATIOS = np.geomspace(1, 200, 121)
_LEAST_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class _Passes:
    """A candidate's forward passes per generated token."""

    candidate: str
    middle: float
    lowest: float
    target: float

    @classmethod
    def of(cls, found: CandidateLevels, chain: Sequence[int]) -> "_Passes":
        middle, lowest = chain
        return cls(found.candidate, found.passes[middle], found.passes[lowest], found.passes[-1])


def where_it_pays(digest: Digest, look: dict[str, Look]) -> Picture:
    del look  # Here colours mean a ratio of speeds.
    names = short_names(digest.results.header.drafts)
    chains = {tuple(level.draft for level in one.levels) for one in digest.levels if one.nested}
    if len(names) != 2 or len(chains) != 1 or all(one.nested for one in digest.levels):
        raise MissingDataError("this figure needs hierarchies of the same two drafts, and each draft alone")
    (chain,) = chains
    middle, lowest = (names[draft] for draft in chain)
    nested = [_Passes.of(one, chain) for one in digest.levels if one.nested]
    plain = [_Passes.of(one, chain) for one in digest.levels if not one.nested]
    # A pass of (lowest, middle, target) costs 1, x and x y.
    across, up = np.meshgrid(_RATIOS, _RATIOS)
    gain = _least(plain, across, up) / _least(nested, across, up)
    best = max(nested, key=lambda one: float((_least(plain, across, up) / _least([one], across, up)).mean()))
    fitted = digest.model is not None and digest.model.explains and min(digest.model.drafts_ms) > 0
    model = digest.model if fitted else digest.bare
    here = _here(model, chain)
    picture = page(
        "where-the-hierarchy-pays",
        "When a third model pays, by the cost model",
        f"What to see: {_verdict(gain, best.candidate)} {_about_this_machine(here, plain, nested)}Forward passes are "
        f"measured; only their costs t_{lowest} : t_{middle} : t_target vary.",
        4.2,
    )
    (axes,) = panels(picture, 1, 1, f"t_{middle} / t_{lowest}", f"t_target / t_{middle}")
    _map(axes, across, up, gain)
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


def _least(candidates: list[_Passes], middle: Floats, target: Floats) -> Floats:
    """The least time per token among candidates, in passes of the lowest draft.

    Args:
        candidates: at least one.
        middle: cost of a pass of the middle model.
        target: cost of a pass of the target, in passes of the middle model.
    """
    least: Floats = np.min([one.middle * middle + one.lowest + one.target * middle * target for one in candidates], 0)
    return least


def _gain_at(plain: list[_Passes], nested: list[_Passes], middle: float, target: float) -> float:
    return float(_least(plain, np.array(middle), np.array(target)) / _least(nested, np.array(middle), np.array(target)))


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


def _about_this_machine(here: tuple[float, float] | None, plain: list[_Passes], nested: list[_Passes]) -> str:
    if here is None:
        return ""
    return (
        f"The star is this machine, 1 : {here[0]:.1f} : {here[0] * here[1]:.1f}: at that point the hierarchy reaches "
        f"{_gain_at(plain, nested, *here):.2f} times that speed. "
    )


def _here(model: CostModel | None, chain: Sequence[int]) -> tuple[float, float] | None:
    if model is None or min(*model.drafts_ms, model.target_ms) <= 0:
        return None
    middle, lowest = (model.drafts_ms[draft] for draft in chain)
    return middle / lowest, model.target_ms / middle


def _map(axes: "Axes", across: Floats, up: Floats, gain: Floats) -> None:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):  # plain numbers: our style reads no mathematics in labels
        axis.set_major_formatter(LogFormatter())
        axis.set_minor_formatter(LogFormatter())
    spread = max(float(np.abs(np.log(gain)).max()), 1e-3)
    shades = np.exp(np.linspace(-spread, spread, 13))
    axes.contourf(across, up, gain, levels=shades, cmap="PuOr_r", norm=LogNorm(shades[0], shades[-1]), alpha=0.7)
    if gain.min() < 1 < gain.max():
        axes.contour(across, up, gain, levels=[1.0], colors=INK, linewidths=1.5)
    faint = [ratio for ratio in (0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0) if gain.min() < ratio < gain.max()]
    if faint:
        lines = axes.contour(across, up, gain, levels=faint, colors=BASELINE_COLOUR, linewidths=0.7)
        axes.clabel(lines, fmt="%.1fx", fontsize=8)
