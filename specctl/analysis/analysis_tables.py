"""An analysis as tables."""

from collections.abc import Sequence

from specctl.analysis.readings import RISING
from specctl.analysis.signal_quality import ROUNDING, Analysis, Bound, Theory
from specctl.policies import SIGNAL_NAMES
from specctl.reporting.table import DEFINITIONS, DOWN, UP, Table, number, show_interval
from specctl.statistics.association import Bin


def analysis_tables(analysis: Analysis, *, greedy: bool | None = None) -> list[Table]:
    """All tables that the analysis can fill, in reading order.

    Args:
        analysis: the numbers.
        greedy: whether decoding was greedy; None for traces, which do not record it.
    """
    theory = analysis.theory
    found = [_predictors(analysis, traced=greedy is None)]
    if analysis.verdicts:
        found.append(_verdicts(analysis))
        found.append(_by_entropy(analysis, sampled=greedy is False and theory is not None))
    if theory is not None:
        found += [_means(theory, bool(greedy)), _bounds(theory)]
        if theory.ratio is not None:
            found.append(_ratio(theory))
    return found


def distributions(greedy: bool) -> str:
    """A sentence that names the distributions which acceptance probability and KL were computed from."""
    if greedy:
        return (
            "Greedy output. Acceptance probability and KL are of the softmaxes at temperature 1, as in the papers; "
            "agreement is what greedy verification accepts."
        )
    return "Sampled output. Acceptance probability and KL are of the distributions that tokens are drawn from."


def _predictors(analysis: Analysis, *, traced: bool) -> Table:
    rows = tuple(
        (SIGNAL_NAMES[name], "falls" if RISING[name] < 0 else "rises", str(found.tokens), number(found.auroc, 3))
        for name, found in analysis.predictors.items()
    )
    share = show_interval(analysis.acceptance)
    source = " A trace of generate contains only what its policy drafted." if traced else ""
    return Table(
        "How well each signal separates accepted from rejected tokens",
        ("signal", "acceptance", "tokens", f"AUROC{UP}"),
        rows,
        labels=2,
        note=f"{DEFINITIONS} {analysis.tokens} judged tokens of {analysis.prompts} prompts, {share} of them accepted."
        + source,
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
    )


def _by_entropy(analysis: Analysis, sampled: bool) -> Table:
    columns = ["draft entropy (nats)", "tokens", "mean accepted in a row"]
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
    correlations = [f"accepted tokens in a row {number(analysis.run_spearman, 3)}"]
    if analysis.theory is not None:
        correlations.append(f"acceptance probability {number(analysis.theory.spearman, 3)}")
    return Table(
        "Acceptance by draft entropy",
        tuple(columns),
        tuple(rows),
        note=f"Spearman correlation of draft entropy with {', with '.join(correlations)}.",
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
    columns = (
        "bound or estimate",
        "mean",
        f"mean gap{DOWN}",
        f"mean |gap|{DOWN}",
        f"vacuous{DOWN}",
        f"above the truth{DOWN}",
    )
    broken = any(bound.violated for bound in theory.bounds if not bound.name.startswith("estimate"))
    notes = []
    if theory.infinite_divergence:
        notes.append(
            f"KL is infinite for {theory.infinite_divergence:.1%} of the tokens: the draft's filter lets through what "
            "the target's does not."
        )
    if broken:
        notes.append(f"A BOUND WAS BROKEN by more than {ROUNDING:g}: these are not the distributions they claim to be.")
    return Table(
        "Bounds on the acceptance probability",
        columns,
        rows,
        note=" ".join(notes),
        alarm=broken,
    )


def _bound(bound: Bound) -> tuple[str, ...]:
    numbers = (f"{value:.3f}" for value in (bound.mean, bound.gap, bound.absolute_gap))
    return (bound.name, *numbers, f"{bound.vacuous:.1%}", f"{bound.violated:.1%}")


def _ratio(theory: Theory) -> Table:
    ratio = theory.ratio
    assert ratio is not None
    shown = {"10%": 0, "30%": 2, "median": 4, "70%": 6, "90%": 8}
    left_out = f" {ratio.left_out} tokens with almost no entropy are left out." if ratio.left_out else ""
    return Table(
        "H_{q,p} / H_q",
        tuple(shown),
        (tuple(f"{ratio.deciles[index]:.3f}" for index in shown.values()),),
        labels=0,
        note=f"Constant c of the estimate: {ratio.implied_c:.3g} by the median, {theory.fitted_c:.3g} by least "
        f"squares.{left_out}",
    )
