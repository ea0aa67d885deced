"""Shows the outcome of a calibration: as tables, as plain values, and as figures."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from specctl.calibration.live_check import Measured
from specctl.calibration.search import Best, Calibration, Ranked, Score
from specctl.policies import NONE
from specctl.policies.published import implied_threshold
from specctl.replay.costs import CostTable, signal_key
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
from specctl.reporting.table import BLOCK, DEFINITIONS, UNKNOWN, UP, Columns, Table
from specctl.statistics import Interval, pareto

if TYPE_CHECKING:
    from specctl.calibration.decision import Decision


SHOWN_NEAR = 5
_SHOWN_VALUES = 16
_BAR = 30
KNOBS = ("threshold", "draft_length", "max_draft")  # The main setting of a policy is the first of these that it has


def plain_interval(interval: Interval | None) -> dict[str, float | None] | None:
    """An interval as a JSON object."""
    if interval is None:
        return None
    return {name: None if value is None else round(value, 4) for name, value in interval._asdict().items()}


def speedup_cells(speedup: Interval | None) -> tuple[str, str]:
    """A speedup and its interval, for two columns."""
    if speedup is None:
        return UNKNOWN, UNKNOWN
    bounds = UNKNOWN if speedup.low is None else f"{speedup.low:.2f} to {speedup.high:.2f}"
    return f"{speedup.value:.2f}", f"{bounds} ({speedup.doubt})" if speedup.doubt else bounds


SPEEDUP: Columns[Ranked] = {
    "speedup": lambda one: speedup_cells(one.speedup)[0],
    "95% interval": lambda one: speedup_cells(one.speedup)[1],
}


def calibration_tables(decision: "Decision") -> list[Table]:
    """All tables of a calibration, in reading order."""
    found = decision.found
    return [
        _ranking(decision),
        *([by_size(found, decision.sizes)] if decision.sizes else []),
        *([_verified(decision.measured)] if decision.measured else []),
        *([_curve(found)] if len(found.curve) > 2 else []),
        *([_near(found)] if found.choice.near else []),
        *_costs(decision.costs, found),
    ]


def warning_tables(found: Calibration) -> list[Table]:
    """The warnings, shown first in a report."""
    note = " ".join(f"{line[0].upper()}{line[1:]}." for line in found.warnings)
    return [Table("Before you trust these numbers", (), (), note=note)] if note else []


def as_document(decision: "Decision") -> dict[str, Any]:
    """The numbers of the tables as plain values, with more decimal places."""
    found, advice = decision.found, decision.advice
    used, predicted = advice.rival_used, advice.predicted(advice.setting)
    return {
        "verdict": advice.verdict,
        "use": decision.setting.table,
        "speedup": {
            **(plain_interval(used.speedup) or {}),
            "from": "live runs" if advice.measured else "prediction",
            "predicted": None if predicted is None else round(predicted.value, 4),
        },
        "tokens_per_second": round(used.tokens_per_second, 2),
        "prompts": decision.prompts,
        "chosen": found.winner.score.setting.table,
        "fastest": found.choice.fastest.setting.table,
        "share_of_resamples": round(found.choice.share, 4),
        "candidates": found.candidates,
        "verification": found.verification,
        "held_out": found.held_out,
        "chosen_on": found.chosen_on,
        "reported_on": found.reported_on,
        "ranking": [_plain(entry, found) for entry in found.ranking],
        "oracle": _plain(found.oracle, found),
        "signal_bound": None if found.signal_bound is None else _plain(found.signal_bound, found),
        "runner_ups": [{"policy": s.setting.table, "tokens_per_second": _round(s)} for s in found.choice.near],
        "curve": [{"policy": s.setting.table, "tokens_per_second": _round(s)} for s in found.curve],
        "batches": [{**size_document(size), "use": decision.setting_of(size).table} for size in decision.sizes],
        "measured": [
            {
                "texts": one.rows,
                "policy": one.setting.table,
                "predicted_tokens_per_second": None if one.predicted is None else round(one.predicted, 2),
                "measured_tokens_per_second": round(one.measured, 2),
                "measured_speedup": plain_interval(one.speedup),
            }
            for one in decision.measured
        ],
        "costs": decision.costs.as_record(),
        "implied_threshold": _implied_threshold(decision.costs, found),
        "warnings": found.warnings,
        "interrupted": decision.interrupted,
    }


def size_document(size: Best) -> dict[str, Any]:
    """The numbers of one row with those of every policy, as plain values."""
    return {
        "texts": size.rows,
        "chosen": size.winner.score.setting.table,
        "candidates": size.candidates,
        "share_of_resamples": round(size.choice.share, 4),
        "ranking": [
            {
                "policy": one.score.setting.table,
                "tokens_per_second": round(one.score.tokens_per_second, 2),
                "speedup": plain_interval(one.speedup),
            }
            for one in size.ranking
        ],
    }


_VERIFIED = {None: "", "token": ", draft tokens verified one by one", "block": ", drafts verified as blocks"}


def bounds_passed(found: Calibration) -> list[str]:
    """One sentence for each bound that a policy exceeds."""
    said = []
    for bound in (found.signal_bound, found.oracle):
        if bound is not None and (passing := _passing(bound, found)) is not None:
            what = bound.score.setting.policy
            why = "its costs are noisy" if bound is found.oracle else "it is fitted to these prompts, and bounds only"
            why += "" if bound is found.oracle else " rules that read entropy and top probability"
            said.append(f"The {what} bounds nothing here, for {passing.score.setting.label} is above it: {why}")
    return said


def _passing(bound: Ranked, found: Calibration) -> Ranked | None:
    """The fastest policy if it exceeds a bound by more than rounding."""
    fastest = found.ranking[0]
    above = fastest.score.tokens_per_second > bound.score.tokens_per_second * 1.005
    return fastest if above else None


def _ranking(decision: "Decision") -> Table:
    found, oracle = decision.found, decision.found.oracle.score.tokens_per_second
    bounds = [found.oracle] if found.signal_bound is None else [found.signal_bound, found.oracle]
    passed = "".join(f" {line}." for line in bounds_passed(found))
    where = "prompts that did not choose the settings" if found.held_out else "the prompts that chose the settings"
    columns: Columns[Ranked] = {
        "policy": lambda one: _marked(one, found),
        "tokens/s": lambda one: one.score.tokens_per_second,
        **SPEEDUP,
        "acceptance rate": lambda one: one.score.acceptance_rate,
        "mean acceptance length": lambda one: one.score.mean_acceptance_length,
        "verification rate": lambda one: one.score.verification_rate,
        "discard rate": lambda one: one.score.discard_rate,
        "of oracle": lambda one: f"{one.score.tokens_per_second / oracle:.0%}",
    }
    return Table.of(
        "Policies at their best settings",
        columns,
        [*found.ranking, *bounds],
        note=f"{DEFINITIONS} {decision.prompts_as_text}. Predicted on {len(found.reported_on)} {where}; "
        f"{found.candidates} settings were replayed on {len(found.chosen_on)}{_VERIFIED[found.verification]}. "
        f"The chosen setting (*) was within the noise of the fastest in {found.choice.share:.0%} of resamples.{passed}",
    )


def _marked(entry: Ranked, found: Calibration) -> str:
    bound = entry is found.oracle or entry is found.signal_bound
    chosen = " *" if entry.score.setting == found.winner.score.setting else ""
    failed = " (no bound here)" if bound and _passing(entry, found) is not None else ""
    return f"{entry.score.setting.label}{chosen}{failed}"


def _verified(measured: Sequence[Measured]) -> Table:
    columns: Columns[Measured] = {
        "policy": lambda one: one.setting.label + (f", {one.rows} texts" if one.rows > 1 else ""),
        "predicted tokens/s": lambda one: one.predicted,
        "measured tokens/s": lambda one: one.measured,
        "off by": lambda one: None if one.predicted is None else f"{one.measured / one.predicted - 1:+.1%}",
        "measured speedup": lambda one: speedup_cells(one.speedup)[0],
        "95% interval": lambda one: speedup_cells(one.speedup)[1],
    }
    return Table.of("Predicted against measured", columns, measured)


def by_size(found: Calibration, sizes: Sequence[Best]) -> Table:
    """A row for one text and for each number of texts."""

    def fastest(size: Best, policy: str) -> Score | None:
        return next((one.score for one in size.ranking if one.score.setting.policy == policy), None)

    def speed(score: Score | None) -> float | None:
        return None if score is None else score.tokens_per_second

    columns: Columns[Best] = {
        "texts": lambda one: str(one.rows),
        "policy": lambda one: one.winner.score.setting.label,
        "tokens/s": lambda one: one.winner.score.tokens_per_second,
        "speedup": lambda one: speedup_cells(one.winner.speedup)[0],
        "95% interval": lambda one: speedup_cells(one.winner.speedup)[1],
        "none, tokens/s": lambda one: speed(fastest(one, "none")),
        "best constant": lambda one: None if (best := fastest(one, "constant")) is None else best.setting.label,
        "its tokens/s": lambda one: speed(fastest(one, "constant")),
    }
    replayed = ", ".join(f"{size.candidates} at {size.rows}" for size in sizes)
    return Table.of(
        "Best settings by texts at once",
        columns,
        [found, *sizes],
        labels=2,
        note="Of all texts together, predicted by replaying this number of texts with costs measured for it. "
        f"Settings replayed together: {replayed}.",
    )


def _curve(found: Calibration) -> Table:
    """The fastest candidate for each value of the policy's main setting, limited to as many values as fit a screen."""
    knob, best = curve(found)
    fastest = max(score.tokens_per_second for _, score in best)
    every = -(-len(best) // _SHOWN_VALUES)
    shown = [point for index, point in enumerate(best) if index % every == 0 or point[1].tokens_per_second == fastest]
    rows = tuple(
        (
            f"{value:g}" if isinstance(value, float) else str(value),
            BLOCK * max(1, round(_BAR * score.tokens_per_second / fastest)),
            f"{score.tokens_per_second:.1f}",
        )
        for value, score in shown
    )
    return Table(
        f"{found.curve[0].setting.family}: tokens/s by {knob}",
        (knob, "", f"tokens/s{UP}"),
        rows,
        labels=2,
    )


def curve(found: Calibration) -> tuple[str, list[tuple[Any, Score]]]:
    """The name of the chosen policy's main setting and, for each of its values, ascending, the fastest score."""
    knob = next((name for name in KNOBS if name in found.curve[0].setting.all_values), KNOBS[0])
    best: dict[Any, Score] = {}
    for score in found.curve:
        value = score.setting.all_values.get(knob, 0)
        if value not in best or score.tokens_per_second > best[value].tokens_per_second:
            best[value] = score
    return knob, sorted(best.items(), key=lambda item: float(item[0]))


def _near(found: Calibration) -> Table:
    near, fastest = found.choice.near, found.choice.fastest
    hidden = len(near) - SHOWN_NEAR
    more = f"; {hidden} more {'is' if hidden == 1 else 'are'} within the noise" if hidden > 0 else ""
    columns: Columns[Score] = {
        "policy": lambda one: one.setting.label,
        "tokens/s": lambda one: one.tokens_per_second,
    }
    return Table.of(
        "Within the noise of the fastest",
        columns,
        near[:SHOWN_NEAR],
        note=f"Fastest: {fastest.setting.label}, {fastest.tokens_per_second:.1f} tokens/s{more}.",
    )


def _costs(costs: CostTable, found: Calibration) -> list[Table]:
    implied = _implied_threshold(costs, found)
    theorem = "" if implied is None else f" Implied threshold of specdec++ (Theorem 4.3, D = 0): {implied:.3f}."
    tables = []
    for level, own in enumerate(costs.levels):
        verifier = "target" if level == 0 else "verifying draft"
        wide = len(own.lengths) - 1
        some = sorted({0, min(4, wide), min(8, wide), wide})
        rows = tuple(
            (
                f"{context:.0f}",
                f"{own.at(context)[0]:.3f}",
                *(f"{own.verify_ms[row, column]:.3f}" for column in some),
            )
            for row, context in enumerate(own.contexts)
        )
        reading = ", ".join(f"{key} {ms:.3f}" for key, ms in own.signal_ms.items())
        if own.head_ms:
            reading += f" (by head: {min(own.head_ms.values()):.3f} to {max(own.head_ms.values()):.3f})"
        tables.append(
            Table(
                "Measured costs in milliseconds" + f", {level} level{'s' * (level > 1)} further down" * (level > 0),
                ("context", "draft step", *(f"{verifier}, {own.lengths[column] + 1:.0f} tokens" for column in some)),
                rows,
                labels=0,
                note=f"Reading signals adds, per drafted token: {reading or 'nothing'}. "
                f"Overhead of a round: {own.overhead_ms:.3f}.{theorem * (level == 0)}",
            )
        )
    return tables


def _implied_threshold(costs: CostTable, found: Calibration) -> float | None:
    """SpecDec++'s threshold from Theorem 4.3 and the costs at the middle context; None if specdec++ was not ranked."""
    alone = (one.score.setting for one in found.ranking if one.score.setting.below is None)
    if (tried := next((one for one in alone if one.policy == "specdec++"), None)) is None:
        return None
    costs = costs.of_predictor(tried.head)
    draft, target = costs.at(costs.contexts[len(costs.contexts) // 2])
    return round(implied_threshold(draft + costs.signal_ms[signal_key(tried.signals)], target), 4)


def _plain(entry: Ranked, found: Calibration) -> dict[str, Any]:
    score = entry.score
    return {
        "policy": score.setting.table,
        "tokens_per_second": _round(score),
        "speedup": plain_interval(entry.speedup),
        "acceptance_rate": None if score.acceptance_rate is None else round(score.acceptance_rate, 4),
        "mean_acceptance_length": round(score.mean_acceptance_length, 4),
        "verification_rate": round(score.verification_rate, 4),
        "discard_rate": round(score.discard_rate, 4),
        "of_oracle": round(score.tokens_per_second / found.oracle.score.tokens_per_second, 4),
    }


def _round(score: Score) -> float:
    return round(score.tokens_per_second, 2)


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
