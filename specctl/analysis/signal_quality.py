"""How well the draft's signals predict acceptance, and how tight the bounds on it are. No torch here."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specctl.analysis.readings import RISING, Ints, Judged, Reading, Readings
from specctl.statistics import Bin, Floats, Interval, auroc, binned, bootstrap, quantiles, spearman

PUBLISHED_C = 0.15  # The constant of SVIP's published code (arXiv 2411.18462)


def pinsker(divergence: Floats) -> Floats:
    """1 - sqrt(KL/2), a lower bound of sum(min(p, q)) (SVIP eq. 4)."""
    return 1 - np.sqrt(divergence / 2)


def bretagnolle_huber(divergence: Floats) -> Floats:
    """1 - sqrt(1 - exp(-KL)), a lower bound of sum(min(p, q)) (SVIP App. B)."""
    return 1 - np.sqrt(-np.expm1(-divergence))


def estimate(entropy: Floats, c: float) -> Floats:
    """1 - sqrt(c H_q) (SVIP eq. 6)."""
    return 1 - np.sqrt(c * entropy)


def fit_c(entropy: Floats, acceptance: Floats) -> float:
    """The c for which `estimate` fits the acceptance probabilities best, by least squares."""
    total = float(entropy.sum())
    slope = float(((1 - acceptance) * np.sqrt(entropy)).sum()) / total if total else 0.0
    return slope**2


def bounds(reading: Reading, fitted_c: float) -> dict[str, Floats]:
    """Every bound and estimate of the acceptance probability, by name; they may be negative."""
    return {
        "Pinsker": pinsker(reading.divergence),
        "Bretagnolle-Huber": bretagnolle_huber(reading.divergence),
        f"estimate, c = {PUBLISHED_C}": estimate(reading.entropy, PUBLISHED_C),
        f"estimate, c = {fitted_c:.3g} (fitted)": estimate(reading.entropy, fitted_c),
    }


ROUNDING = 1e-5  # How far float32 rounding may lift a bound above the true value
_LEAST_ENTROPY = 1e-4  # Nats of H_q below which H_{q,p}/H_q is a quotient of rounding errors


@dataclass(frozen=True, slots=True)
class Group:
    """Weighted statistics of a signal; ``count`` is the sum of the weights."""

    count: float
    mean: float
    sd: float
    quartiles: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Predictor:
    """How well one signal separates accepted from rejected tokens."""

    auroc: float | None  # None where no token was accepted or none was rejected
    bins: list[Bin]  # acceptance by the signal
    tokens: int  # number of tokens with the signal


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound on the acceptance probability, or an estimate of it; negative values count as 0."""

    name: str  # name in tables and figures
    mean: float  # of the bound
    # gap, absolute_gap: mean of acceptance probability minus bound, and of its absolute value
    gap: float
    absolute_gap: float
    vacuous: float  # share of tokens where it is 0 or less
    violated: float  # share of tokens where it exceeds the acceptance probability by more than rounding


@dataclass(frozen=True, slots=True)
class Ratio:
    """The distribution of H_{q,p}/H_q over tokens."""

    deciles: list[float]  # the nine deciles
    implied_c: float  # (median - 1) / 2
    left_out: int  # tokens with almost no entropy to divide by
    # edges, shares: a histogram; the last bin contains the long tail
    edges: list[float]
    shares: list[float]


@dataclass(frozen=True, slots=True)
class Means:
    """Means over the tokens of one category, or of all; ``divergence`` is None where it is infinite."""

    category: str
    prompts: int
    tokens: int
    entropy: float
    cross_entropy: float
    divergence: float | None
    acceptance: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Theory:
    """Statistics that need both distributions at each token."""

    means: list[Means]
    bins: list[Bin]  # acceptance probability by draft entropy
    spearman: float | None  # rank correlation of draft entropy and acceptance probability
    fitted_c: float  # constant c of the estimate 1 - sqrt(c H_q), by least squares
    infinite_divergence: float  # share of tokens with an infinite KL, which filters make
    bounds: list[Bound]
    ratio: Ratio | None  # None where no token has entropy to divide by


@dataclass(frozen=True, slots=True)
class Analysis:
    """Every number of an analysis."""

    prompts: int
    tokens: int
    acceptance: Interval  # share of judged tokens accepted, with a 95% bootstrap interval over prompts
    # draft entropy of tokens ``accepted``, ``rejected`` and ``discarded``, those that occurred
    verdicts: dict[str, Group]
    predictors: dict[str, Predictor]
    runs: list[Bin]  # tokens accepted in a row by draft entropy of the first
    run_spearman: float | None  # rank correlation of draft entropy and tokens accepted in a row
    theory: Theory | None = None  # None for traces


