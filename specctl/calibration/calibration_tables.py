"""Shows the outcome of a calibration: as a sentence, as tables, and as plain values."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specctl.calibration.live_check import Measured
from specctl.calibration.scores import Score
from specctl.calibration.search import Calibration, Ranked
from specctl.calibration.size_tables import by_size, size_document
from specctl.calibration.speedup_cells import plain_interval, speedup_cells
from specctl.policies.rules.specdec import implied_threshold
from specctl.replay.costs import CostTable, signal_key
from specctl.reporting.table import BLOCK, DEFINITIONS, DOWN, UNKNOWN, UP, Table, number, percent

if TYPE_CHECKING:
    from specctl.calibration.decision import Decision

SHOWN_NEAR = 5
_SHOWN_VALUES = 16
_BAR = 30
KNOBS = ("threshold", "draft_length", "max_draft")
"""The main setting of a policy is the first of these that it has."""


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
    """What a reader of a report has to know first; on a terminal these are warnings."""
    told = " ".join(f"{line[0].upper()}{line[1:]}." for line in found.warnings)
    return [Table("Before you trust these numbers", (), (), note=told)] if told else []


def as_document(decision: "Decision") -> dict[str, Any]:
    """The numbers of the tables as plain values, with more decimals."""
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


_VERIFIED = {None: "", "token": ", draft tokens verified one by one", "block": ", drafts verified as blocks"}


def bounds_passed(found: Calibration) -> list[str]:
    """For each bound that a policy passes a sentence that says so."""
    said = []
    for bound in (found.signal_bound, found.oracle):
        if bound is not None and (passing := _passing(bound, found)) is not None:
            what = bound.score.setting.policy
            why = "its costs are noisy" if bound is found.oracle else "it is fitted to these prompts, and bounds only"
            why += "" if bound is found.oracle else " rules that read entropy and top probability"
            said.append(f"The {what} bounds nothing here, for {passing.score.setting.label} is above it: {why}")
    return said


def _passing(bound: Ranked, found: Calibration) -> Ranked | None:
    """The fastest policy where it is above a bound by more than rounding."""
    fastest = found.ranking[0]
    above = fastest.score.tokens_per_second > bound.score.tokens_per_second * 1.005
    return fastest if above else None


def _ranking(decision: "Decision") -> Table:
    found = decision.found
    bounds = [found.oracle] if found.signal_bound is None else [found.signal_bound, found.oracle]
    rows = tuple(_row(entry, found) for entry in [*found.ranking, *bounds])
    told = "".join(f" {line}." for line in bounds_passed(found))
    where = "prompts that did not choose the settings" if found.held_out else "the prompts that chose the settings"
    return Table(
        "Policies at their best settings",
        (
            "policy",
            f"tokens/s{UP}",
            f"speedup{UP}",
            "95% interval",
            f"acceptance rate{UP}",
            f"mean acceptance length{UP}",
            f"verification rate{DOWN}",
            f"discard rate{DOWN}",
            f"of oracle{UP}",
        ),
        rows,
        note=f"{DEFINITIONS} {decision.prompts_told}. Predicted on {len(found.reported_on)} {where}; "
        f"{found.candidates} settings were replayed on {len(found.chosen_on)}{_VERIFIED[found.verification]}. "
        f"The chosen setting (*) was within the noise of the fastest in {found.choice.share:.0%} of resamples.{told}",
    )


def _row(entry: Ranked, found: Calibration) -> tuple[str, ...]:
    score = entry.score
    chosen = score.setting == found.winner.score.setting
    return (
        score.setting.label + (" *" if chosen else "") + _no_bound(entry, found),
        f"{score.tokens_per_second:.1f}",
        *speedup_cells(entry.speedup),
        percent(score.acceptance_rate),
        f"{score.mean_acceptance_length:.2f}",
        f"{score.verification_rate:.3f}",
        f"{score.discard_rate:.3f}",
        f"{score.tokens_per_second / found.oracle.score.tokens_per_second:.0%}",
    )


def _no_bound(entry: Ranked, found: Calibration) -> str:
    bound = entry is found.oracle or entry is found.signal_bound
    return " (no bound here)" if bound and _passing(entry, found) is not None else ""


def _verified(measured: Sequence[Measured]) -> Table:
    rows = tuple(
        (
            one.setting.label + (f", {one.rows} texts" if one.rows > 1 else ""),
            number(one.predicted, 1),
            f"{one.measured:.1f}",
            UNKNOWN if one.predicted is None else f"{one.measured / one.predicted - 1:+.1%}",
            *speedup_cells(one.speedup),
        )
        for one in measured
    )
    return Table(
        "Predicted against measured",
        (
            "policy",
            f"predicted tokens/s{UP}",
            f"measured tokens/s{UP}",
            "off by",
            f"measured speedup{UP}",
            "95% interval",
        ),
        rows,
    )


def _curve(found: Calibration) -> Table:
    """For values of the policy's main setting, the fastest candidate; only as many values as fit a screen."""
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
    near = found.choice.near
    rows = tuple((score.setting.label, f"{score.tokens_per_second:.1f}") for score in near[:SHOWN_NEAR])
    hidden = len(near) - SHOWN_NEAR
    more = f"; {hidden} more {'is' if hidden == 1 else 'are'} within the noise" if hidden > 0 else ""
    return Table(
        "Within the noise of the fastest",
        ("policy", f"tokens/s{UP}"),
        rows,
        note=f"Fastest: {found.choice.fastest.setting.label}, {found.choice.fastest.tokens_per_second:.1f} "
        f"tokens/s{more}.",
    )


def _costs(costs: CostTable, found: Calibration) -> list[Table]:
    """A table of costs for each level."""
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
    """SpecDec++'s threshold by Theorem 4.3, from the costs at the middle context; None if specdec++ was not ranked."""
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
