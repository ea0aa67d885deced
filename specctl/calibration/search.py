"""Which setting to use: every candidate replayed, priced and compared, with how sure the choice is."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specctl.calibration.ascent import Space, explore
from specctl.calibration.grids import LONGEST, SIMPLEST
from specctl.policies import NONE, Setting, Signal
from specctl.replay.bound import READS, play_best
from specctl.replay.costs import CostTable
from specctl.replay.play import Replay, oracle, players_of, replay_levels
from specctl.replay.trace_files import TraceSet
from specctl.statistics.intervals import SEED, Floats, Interval, bootstrap

RESAMPLES = 2000
MOST_RANKED = 12
"""Combinations of a hierarchy's policies shown beside the best of their kinds."""
FEW = 4
"""Prompts below which an interval over them says little."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a setting would do on some prompts; every array has one value for each of them.

    Attributes:
        ms: predicted time, the prompt's own left out.
        passes: rounds, i.e. target passes.
    """

    setting: Setting
    tokens: Floats
    ms: Floats
    passes: Floats
    drafted: Floats
    accepted: Floats

    @property
    def tokens_per_second(self) -> float:
        return float(1e3 * self.tokens.sum() / self.ms.sum())

    @property
    def acceptance_rate(self) -> float | None:
        drafted = float(self.drafted.sum())
        return float(self.accepted.sum()) / drafted if drafted else None

    @property
    def discard_rate(self) -> float:
        """Rejected drafts for each generated token."""
        return float((self.drafted.sum() - self.accepted.sum()) / self.tokens.sum())

    @property
    def verification_rate(self) -> float:
        """Target passes for each generated token."""
        return float(self.passes.sum() / self.tokens.sum())

    @property
    def mean_acceptance_length(self) -> float:
        return float(1 + self.accepted.sum() / self.passes.sum())

    def speedup(self, over: "Score") -> Interval:
        """Ratio of predicted speeds with a bootstrap interval paired by prompt."""

        def ratio(weights: Floats) -> Floats:
            found: Floats = (weights @ over.ms) / (weights @ self.ms)
            return found

        return bootstrap(ratio, len(self.ms), RESAMPLES)


def score(setting: Setting, traces: TraceSet, prompts: Sequence[str], costs: CostTable) -> Score:
    """Replay a setting on the prompts and price its rounds."""
    costs = costs.of_head(setting.head)
    signals = [level.signals for level in setting.levels]
    players = players_of(setting, costs.clocks(signals))
    replays = replay_levels(players, traces.of(prompts, setting.head), frozenset(traces.header.eos))
    return _priced(setting, replays, prompts, costs, *signals)


def score_oracle(traces: TraceSet, prompts: Sequence[str], costs: CostTable) -> Score:
    """The same for the policy that knows where the target will disagree (Theorem 4.1); it reads no signal.

    In a hierarchy its drafts know where the one above them will, and it takes as many of them as is fastest.
    """
    some = traces.of(prompts)
    scores = [
        _priced(Setting("oracle"), [oracle(trace, used) for trace in some], prompts, costs, *[()] * used)
        for used in range(1, len(costs.levels) + 1)
    ]
    return max(scores, key=lambda found: found.tokens_per_second)


def score_signal_bound(traces: TraceSet, prompts: Sequence[str], costs: CostTable) -> Score:
    """The same for the best that entropy and top probability allow, were their meaning on these prompts known."""
    longest = min(LONGEST, traces.header.depth)
    replays = play_best(traces.of(prompts), costs, frozenset(traces.header.eos), longest=longest)
    return _priced(Setting("signal bound"), replays, prompts, costs, READS)


