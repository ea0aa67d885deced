"""A calibration's outcome in a sentence, as tables, and as plain values."""

from collections.abc import Sequence
from typing import Any

from specctl.calibration.live_check import Measured
from specctl.calibration.search import NONE, Calibration, Ranked, Score
from specctl.policies.specdec import implied_threshold
from specctl.replay.costs import CostTable, signal_key
from specctl.reporting.table import UNKNOWN, Table
from specctl.statistics.intervals import Interval

SHOWN_NEAR = 5
_SHOWN_VALUES = 16
_BAR = 30
_ABOUT_BOUND = (
    "where the target disagrees. Signal bound: the best stopping rule on entropy and top probability, fitted to these "
    "very prompts."
)
_ABOUT_HIERARCHIES = (
    "where each model disagrees with the one above. Policies stand from the target's own draft down; one alone means "
    "that draft without those below."
)
KNOBS = ("threshold", "draft_length", "max_draft")
"""What a policy's curve is drawn over: the first of these that it has."""


def verdict(found: Calibration) -> str:
    """What to do, in one line."""
    winner, constant = found.winner, found.ranked("constant")
    if winner.score.candidate == NONE:
        best = next((entry for entry in found.ranking if entry.score.candidate != NONE), None)
        rest = f"; the best other setting, {best.score.candidate.label}, gives {_times(best.speedup)}" if best else ""
        return f"use none: target-only decoding is the right choice here{rest}"
    parts = [f"use {winner.score.candidate.label}: {_times(winner.speedup)}"]
    if constant is not None and constant is not winner:
        parts.append(f"best constant {constant.speedup.value:.2f}x ({constant.score.candidate.label})")
    parts.append(f"oracle {found.oracle.speedup.value:.2f}x")
    return "; ".join(parts)


def calibration_tables(found: Calibration, costs: CostTable, measured: Sequence[Measured]) -> list[Table]:
    """Ranking, what was measured, the curve, the settings within the noise, and the costs, in reading order."""
    return [
        _ranking(found),
        *([_verified(measured)] if measured else []),
        *([_curve(found)] if len(found.curve) > 2 else []),
        *([_near(found)] if found.choice.near else []),
        *_costs(costs, found),
    ]


def as_document(found: Calibration, costs: CostTable, measured: Sequence[Measured]) -> dict[str, Any]:
    """Everything the tables say, unrounded but for noise."""
    return {
        "verdict": verdict(found),
        "chosen": found.winner.score.candidate.table,
        "fastest": found.choice.fastest.candidate.table,
        "share_of_resamples": round(found.choice.share, 4),
        "candidates": found.candidates,
        "held_out": found.held_out,
        "chosen_on": found.chosen_on,
        "reported_on": found.reported_on,
        "ranking": [_plain(entry, found) for entry in found.ranking],
        "oracle": _plain(found.oracle, found),
        "signal_bound": None if found.signal_bound is None else _plain(found.signal_bound, found),
        "runner_ups": [{"policy": s.candidate.table, "tokens_per_second": _round(s)} for s in found.choice.near],
        "curve": [{"policy": s.candidate.table, "tokens_per_second": _round(s)} for s in found.curve],
        "measured": [
            {
                "policy": one.candidate.table,
                "predicted_tokens_per_second": None if one.predicted is None else round(one.predicted, 2),
                "measured_tokens_per_second": round(one.measured, 2),
                "measured_speedup": _interval(one.speedup),
            }
            for one in measured
        ],
        "costs": costs.as_record(),
        "implied_threshold": _implied_threshold(costs, found),
        "warnings": found.warnings,
    }