def analyse(judged: Judged, readings: Readings | None = None) -> Analysis:
    """Compute every number; there must be at least one judged token."""
    entropy = judged.signals.get("entropy")
    return Analysis(
        prompts=len(np.unique(judged.prompt)),
        tokens=len(judged.accepted),
        acceptance=_mean_over_prompts(judged.accepted, judged.prompt),
        verdicts={} if entropy is None else _verdicts(entropy, judged),
        predictors={name: _predictor(name, values, judged) for name, values in judged.signals.items()},
        runs=[] if entropy is None else binned(entropy, judged.run),
        run_spearman=None if entropy is None else spearman(entropy, judged.run),
        theory=None if readings is None else _theory(readings),
    )


def ratios(reading: Reading) -> Floats:
    """H_{q,p}/H_q of each token whose entropy is not almost 0."""
    some = reading.entropy > _LEAST_ENTROPY
    return reading.cross_entropy[some] / reading.entropy[some]


def _mean_over_prompts(values: Floats, prompt: Ints) -> Interval:
    _, position = np.unique(prompt, return_inverse=True)
    sums, counts = np.bincount(position, values), np.bincount(position)

    def mean(weights: Floats) -> Floats:
        found: Floats = (weights @ sums) / (weights @ counts)
        return found

    return bootstrap(mean, len(counts))


def _verdicts(entropy: Floats, judged: Judged) -> dict[str, Group]:
    parts = {
        "accepted": (entropy, judged.accepted),
        "rejected": (entropy, 1 - judged.accepted),
        "discarded": (judged.discarded, np.ones(len(judged.discarded))),
    }
    return {name: _group(values, weights) for name, (values, weights) in parts.items() if weights.sum() > 0}


def _group(values: Floats, weights: Floats) -> Group:
    mean = float(np.average(values, weights=weights))
    sd = float(np.sqrt(np.average((values - mean) ** 2, weights=weights)))
    first, median, third = quantiles(values, weights, (0.25, 0.5, 0.75))
    return Group(float(weights.sum()), mean, sd, (first, median, third))


def _predictor(name: str, values: Floats, judged: Judged) -> Predictor:
    has = np.isfinite(values)
    values, accepted = values[has], judged.verdicts.get(name, judged.accepted)[has]
    return Predictor(
        auroc(RISING[name] * values, accepted),
        binned(values, accepted, frequency=judged.certain) if len(values) else [],
        len(values),
    )


def _theory(readings: Readings) -> Theory:
    reading = readings.all
    fitted = fit_c(reading.entropy, reading.acceptance)
    of_prompt = np.array(readings.categories)[readings.prompt]
    names = list(dict.fromkeys(readings.categories))
    chosen: dict[str, npt.NDArray[np.bool_]] = {"all": np.ones(len(of_prompt), bool)}
    if len(names) > 1:
        chosen |= {name: of_prompt == name for name in names if name in of_prompt}
    return Theory(
        means=[_means(name, readings, tokens) for name, tokens in chosen.items()],
        bins=binned(reading.entropy, reading.acceptance),
        spearman=spearman(reading.entropy, reading.acceptance),
        fitted_c=fitted,
        infinite_divergence=float(np.isinf(reading.divergence).mean()),
        bounds=[_bound(name, values, reading.acceptance) for name, values in bounds(reading, fitted).items()],
        ratio=_ratio(reading),
    )


def _means(name: str, readings: Readings, chosen: npt.NDArray[np.bool_]) -> Means:
    reading = readings.all

    def mean(values: Floats) -> float:
        return float(values[chosen].mean())

    return Means(
        category=name,
        prompts=len(np.unique(readings.prompt[chosen])),
        tokens=int(chosen.sum()),
        entropy=mean(reading.entropy),
        cross_entropy=mean(reading.cross_entropy),
        divergence=divergence if np.isfinite(divergence := mean(reading.divergence)) else None,
        acceptance=mean(reading.acceptance),
        agreement=mean(reading.agrees),
    )


def _bound(name: str, values: Floats, acceptance: Floats) -> Bound:
    bound = np.maximum(values, 0)
    return Bound(
        name=name,
        mean=float(bound.mean()),
        gap=float((acceptance - bound).mean()),
        absolute_gap=float(np.abs(acceptance - bound).mean()),
        vacuous=float((values <= 0).mean()),
        violated=float((bound > acceptance + ROUNDING).mean()),
    )


def _ratio(reading: Reading) -> Ratio | None:
    found = ratios(reading)
    if not len(found):
        return None
    deciles = [float(value) for value in np.quantile(found, np.linspace(0.1, 0.9, 9))]
    # The long tail goes into the last bin: a wider scale would hide the shape of the rest.
    top = max(2.0, float(np.quantile(found, 0.98)))
    edges = np.linspace(1, top, 41)
    counts, _ = np.histogram(np.clip(found, 1, top), edges)
    return Ratio(
        deciles=deciles,
        implied_c=(deciles[4] - 1) / 2,
        left_out=len(reading.entropy) - len(found),
        edges=edges.tolist(),
        shares=(counts / len(found)).tolist(),
    )
