"""An analysis as tables."""

from collections.abc import Sequence

from specctl.analysis.numbers import ROUNDING, Analysis, Bound, Theory
from specctl.analysis.readings import RISING
from specctl.reporting.table import UNKNOWN, Table, show_interval
from specctl.statistics.association import Bin

SIGNAL_NAMES = {
    "entropy": "draft entropy",
    "top_prob": "top probability",
    "token_prob": "drafted token's probability",
    "accept_prob": "predicted acceptance",
}


def analysis_tables(analysis: Analysis, *, greedy: bool | None = None) -> list[Table]:
    """All tables that the analysis can fill, in reading order.

    Args:
        analysis: the numbers.
        greedy: how the tokens were chosen; None for traces, which do not tell.
    """
    theory = analysis.theory
    found = [_predictors(analysis)]
    if analysis.verdicts:
        found.append(_verdicts(analysis))
        found.append(_by_entropy(analysis, sampled=greedy is False))
    if theory is not None:
        found += [_means(theory, bool(greedy)), _bounds(theory)]
        if theory.ratio is not None:
            found.append(_ratio(theory))
    return found


def distributions(greedy: bool) -> str:
    """Which distributions the acceptance probability belongs to."""
    if greedy:
        return (
            "Greedy output. Acceptance probability and KL are of the softmaxes at temperature 1, as in the papers; "
            "agreement is what greedy verification accepts."
        )
    return "Sampled output. Acceptance probability and KL are of the distributions that tokens are drawn from."


def _predictors(analysis: Analysis) -> Table:
    rows = tuple(
        (SIGNAL_NAMES[name], "falls" if RISING[name] < 0 else "rises", str(found.tokens), _number(found.auroc, 3))
        for name, found in analysis.predictors.items()
    )
    share = show_interval(analysis.acceptance)
    seen = " Only what the traced policy drafted is seen." if analysis.theory is None else ""
    if "accept_prob" in analysis.predictors:
        seen += (
            " A head judges a token that was fed to the draft: not the last of a round."
            if analysis.theory is None
            else " A head judges a token drawn from the draft at each place, by what becomes of that token."
        )
    return Table(
        "How well each signal tells accepted from rejected",
        ("signal", "acceptance", "tokens", "AUROC"),
        rows,
        labels=2,
        note=f"{analysis.tokens} judged tokens of {analysis.prompts} prompts, {share} of them accepted "
        "(95% interval by bootstrap over prompts). AUROC 1 tells all apart, 0.5 none." + seen,
    )


def _verdicts(analysis: Analysis) -> Table:
    rows = tuple(
        (name, f"{group.count:.0f}", f"{group.mean:.3f}", f"{group.sd:.3f}", *(f"{q:.3f}" for q in group.quartiles))
        for name, group in analysis.verdicts.items()
    )
    return Table(
        "Draft entropy by verdict (nats)",
        ("verdict", "tokens", "mean", "sd", "25%", "median", "75%"),
        rows,
        note="Discarded tokens follow a rejected one and were never judged."
        if "discarded" in analysis.verdicts
        else "",
    )


def _by_entropy(analysis: Analysis, sampled: bool) -> Table:
    columns = ["draft entropy (nats)", "tokens", "mean run of accepted"]
    rows: list[tuple[str, ...]] = [
        (f"{one.low:.3f} to {one.high:.3f}", str(one.count), f"{one.value:.2f}") for one in analysis.runs
    ]
    series: dict[str, Sequence[Bin]] = {}
    if not sampled:
        series["accepted"] = analysis.predictors["entropy"].bins
    if analysis.theory is not None:
        series["acceptance probability"] = analysis.theory.bins
    for name, bins in series.items():
        columns.append(name)
        rows = [
            (*row, f"{one.value:.3f} [{one.lower:.3f}, {one.upper:.3f}]") for row, one in zip(rows, bins, strict=True)
        ]
    end = "round" if analysis.theory is None else "output"
    correlations = [f"run of accepted tokens {_number(analysis.run_spearman, 3)}"]
    if analysis.theory is not None:
        correlations.append(f"acceptance probability {_number(analysis.theory.spearman, 3)}")
    return Table(
        "Acceptance by draft entropy",
        tuple(columns),
        tuple(rows),
        note="In brackets the Wilson 95% interval of a frequency, which takes tokens for independent, or the quartiles "
        f"of a probability. A run ends with its {end} at the latest. "
        f"Spearman correlation of draft entropy with {', with '.join(correlations)}.",
    )


def _means(theory: Theory, greedy: bool) -> Table:
    rows = tuple(
        (
            means.category,
            str(means.prompts),
            str(means.tokens),
            f"{means.entropy:.3f}",
            f"{means.cross_entropy:.3f}",
            "infinite" if means.divergence is None else f"{means.divergence:.3f}",
            f"{means.acceptance:.3f}",
            f"{means.agreement:.1%}",
        )
        for means in theory.means
    )
    columns = (
        "category",
        "prompts",
        "tokens",
        "H_q",
        "H_{q,p}",
        "KL(q||p)",
        "acceptance probability",
        "argmax agreement",
    )
    return Table("Draft against target (means, nats)", columns, rows, note=distributions(greedy))


def _bounds(theory: Theory) -> Table:
    rows = tuple(_bound(bound) for bound in theory.bounds)
    columns = ("bound or estimate", "mean", "mean gap", "mean |gap|", "vacuous", "above the truth")
    broken = any(bound.violated for bound in theory.bounds if not bound.name.startswith("estimate"))
    unlike = ""
    if theory.infinite_divergence:
        unlike = (
            f" KL is infinite for {theory.infinite_divergence:.1%} of the tokens: the draft's filter lets through what "
            "the target's does not."
        )
    return Table(
        "Bounds on the acceptance probability",
        columns,
        rows,
        note="Gap is the acceptance probability minus the bound, which counts as 0 where it is vacuous, that is 0 or "
        f"less. Above the truth by more than {ROUNDING:g} must not happen to a bound and may to an estimate."
        + unlike
        + (" A BOUND WAS BROKEN: these are not the distributions they claim to be." if broken else ""),
        alarm=broken,
    )


def _bound(bound: Bound) -> tuple[str, ...]:
    numbers = (f"{value:.3f}" for value in (bound.mean, bound.gap, bound.absolute_gap))
    return (bound.name, *numbers, f"{bound.vacuous:.1%}", f"{bound.violated:.1%}")


def _ratio(theory: Theory) -> Table:
    ratio = theory.ratio
    assert ratio is not None
    shown = {"10%": 0, "30%": 2, "median": 4, "70%": 6, "90%": 8}
    left_out = f" {ratio.left_out} tokens with next to no entropy are left out." if ratio.left_out else ""
    return Table(
        "H_{q,p} / H_q",
        tuple(shown),
        (tuple(f"{ratio.deciles[place]:.3f}" for place in shown.values()),),
        labels=0,
        note=f"By its median the constant c of the estimate would be (median - 1) / 2 = {ratio.implied_c:.3g}; least "
        f"squares give {theory.fitted_c:.3g}.{left_out}",
    )


def _number(value: float | None, decimals: int) -> str:
    return UNKNOWN if value is None else f"{value:.{decimals}f}"