def _ranking(found: Calibration) -> Table:
    bounds = [found.oracle] if found.signal_bound is None else [found.signal_bound, found.oracle]
    rows = tuple(_row(entry, found) for entry in [*found.ranking, *bounds])
    where = "prompts that did not choose them" if found.held_out else "the prompts that chose them"
    return Table(
        "Policies at their best settings",
        (
            "policy",
            "tokens/s",
            "speedup",
            "95% interval",
            "acceptance rate",
            "mean acceptance length",
            "verification rate",
            "discard rate",
            "of oracle",
        ),
        rows,
        note=f"Predicted by replay and measured costs, the prompt's time left out, on {len(found.reported_on)} {where} "
        f"({found.candidates} settings replayed on {len(found.chosen_on)}). The chosen one is marked *; it was within "
        f"the noise of the fastest in {found.choice.share:.0%} of resamples. Oracle: Theorem 4.1's policy, which knows "
        + (_ABOUT_HIERARCHIES if found.signal_bound is None else _ABOUT_BOUND),
    )


def _row(entry: Ranked, found: Calibration) -> tuple[str, ...]:
    score = entry.score
    chosen = score.candidate == found.winner.score.candidate
    rate = score.acceptance_rate
    return (
        score.candidate.label + (" *" if chosen else ""),
        f"{score.tokens_per_second:.1f}",
        f"{entry.speedup.value:.2f}",
        UNKNOWN if entry.speedup.low is None else f"{entry.speedup.low:.2f} to {entry.speedup.high:.2f}",
        UNKNOWN if rate is None else f"{rate:.1%}",
        f"{score.mean_acceptance_length:.2f}",
        f"{score.verification_rate:.3f}",
        f"{score.discard_rate:.3f}",
        f"{score.tokens_per_second / found.oracle.score.tokens_per_second:.0%}",
    )


def _verified(measured: Sequence[Measured]) -> Table:
    rows = tuple(
        (
            one.candidate.label,
            UNKNOWN if one.predicted is None else f"{one.predicted:.1f}",
            f"{one.measured:.1f}",
            UNKNOWN if one.predicted is None else f"{one.measured / one.predicted - 1:+.1%}",
            UNKNOWN if one.speedup is None else f"{one.speedup.value:.2f}",
            UNKNOWN
            if one.speedup is None or one.speedup.low is None
            else f"{one.speedup.low:.2f} to {one.speedup.high:.2f}",
        )
        for one in measured
    )
    return Table(
        "Predicted against measured",
        ("policy", "predicted tokens/s", "measured tokens/s", "off by", "measured speedup", "95% interval"),
        rows,
        note="Run live and interleaved on those prompts. Tokens/s leave the prompt's time out, the speedup counts it.",
    )