def _priced(
    setting: Setting,
    replays: Iterable[Replay],
    prompts: Sequence[str],
    costs: CostTable,
    *signals: Iterable[Signal],
) -> Score:
    by_prompt: dict[str, list[Replay]] = {prompt: [] for prompt in prompts}
    for found in replays:
        by_prompt[found.trace.prompt].append(found)
    groups = list(by_prompt.values())
    return Score(
        setting,
        np.array([sum(one.tokens for one in group) for group in groups], dtype=np.float64),
        np.array([costs.milliseconds(group, *signals) for group in groups]),
        np.array([sum(len(one.starts) for one in group) for group in groups], dtype=np.float64),
        np.array([sum(map(sum, (one.drafted for one in group))) for group in groups], dtype=np.float64),
        np.array([sum(map(sum, (one.accepted for one in group))) for group in groups], dtype=np.float64),
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting to use among some, and how sure that is.

    Attributes:
        chosen: the simplest within one standard error of the fastest.
        fastest: by predicted tokens/s.
        share: of the bootstrap's resamples of prompts in which the chosen one is within the noise of the fastest.
        near: the others within one standard error of the fastest, the fastest first.
    """

    chosen: Score
    fastest: Score
    share: float
    near: list[Score]


def choose(scores: Sequence[Score]) -> Choice:
    """Pick by predicted tokens/s; all scores are of the same prompts in the same order."""
    speeds = np.array([found.tokens_per_second for found in scores])
    best = int(speeds.argmax())
    tokens, ms = scores[0].tokens, np.stack([found.ms for found in scores])  # (P,), (S, P)
    prompts = len(tokens)
    if prompts > 1:
        weights = np.random.default_rng(SEED).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
        resampled = 1e3 * (weights @ tokens)[:, None] / (weights @ ms.T)  # (R, S)
        errors = (resampled[:, [best]] - resampled).std(axis=0)
    else:
        resampled, errors = speeds[None], np.zeros(len(scores))
    within = [place for place in range(len(scores)) if speeds[best] - speeds[place] <= errors[place]]
    chosen = min(within, key=lambda place: (*_simplicity(scores[place].setting), -speeds[place]))
    sure = resampled[:, chosen] >= resampled.max(axis=1) - errors[chosen]
    near = sorted((place for place in within if place != chosen), key=lambda place: -speeds[place])
    return Choice(scores[chosen], scores[best], float(sure.mean()), [scores[place] for place in near])


def _simplicity(setting: Setting) -> tuple[int, int, int]:
    levels = setting.levels
    known = sum(SIMPLEST.index(one.policy) if one.policy in SIMPLEST else len(SIMPLEST) for one in levels)
    return len(levels), known, sum(len(one.values) for one in levels)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A policy's own best setting, as it does on prompts that did not choose it."""

    score: Score
    speedup: Interval


@dataclass(slots=True)
class Calibration:
    """The outcome.

    Attributes:
        choice: among all candidates, on the prompts chosen on.
        candidates: how many were replayed.
        ranking: each policy's best setting, the profile's own and none, on the prompts reported on, fastest first. Of
            many combinations in a hierarchy, those that did best on the prompts chosen on, the best without the drafts
            below and the best of each way to pre-verify among them.
        winner: the chosen one in that ranking.
        oracle: Theorem 4.1's policy on the same prompts.
        signal_bound: the best that entropy and top probability allow there; None for a hierarchy, whose levels it does
            not know.
        baseline: none on the prompts chosen on.
        families: on the prompts chosen on, all that was replayed, by policies and head.
        chosen_on, reported_on: ids; the same ones where there were too few to hold some out.
        warnings: what a reader has to know before trusting it.
    """

    choice: Choice
    candidates: int
    ranking: list[Ranked]
    winner: Ranked
    oracle: Ranked
    signal_bound: Ranked | None
    baseline: Score
    families: dict[str, list[Score]]
    chosen_on: list[str]
    reported_on: list[str]
    warnings: list[str] = field(default_factory=list)

    @property
    def held_out(self) -> bool:
        return self.chosen_on != self.reported_on

    @property
    def curve(self) -> list[Score]:
        """The candidates of the chosen policy."""
        return self.families[self.choice.chosen.setting.family]

    def ranked(self, name: str) -> Ranked | None:
        """The fastest entry of a policy that stops a draft without help."""
        return next((entry for entry in self.ranking if entry.score.setting.family == name), None)


def split(traces: TraceSet) -> tuple[list[str], list[str]]:
    """Every other prompt of each category: ids to choose on and ids to report on."""
    categories: dict[str, list[str]] = {}
    for trace in traces.traces:
        ids = categories.setdefault(trace.category, [])
        if trace.prompt not in ids:
            ids.append(trace.prompt)
    chosen: list[str] = []
    reported: list[str] = []
    for ids in categories.values():
        for prompt in ids:
            # The shorter part takes the next one, so that odd categories do not all favour the same.
            (chosen if len(chosen) <= len(reported) else reported).append(prompt)
    order = traces.prompts
    return sorted(chosen, key=order.index), sorted(reported, key=order.index)


def contestants(candidates: Iterable[Setting], old: Setting | None, rivals: Iterable[Setting] = ()) -> list[Setting]:
    """All that `search` replays in any case, each once."""
    return list(dict.fromkeys([NONE, *candidates, *([old] if old is not None else []), *rivals]))


def search(
    traces: TraceSet,
    candidates: Iterable[Setting],
    old: Setting | None,
    costs: CostTable,
    rivals: Sequence[Setting] = (),
    advance: Callable[[], None] = lambda: None,
    *,
    space: Space | None = None,
) -> Calibration:
    """Choose among the candidates on one part of the prompts and report on the other.

    Args:
        traces: of at least one prompt.
        candidates: what may be chosen, as may none.
        old: the profile's own setting; None for one that cannot be replayed.
        costs: of this machine.
        rivals: what is ranked beside them but not chosen.
        advance: called after each setting that was replayed.
        space: of a hierarchy's settings, explored from the old one on; what is found there may be chosen too.
    """
    chosen_on, reported_on = split(traces)
    warnings = []
    if not reported_on:
        reported_on = chosen_on
        warnings.append("there is one prompt only: it chose the setting and it reports on it")
    if min(len(chosen_on), len(reported_on)) < FEW:
        warnings.append(
            f"{len(chosen_on)} prompts chose and {len(reported_on)} report: too few for the intervals to be trusted"
        )
    if not any(any(trace.line.kept) for trace in traces.traces):
        warnings.append("the draft never agrees with the target on these prompts")
    candidates = list(candidates)
    eligible = {NONE, *candidates}
    scores: dict[Setting, Score] = {}

    def scored(one: Setting) -> Score:
        if one not in scores:
            scores[one] = score(one, traces, chosen_on, costs)
            advance()
        return scores[one]

    for one in contestants(candidates, old, rivals):
        scored(one)
    if space is not None:

        def speed(one: Setting) -> float:
            eligible.add(one)
            return scored(one).tokens_per_second

        explore(space, old or NONE, speed)
    choice = choose([found for found in scores.values() if found.setting in eligible])
    families: dict[str, list[Score]] = {}
    for found in scores.values():
        families.setdefault(found.setting.family, []).append(found)
    best = sorted((choose(family).chosen for family in families.values()), key=lambda one: -one.tokens_per_second)
    shapes: dict[tuple[bool, ...], Score] = {}
    for found in best if space is not None else ():
        if found.setting == NONE:
            continue
        shapes.setdefault(tuple(level.once for level in found.setting.levels), found)
    shown = best if space is None else best[:MOST_RANKED]
    wanted = [choice.chosen, scores[NONE], *shown, *shapes.values()]
    wanted += [choose([scores[one] for one in rivals]).chosen] if rivals else []
    wanted += [] if old is None else [scores[old]]
    reported = [score(one, traces, reported_on, costs) for one in dict.fromkeys(one.setting for one in wanted)]
    baseline = next(found for found in reported if found.setting == NONE)
    ranking = [Ranked(found, found.speedup(baseline)) for found in reported]
    ranking.sort(key=lambda entry: -entry.score.tokens_per_second)
    best_possible = score_oracle(traces, reported_on, costs)
    signal_bound = None
    if costs.below is None:
        best_read = score_signal_bound(traces, reported_on, costs)
        signal_bound = Ranked(best_read, best_read.speedup(baseline))
    if choice.chosen.setting == NONE and len(scores) > 1:
        warnings.append("no setting is faster than target-only decoding beyond the noise: do not speculate here")
    return Calibration(
        choice=choice,
        candidates=len(scores),
        ranking=ranking,
        winner=next(entry for entry in ranking if entry.score.setting == choice.chosen.setting),
        oracle=Ranked(best_possible, best_possible.speedup(baseline)),
        signal_bound=signal_bound,
        baseline=scores[NONE],
        families=families,
        chosen_on=chosen_on,
        reported_on=reported_on,
        warnings=warnings,
    )
