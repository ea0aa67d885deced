"""An analysis as tables."""

from collections.abc import Sequence

from specctl.analysis.readings import RISING
from specctl.analysis.signal_quality import ROUNDING, Analysis, Bound, Means, Theory
from specctl.policies import SIGNAL_NAMES
from specctl.reporting.table import DEFINITIONS, DOWN, UP, Columns, Table, number, show_interval
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
    columns: Columns[Means] = {
        "category": lambda one: one.category,
        "prompts": lambda one: str(one.prompts),
        "tokens": lambda one: str(one.tokens),
        "H_q": lambda one: f"{one.entropy:.3f}",
        "H_{q,p}": lambda one: f"{one.cross_entropy:.3f}",
        "KL(q||p)": lambda one: "infinite" if one.divergence is None else f"{one.divergence:.3f}",
        "acceptance probability": lambda one: f"{one.acceptance:.3f}",
        "argmax agreement": lambda one: f"{one.agreement:.1%}",
    }
    return Table.of("Draft against target (means, nats)", columns, theory.means, note=distributions(greedy))


def _bounds(theory: Theory) -> Table:
    columns: Columns[Bound] = {
        "bound or estimate": lambda one: one.name,
        "mean": lambda one: f"{one.mean:.3f}",
        f"mean gap{DOWN}": lambda one: f"{one.gap:.3f}",
        f"mean |gap|{DOWN}": lambda one: f"{one.absolute_gap:.3f}",
        f"vacuous{DOWN}": lambda one: f"{one.vacuous:.1%}",
        f"above the truth{DOWN}": lambda one: f"{one.violated:.1%}",
    }
    broken = any(bound.violated for bound in theory.bounds if not bound.name.startswith("estimate"))
    notes = []
    if theory.infinite_divergence:
        notes.append(
            f"KL is infinite for {theory.infinite_divergence:.1%} of the tokens: the draft's filter lets through what "
            "the target's does not."
        )
    if broken:
        notes.append(f"A BOUND WAS BROKEN by more than {ROUNDING:g}: these are not the distributions they claim to be.")
    title = "Bounds on the acceptance probability"
    return Table.of(title, columns, theory.bounds, note=" ".join(notes), alarm=broken)


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
