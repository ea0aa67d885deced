"""An analysis as tables and figures. Matplotlib is imported when a figure is drawn."""

from collections.abc import Iterator, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from specctl.analysis.readings import RISING, Judged, Readings
from specctl.analysis.signal_quality import PUBLISHED_C, ROUNDING, Analysis, Bound, Means, Theory, bounds, estimate
from specctl.policies import SIGNAL_NAMES
from specctl.reporting.style import FAINT, INK, PALETTE, Picture, page, panels, style, tint
from specctl.reporting.table import DEFINITIONS, Columns, Table, number, show_interval
from specctl.statistics import Bin, Floats, quantiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def analysis_tables(analysis: Analysis, *, greedy: bool | None = None) -> list[Table]:
    """All tables that the analysis can fill, in reading order."""
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
    """A sentence that names the distributions of acceptance probability and KL."""
    if greedy:
        return (
            "Greedy output. Acceptance probability and KL are of the softmaxes at temperature 1, as in the papers; "
            "agreement is what greedy verification accepts."
        )
    return "Sampled output. Acceptance probability and KL are of the distributions that tokens are drawn from."


def _predictors(analysis: Analysis, *, traced: bool) -> Table:
    rows = (
        [SIGNAL_NAMES[name], "falls" if RISING[name] < 0 else "rises", str(found.tokens), found.auroc]
        for name, found in analysis.predictors.items()
    )
    share = show_interval(analysis.acceptance)
    source = " A trace of generate contains only what its policy drafted." if traced else ""
    return Table.filled(
        "How well each signal separates accepted from rejected tokens",
        ("signal", "acceptance", "tokens", "AUROC"),
        rows,
        labels=2,
        note=f"{DEFINITIONS} {analysis.tokens} judged tokens of {analysis.prompts} prompts, {share} of them accepted."
        + source,
    )


def _verdicts(analysis: Analysis) -> Table:
    rows = (
        [name, f"{group.count:.0f}", group.mean, group.sd, *group.quartiles]
        for name, group in analysis.verdicts.items()
    )
    names = ("verdict", "tokens", "mean", "sd", "25%", "median", "75%")
    return Table.filled("Draft entropy by verdict (nats)", names, rows)


def _by_entropy(analysis: Analysis, sampled: bool) -> Table:
    series: dict[str, Sequence[Bin]] = {}
    if not sampled:
        series["accepted"] = analysis.predictors["entropy"].bins
    if analysis.theory is not None:
        series["acceptance probability"] = analysis.theory.bins
    rows = (
        [
            f"{one.low:.3f} to {one.high:.3f}",
            str(one.count),
            one.value,
            *(f"{found.value:.3f} [{found.lower:.3f}, {found.upper:.3f}]" for found in others),
        ]
        for one, *others in zip(analysis.runs, *series.values(), strict=True)
    )
    correlations = [f"accepted tokens in a row {number(analysis.run_spearman, 3)}"]
    if analysis.theory is not None:
        correlations.append(f"acceptance probability {number(analysis.theory.spearman, 3)}")
    return Table.filled(
        "Acceptance by draft entropy",
        ("draft entropy (nats)", "tokens", "mean accepted in a row", *series),
        rows,
        note=f"Spearman correlation of draft entropy with {', with '.join(correlations)}.",
    )


def _means(theory: Theory, greedy: bool) -> Table:
    columns: Columns[Means] = {
        "category": lambda one: one.category,
        "prompts": lambda one: one.prompts,
        "tokens": lambda one: one.tokens,
        "H_q": lambda one: one.entropy,
        "H_{q,p}": lambda one: one.cross_entropy,
        "KL(q||p)": lambda one: "infinite" if one.divergence is None else one.divergence,
        "acceptance probability": lambda one: one.acceptance,
        "argmax agreement": lambda one: one.agreement,
    }
    return Table.of("Draft against target (means, nats)", columns, theory.means, note=distributions(greedy))