def _curve(found: Calibration) -> Table:
    """The best of each value of the policy's main knob, thinned to what a screen holds."""
    knob, best = curve(found)
    fastest = max(score.tokens_per_second for _, score in best)
    every = -(-len(best) // _SHOWN_VALUES)
    shown = [point for place, point in enumerate(best) if place % every == 0 or point[1].tokens_per_second == fastest]
    rows = tuple(
        (
            f"{value:g}" if isinstance(value, float) else str(value),
            "█" * max(1, round(_BAR * score.tokens_per_second / fastest)),
            f"{score.tokens_per_second:.1f}",
        )
        for value, score in shown
    )
    return Table(
        f"{found.curve[0].candidate.title}: tokens/s by {knob}",
        (knob, "", "tokens/s"),
        rows,
        labels=2,
        note=f"The fastest setting with each {knob}, predicted on the prompts that chose.",
    )


def curve(found: Calibration) -> tuple[str, list[tuple[Any, Score]]]:
    """The main knob of the chosen policy, and for each of its values, ascending, the fastest candidate."""
    policies = [score.candidate.build() for score in found.curve]
    knob = next((name for name in KNOBS if hasattr(policies[0], name)), KNOBS[0])
    best: dict[Any, Score] = {}
    for policy, score in zip(policies, found.curve, strict=True):
        value = getattr(policy, knob, 0)
        if value not in best or score.tokens_per_second > best[value].tokens_per_second:
            best[value] = score
    return knob, sorted(best.items(), key=lambda item: float(item[0]))


def _near(found: Calibration) -> Table:
    near = found.choice.near
    rows = tuple((score.candidate.label, f"{score.tokens_per_second:.1f}") for score in near[:SHOWN_NEAR])
    more = f" and {len(near) - SHOWN_NEAR} more" if len(near) > SHOWN_NEAR else ""
    return Table(
        "Within the noise of the fastest",
        ("policy", "tokens/s"),
        rows,
        note=f"Within one standard error on the prompts that chose{more}; the simplest of all of them was taken. "
        f"Fastest: {found.choice.fastest.candidate.label}, {found.choice.fastest.tokens_per_second:.1f} tokens/s.",
    )


def _costs(costs: CostTable, found: Calibration) -> list[Table]:
    """A table for each level."""
    implied = _implied_threshold(costs, found)
    theorem = "" if implied is None else f" By Theorem 4.3 with D = 0 they imply specdec++'s threshold {implied:.3f}."
    tables = []
    for level, own in enumerate(costs.levels):
        verifier = "target" if level == 0 else "verifying draft"
        wide = len(own.lengths) - 1
        some = sorted({0, min(4, wide), min(8, wide), wide})
        rows = tuple(
            (
                f"{context:.0f}",
                f"{own.at(context)[0]:.3f}",
                *(f"{own.verify_ms[place, column]:.3f}" for column in some),
            )
            for place, context in enumerate(own.contexts)
        )
        reading = ", ".join(f"{key} {ms:.3f}" for key, ms in own.signal_ms.items())
        if own.head_ms:
            reading += f" (one head and another {min(own.head_ms.values()):.3f} to {max(own.head_ms.values()):.3f})"
        tables.append(
            Table(
                "Measured costs in milliseconds" + f", {level} level{'s' * (level > 1)} further down" * (level > 0),
                ("context", "draft step", *(f"{verifier}, {own.lengths[column] + 1:.0f} tokens" for column in some)),
                rows,
                labels=0,
                note=f"Reading signals adds, per drafted token: {reading or 'nothing'}. "
                f"A round's overhead: {own.overhead_ms:.3f}.{theorem * (level == 0)}",
            )
        )
    return tables


def _implied_threshold(costs: CostTable, found: Calibration) -> float | None:
    """What the costs say that SpecDec++'s threshold should be, at the middle context; None where it was not tried."""
    alone = (one.score.candidate for one in found.ranking if one.score.candidate.below is None)
    if (tried := next((one for one in alone if one.name == "specdec++"), None)) is None:
        return None
    costs = costs.of_head(tried.head)
    draft, target = costs.at(costs.contexts[len(costs.contexts) // 2])
    return round(implied_threshold(draft + costs.signal_ms[signal_key(tried.signals)], target), 4)


def _plain(entry: Ranked, found: Calibration) -> dict[str, Any]:
    score = entry.score
    return {
        "policy": score.candidate.table,
        "tokens_per_second": _round(score),
        "speedup": _interval(entry.speedup),
        "acceptance_rate": None if score.acceptance_rate is None else round(score.acceptance_rate, 4),
        "mean_acceptance_length": round(score.mean_acceptance_length, 4),
        "verification_rate": round(score.verification_rate, 4),
        "discard_rate": round(score.discard_rate, 4),
        "of_oracle": round(score.tokens_per_second / found.oracle.score.tokens_per_second, 4),
    }


def _round(score: Score) -> float:
    return round(score.tokens_per_second, 2)


def _interval(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    return {name: None if value is None else round(value, 4) for name, value in interval._asdict().items()}


def _times(interval: Interval) -> str:
    if interval.low is None:
        return f"{interval.value:.2f}x"
    return f"{interval.value:.2f}x ({interval.low:.2f} to {interval.high:.2f})"