def _bounds(theory: Theory) -> Table:
    columns: Columns[Bound] = {
        "bound or estimate": lambda one: one.name,
        "mean": lambda one: one.mean,
        "mean gap": lambda one: one.gap,
        "mean |gap|": lambda one: one.absolute_gap,
        "vacuous": lambda one: one.vacuous,
        "above the truth": lambda one: one.violated,
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
    return Table.filled(
        "H_{q,p} / H_q",
        shown,
        [[ratio.deciles[index] for index in shown.values()]],
        labels=0,
        note=f"Constant c of the estimate: {ratio.implied_c:.3g} by the median, {theory.fitted_c:.3g} by least "
        f"squares.{left_out}",
    )


BLUE, ORANGE, GREEN, PINK = PALETTE[:4]
VERDICT_COLOURS = {"accepted": BLUE, "rejected": ORANGE, "discarded": "#777777"}
_STRIPES = 30  # Number of groups over which a sorted figure averages


def draw_analysis(analysis: Analysis, judged: Judged, readings: Readings | None) -> Iterator[Picture]:
    """Every figure that the analysis can fill.

    Raises:
        UsageError: matplotlib is not installed.
    """
    with style():
        if analysis.theory is not None:
            yield acceptance_probability(analysis, analysis.theory)
        yield acceptance_by_signal(analysis, judged)
        if analysis.verdicts:
            yield entropy_by_verdict(analysis, judged)
            yield run_by_entropy(analysis)
        if analysis.theory is not None and readings is not None:
            yield bounds_sorted(analysis.theory, readings)
            if analysis.theory.ratio is not None:
                yield ratio_histogram(analysis.theory)


def acceptance_probability(analysis: Analysis, theory: Theory) -> Picture:
    picture = page(
        "entropy-acceptance",
        "Acceptance probability by draft entropy",
        "What to see: whether entropy alone predicts acceptance, and which constant c fits this pair. Points are "
        "means over equally many tokens, the band the interquartile range; the curves are the estimate 1 - sqrt(c H). "
        f"Spearman correlation {_shown(theory.spearman)}; {_n(analysis)}.",
        3.8,
    )
    (axes,) = panels(picture, 1, 1, "draft entropy (nats)", "acceptance probability")
    _band(axes, theory.bins, BLUE)
    across = np.linspace(0, theory.bins[-1].middle * 1.05, 200)
    for c, look in ((PUBLISHED_C, "--"), (theory.fitted_c, "-")):
        kind = "fitted" if c == theory.fitted_c else "published"
        axes.plot(
            across, np.maximum(estimate(across, c), 0), look, color=ORANGE, label=f"estimate, c = {c:.3g} ({kind})"
        )
    axes.set(ylim=(0, 1.03), xlim=(0, None))
    axes.grid()
    axes.legend(frameon=False)
    return picture


def acceptance_by_signal(analysis: Analysis, judged: Judged) -> Picture:
    within = "Wilson 95% intervals" if judged.certain else "the middle half of the tokens"
    best = max(analysis.predictors, key=lambda name: analysis.predictors[name].auroc or 0)
    picture = page(
        "acceptance-by-signal",
        "How often a token is accepted, by each signal of the draft",
        f"What to see: a steep, monotone curve is a signal worth stopping by; {SIGNAL_NAMES[best]} separates accepted "
        f"and rejected tokens best. Points are equally many tokens, lines {within}. AUROC: 1 is perfect, 0.5 useless; "
        f"{_n(analysis)}.",
        2.8 * -(-len(analysis.predictors) // 3) + 0.2,
    )
    columns = 2 if len(analysis.predictors) == 4 else min(3, len(analysis.predictors))
    rows = -(-len(analysis.predictors) // columns)
    grid = picture.figure.subplots(rows, columns, squeeze=False, sharey=True).ravel().tolist()
    for left_over in grid[len(analysis.predictors) :]:
        left_over.remove()
    for axes, (name, found) in zip(grid, analysis.predictors.items(), strict=False):
        x = [one.middle for one in found.bins]
        axes.vlines(x, [one.lower for one in found.bins], [one.upper for one in found.bins], color=BLUE, linewidth=1.5)
        axes.plot(x, [one.value for one in found.bins], "o-", color=BLUE, markersize=4, linewidth=1)
        axes.set_title(f"{fill(SIGNAL_NAMES[name], 34)}:\nAUROC {_shown(found.auroc)}")
        axes.set_xlabel("nats" if name == "entropy" else "probability")
        axes.set_ylim(0, 1.03)
        axes.grid()
    for leftmost in grid[: len(analysis.predictors) : columns]:
        leftmost.set_ylabel("accepted / judged" if judged.certain else "acceptance probability")
    return picture


def entropy_by_verdict(analysis: Analysis, judged: Judged) -> Picture:
    entropy = judged.signals["entropy"]
    samples: dict[str, tuple[Floats, Floats]] = {
        "accepted": (entropy, judged.accepted),
        "rejected": (entropy, 1 - judged.accepted),
        "discarded": (judged.discarded, np.ones(len(judged.discarded))),
    }
    shown = list(analysis.verdicts)
    means = ", ".join(f"{name} {group.mean:.2f}" for name, group in analysis.verdicts.items())
    after = " Discarded tokens follow a rejected one and were never judged." if "discarded" in shown else ""
    picture = page(
        "entropy-by-verdict",
        "Draft entropy of accepted and rejected tokens",
        f"What to see: the less the distributions overlap, the better a threshold on entropy works. Dashed lines are "
        f"means ({means} nats); the last bar contains everything beyond.{after}",
        1.3 * len(shown) + 0.3,
    )
    everything = [samples[name] for name in shown]
    values, weights = (np.concatenate(parts) for parts in zip(*everything, strict=True))
    (top,) = quantiles(values, weights, (0.99,))
    edges = np.linspace(0, max(top, 1e-3), 41)
    for axes, name in zip(panels(picture, len(shown), 1, "draft entropy (nats)"), shown, strict=True):
        values, weights = samples[name]
        shares, _ = np.histogram(np.minimum(values, edges[-1]), edges, weights=weights / weights.sum())
        axes.bar(edges[:-1], 100 * shares, np.diff(edges) * 0.92, align="edge", color=VERDICT_COLOURS[name])
        axes.axvline(analysis.verdicts[name].mean, color=INK, linestyle="--", linewidth=1)
        axes.set_title(f"{name}, n = {analysis.verdicts[name].count:.0f} tokens")
        axes.grid(axis="y")
    axes.set_xlim(0, edges[-1])
    picture.figure.supylabel("% of the tokens", fontsize=9)
    return picture


def run_by_entropy(analysis: Analysis) -> Picture:
    picture = page(
        "entropy-run-length",
        "Accepted tokens in a row, by draft entropy of the first",
        "What to see: a falling curve means that entropy predicts how far a draft can run. Points are means over "
        "equally many tokens, the band is their middle half; a run ends with its "
        f"{'round' if analysis.theory is None else 'output'} at the latest. "
        f"Spearman correlation {_shown(analysis.run_spearman)}; {_n(analysis)}.",
        3.6,
    )
    (axes,) = panels(picture, 1, 1, "draft entropy (nats)", "accepted tokens in a row")
    _band(axes, analysis.runs, GREEN)
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.grid()
    axes.legend(frameon=False)
    return picture


def bounds_sorted(theory: Theory, readings: Readings) -> Picture:
    reading = readings.all
    order = np.argsort(reading.acceptance, kind="stable")
    truth = reading.acceptance[order]
    across = 100 * (np.arange(len(order)) + 0.5) / len(order)
    tightest = min(theory.bounds[:2], key=lambda bound: bound.gap)
    verdict = f"{tightest.name} is the tighter of the two bounds, with a mean gap of {tightest.gap:.3f}"
    if tightest.vacuous == 1:
        verdict = "here both are at most 0 for every token"
    picture = page(
        "bounds",
        "Acceptance probability against its bounds and estimates, tokens sorted by acceptance probability",
        "What to see: a bound (one dot per token) must stay under the black curve, and the nearer the better; "
        f"{verdict}. An estimate may "
        "cross it. The coloured line is the mean of neighbouring tokens. Negative values are "
        f"drawn at 0; n = {len(truth)} tokens.",
        5.4,
    )
    grid = panels(picture, 4, 2, "tokens, % of all", "probability")
    drawn = bounds(reading, theory.fitted_c)
    colours = (BLUE, GREEN, ORANGE, PINK)
    for axes, facts, values, colour in zip(grid, theory.bounds, drawn.values(), colours, strict=True):
        shown = np.maximum(values[order], 0)
        faint = max(0.1, min(0.7, 600 / len(order)))
        axes.plot(across, shown, "o", color=colour, markersize=3, markeredgewidth=0, alpha=faint, rasterized=True)
        stripes = np.array_split(np.arange(len(order)), min(_STRIPES, len(order)))
        middles, means = zip(*((across[part].mean(), shown[part].mean()) for part in stripes), strict=True)
        axes.plot(middles, means, color=colour, linewidth=1.8)
        axes.plot(across, truth, color=INK, linewidth=1.5)
        axes.set_title(f"{facts.name}: mean |gap| {facts.absolute_gap:.3f}, vacuous {facts.vacuous:.0%}")
        axes.set(xlim=(0, 100), ylim=(-0.02, 1.03))
        axes.grid()
    return picture


def ratio_histogram(theory: Theory) -> Picture:
    ratio = theory.ratio
    assert ratio is not None
    median = ratio.deciles[4]
    left_out = f" {ratio.left_out} tokens with almost no entropy are left out." if ratio.left_out else ""
    picture = page(
        "entropy-ratio",
        "Cross-entropy over draft entropy",
        "What to see: SVIP takes this ratio to be constant, so that entropy alone bounds acceptance; the narrower "
        f"the histogram, the better this holds. Dashed: the median {median:.2f}, from which c = {ratio.implied_c:.3g}; "
        f"the last bar holds everything beyond.{left_out}",
        3.2,
    )
    (axes,) = panels(picture, 1, 1, "H(q, p) / H(q)", "% of the tokens")
    edges = np.array(ratio.edges)
    axes.bar(edges[:-1], 100 * np.array(ratio.shares), np.diff(edges) * 0.92, align="edge", color=BLUE)
    axes.axvline(median, color=INK, linestyle="--", linewidth=1)
    axes.set_xlim(left=1)
    axes.grid(axis="y")
    return picture


def _band(axes: "Axes", bins: Sequence[Bin], colour: str) -> None:
    x = [one.middle for one in bins]
    lower, upper = [one.lower for one in bins], [one.upper for one in bins]
    if len(bins) > 1:
        axes.fill_between(x, lower, upper, color=tint(colour, 0.75), linewidth=0, label="middle half")
    else:
        axes.vlines(x, lower, upper, color=FAINT, label="middle half")
    axes.plot(x, [one.value for one in bins], "o-", color=colour, markersize=5, linewidth=1.2, label="mean")


def _n(analysis: Analysis) -> str:
    return f"n = {analysis.tokens} tokens of {analysis.prompts} prompts"


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
