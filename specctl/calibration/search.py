"""Searches the setting to use: replays and prices every candidate, chooses, and reports on held-out prompts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from specctl.calibration.compared_settings import LONGEST, SIMPLEST, Space, explore, settings_replayed
from specctl.errors import UsageError
from specctl.policies import NONE, Setting, Signal
from specctl.profile.schema import Verification
from specctl.replay.bounds import READS, oracle, play_best
from specctl.replay.costs import CostTable, Replay
from specctl.replay.play import players_of, replay_levels, replay_together
from specctl.replay.trace_files import TraceSet
from specctl.statistics import FEW, SEED, Floats, Interval, bootstrap

RESAMPLES = 2000
EACH = 4  # Least number of texts per batch slot, because slots are empty while the last texts end


@dataclass(frozen=True, slots=True)
class Score:
    """The replayed rounds of a setting in numbers; every array is ``(P,)``, a value for each of P prompts."""

    setting: Setting  # the replayed setting
    tokens: Floats  # generated tokens
    ms: Floats  # predicted time after the prompt, in milliseconds
    passes: Floats  # rounds, which are target passes
    # drafted, accepted: draft tokens of the first draft, and how many were accepted
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
        """Rejected draft tokens for each generated token."""
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
            ratios: Floats = (weights @ over.ms) / (weights @ self.ms)
            return ratios

        return bootstrap(ratio, len(self.ms), RESAMPLES)


def score(setting: Setting, traces: TraceSet, prompts: Sequence[str], costs: CostTable, rows: int = 1) -> Score:
    """Replay a setting on the prompts and price its rounds.

    Several texts (``rows``), of one draft, are replayed together: every text equally often, at least `EACH` texts in
    each place of the batch, always in the same order. ``ms`` are then the prompts' shares of the time.
    """
    costs = costs.of_predictor(setting.head)
    known, eos = traces.of(prompts, setting.head), frozenset(traces.header.eos)
    if rows > 1:
        order = Random(SEED)
        texts = [one for _ in range(-(-EACH * rows // len(known))) for one in order.sample(known, len(known))]
        batch = replay_together(setting, texts, rows, costs, eos)
        return _summed(setting, prompts, batch.replays, (1e3 * share for share in batch.shares))
    signals = [level.signals for level in setting.levels]
    replays = replay_levels(players_of(setting, costs.clocks(signals)), known, eos)
    return _summed(setting, prompts, replays, _priced(replays, costs, *signals))


def score_oracle(traces: TraceSet, prompts: Sequence[str], costs: CostTable) -> Score:
    """Score the policy that knows where the target will disagree (SpecDec++, Theorem 4.1); it reads no signal.

    In a hierarchy every draft knows where its verifier will disagree, and the fastest number of drafts counts.
    """
    scores = []
    for used in range(1, len(costs.levels) + 1):
        replays = [oracle(trace, used) for trace in traces.of(prompts)]
        scores.append(_summed(Setting("oracle"), prompts, replays, _priced(replays, costs, *[()] * used)))
    return max(scores, key=lambda one: one.tokens_per_second)


def score_signal_bound(traces: TraceSet, prompts: Sequence[str], costs: CostTable) -> Score:
    """Score the best stopping rule on entropy and top probability, fitted to the same prompts."""
    longest = min(LONGEST, traces.header.depth)
    replays = play_best(traces.of(prompts), costs, frozenset(traces.header.eos), longest=longest)
    return _summed(Setting("signal bound"), prompts, replays, _priced(replays, costs, READS))


def _priced(replays: Iterable[Replay], costs: CostTable, *signals: Iterable[Signal]) -> Iterator[float]:
    """The milliseconds of each text generated alone."""
    return (costs.milliseconds([one], *signals) for one in replays)


def _summed(setting: Setting, prompts: Sequence[str], replays: Iterable[Replay], ms: Iterable[float]) -> Score:
    places = {prompt: place for place, prompt in enumerate(prompts)}
    columns = np.zeros((5, len(prompts)))
    for one, milliseconds in zip(replays, ms, strict=True):
        rounds = one.top
        numbers = one.tokens, milliseconds, len(rounds.starts), sum(rounds.drafted), sum(rounds.accepted)
        columns[:, places[one.trace.prompt]] += numbers
    return Score(setting, *columns)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen setting, and the certainty of the choice."""

    chosen: Score  # the simplest setting within one standard error of the fastest
    fastest: Score  # the fastest setting by predicted tokens/s
    # share of bootstrap resamples of the prompts in which the chosen setting is within one standard error of the
    # fastest
    share: float
    near: list[Score]  # the other settings within one standard error of the fastest, the fastest first


def choose(scores: Sequence[Score]) -> Choice:
    """Choose by predicted tokens/s; all scores must be of the same prompts in the same order."""
    speeds = np.array([score.tokens_per_second for score in scores])
    best = int(speeds.argmax())
    tokens, ms = scores[0].tokens, np.stack([score.ms for score in scores])  # (P,), (S, P)
    prompts = len(tokens)
    if prompts > 1:
        weights = np.random.default_rng(SEED).multinomial(prompts, np.full(prompts, 1 / prompts), size=RESAMPLES)
        resampled = 1e3 * (weights @ tokens)[:, None] / (weights @ ms.T)  # (R, S)
        errors = (resampled[:, [best]] - resampled).std(axis=0)
    else:
        resampled, errors = speeds[None], np.zeros(len(scores))
    within = [index for index in range(len(scores)) if speeds[best] - speeds[index] <= errors[index]]
    chosen = min(within, key=lambda index: (*simplicity(scores[index].setting), -speeds[index]))
    sure = resampled[:, chosen] >= resampled.max(axis=1) - errors[chosen]
    near = sorted((index for index in within if index != chosen), key=lambda index: -speeds[index])
    return Choice(scores[chosen], scores[best], float(sure.mean()), [scores[index] for index in near])


def simplicity(setting: Setting) -> tuple[int, int, int]:
    """A sort key, smallest for the simplest: fewer drafts, simpler policies, fewer non-default values."""
    levels = setting.levels
    known = sum(SIMPLEST.index(one.policy) if one.policy in SIMPLEST else len(SIMPLEST) for one in levels)
    return len(levels), known, sum(len(one.values) for one in levels)


MOST_RANKED = 12  # Ranked combinations of a hierarchy's policies, besides the best of each pre-verification mode


@dataclass(frozen=True, slots=True)
class Ranked:
    """A policy's best setting, scored on the prompts reported on, and its speedup over target-only decoding."""

    score: Score
    speedup: Interval


def _ranking(scores: Iterable[Score]) -> list[Ranked]:
    """Rank scores on the same prompts, the fastest first; the score of none must be among them."""
    scores = list(scores)
    baseline = next(one for one in scores if one.setting == NONE)
    return sorted((Ranked(one, one.speedup(baseline)) for one in scores), key=lambda one: -one.score.tokens_per_second)


@dataclass(slots=True, kw_only=True)
class Best:
    """The best settings for a number of texts at once."""

    rows: int = 1  # the number of texts
    choice: Choice  # among all candidates, on the prompts chosen on
    candidates: int  # the number of settings that were replayed
    ranking: list[Ranked]  # each policy's best setting, and none, on the prompts reported on, the fastest first
    winner: Ranked  # the entry of the chosen setting in the ranking

    def entry(self, setting: Setting) -> Ranked | None:
        """The entry of a setting in the ranking, if it was ranked."""
        return next((one for one in self.ranking if one.score.setting == setting), None)


@dataclass(slots=True, kw_only=True)
class Calibration(Best):
    """The outcome of a search for one text at a time.

    The ranking has the profile's own setting too. Of a hierarchy's combinations of policies it has those that were
    fastest on the prompts chosen on, and the fastest of each way to pre-verify, a single draft included.
    """

    oracle: Ranked  # the policy of Theorem 4.1 of SpecDec++, on the prompts reported on
    # the best stopping rule on entropy and top probability, on the prompts reported on; None for a hierarchy, for which
    # it is not defined, and for a lookup, which has neither
    signal_bound: Ranked | None
    baseline: Score  # none, on the prompts chosen on
    # by policies and head, the scores of all replayed settings on the prompts chosen on
    families: dict[str, list[Score]]
    # chosen_on, reported_on: prompt ids; equal if there were too few prompts to hold some out
    chosen_on: list[str]
    reported_on: list[str]
    verification: Verification | None = None  # how replayed draft tokens were verified; None in greedy decoding
    warnings: list[str] = field(default_factory=list)  # warnings about the outcome

    @property
    def held_out(self) -> bool:
        return self.chosen_on != self.reported_on

    @property
    def curve(self) -> list[Score]:
        """The scores of the chosen setting's family."""
        return self.families[self.choice.chosen.setting.family]

    def ranked(self, name: str) -> Ranked | None:
        """The fastest entry of a family, such as a policy that stops a single draft; None if it was not ranked."""
        return next((entry for entry in self.ranking if entry.score.setting.family == name), None)


def split(traces: TraceSet) -> tuple[list[str], list[str]]:
    """Split the prompts of each category in two halves: ids to choose on and ids to report on."""
    categories: dict[str, list[str]] = {}
    for trace in traces.traces:
        ids = categories.setdefault(trace.category, [])
        if trace.prompt not in ids:
            ids.append(trace.prompt)
    chosen: list[str] = []
    reported: list[str] = []
    for ids in categories.values():
        for prompt in ids:
            # The odd prompt goes to the shorter part, so that odd categories do not all favour the same part.
            (chosen if len(chosen) <= len(reported) else reported).append(prompt)
    order = traces.prompts
    return sorted(chosen, key=order.index), sorted(reported, key=order.index)


def search(
    traces: TraceSet,
    candidates: Iterable[Setting],
    old: Setting | None,
    costs: CostTable,
    also_ranked: Sequence[Setting] = (),
    advance: Callable[[], None] = lambda: None,
    *,
    space: Space | None = None,
) -> Calibration:
    """Choose among the candidates on one part of the prompts and report on the other part.

    Args:
        traces: of at least one prompt.
        candidates: settings that may be chosen; none may always be chosen.
        old: the profile's own setting; None if it cannot be replayed.
        costs: of this machine.
        also_ranked: settings that are ranked too, but not chosen.
        advance: called after each setting that was replayed.
        space: settings of a hierarchy, explored from the old setting; they may be chosen too.
    """
    chosen_on, reported_on = split(traces)
    warnings = _warnings(traces, chosen_on, reported_on)
    reported_on = reported_on or chosen_on
    candidates = list(candidates)
    eligible = {NONE, *candidates}
    scores: dict[Setting, Score] = {}

    def scored(setting: Setting) -> Score:
        if setting not in scores:
            scores[setting] = score(setting, traces, chosen_on, costs)
            advance()
        return scores[setting]

    for setting in settings_replayed(candidates, old, also_ranked):
        scored(setting)
    if space is not None:

        def speed(setting: Setting) -> float:
            eligible.add(setting)
            return scored(setting).tokens_per_second

        explore(space, old or NONE, speed)
    choice = choose([found for found in scores.values() if found.setting in eligible])
    families = _by_family(scores.values())
    wanted = [choice.chosen, scores[NONE], *_best_of_families(families, hierarchy=space is not None)]
    wanted += [choose([scores[setting] for setting in also_ranked]).chosen] if also_ranked else []
    wanted += [] if old is None else [scores[old]]
    ranking = _ranking(
        score(setting, traces, reported_on, costs) for setting in dict.fromkeys(one.setting for one in wanted)
    )
    baseline = next(one.score for one in ranking if one.score.setting == NONE)

    def bound(found: Score) -> Ranked:
        return Ranked(found, found.speedup(baseline))

    has_signals = costs.below is None and not any(trace.draft.copies for trace in traces.traces)
    if choice.chosen.setting == NONE and len(scores) > 1:
        warnings.append("no setting is faster than target-only decoding beyond the noise: do not speculate here")
    return Calibration(
        choice=choice,
        candidates=len(scores),
        ranking=ranking,
        winner=next(entry for entry in ranking if entry.score.setting == choice.chosen.setting),
        oracle=bound(score_oracle(traces, reported_on, costs)),
        signal_bound=bound(score_signal_bound(traces, reported_on, costs)) if has_signals else None,
        baseline=scores[NONE],
        families=families,
        chosen_on=chosen_on,
        reported_on=reported_on,
        verification=traces.verification,
        warnings=warnings,
    )


def _by_family(scores: Iterable[Score]) -> dict[str, list[Score]]:
    families: dict[str, list[Score]] = {}
    for one in scores:
        families.setdefault(one.setting.family, []).append(one)
    return families


def _warnings(traces: TraceSet, chosen_on: Sequence[str], reported_on: Sequence[str]) -> list[str]:
    warnings = []
    if not reported_on:
        warnings.append("there is only one prompt, which both chose the setting and reports on it")
    report = len(reported_on or chosen_on)
    if min(len(chosen_on), report) < FEW:
        warnings.append(f"{len(chosen_on)} prompts chose and {report} report: too few to trust the intervals")
    if not any(any(trace.draft.accepted_runs) for trace in traces.traces):
        warnings.append("the draft never agrees with the target on these prompts")
    short = sum(trace.draft.reach is not None and trace.draft.reach < len(trace.tokens) for trace in traces.traces)
    if short:
        warnings.append(
            f"the draft's context ended before {short} of {len(traces.traces)} answers did: the rest of these was "
            "written without it, and counts as such"
        )
    return warnings


def _best_of_families(families: Mapping[str, list[Score]], *, hierarchy: bool) -> list[Score]:
    """The chosen setting of each family, the fastest first.

    A hierarchy has many families; only the `MOST_RANKED` fastest and the fastest of each way to pre-verify are
    returned.
    """
    best = sorted((choose(family).chosen for family in families.values()), key=lambda found: -found.tokens_per_second)
    if not hierarchy:
        return best
    shapes: dict[tuple[bool, ...], Score] = {}
    for found in best:
        if found.setting != NONE:
            shapes.setdefault(tuple(level.once for level in found.setting.levels), found)
    return [*best[:MOST_RANKED], *shapes.values()]


FINALISTS = 3
"""Number of settings per policy and longest draft that are replayed in batches, the most promising by their rounds."""


def require_priced(sizes: Sequence[int], costs: CostTable | None, where: str) -> None:
    """Raise UsageError if costs of a batch size were not measured."""
    known = [] if costs is None else sorted(costs.batches)
    if missing := [rows for rows in sizes if rows not in known]:
        held = f"those of {', '.join(map(str, known))}" if known else "none of several"
        raise UsageError(
            f"{where} has no costs of {missing[0]} texts at once, but {held}", "record a new trace with this --batch"
        )


def search_sizes(
    traces: TraceSet,
    found: Calibration,
    candidates: Iterable[Setting],
    sizes: Iterable[int],
    costs: CostTable,
    advance: Callable[[], None] = lambda: None,
) -> list[Best]:
    """The setting for each batch size, chosen by batched replay on the prompts of a calibration.

    If settings are within one standard error of the fastest at every number, one text included, the simplest of them is
    chosen for all numbers, and in ``found`` too.

    Args:
        traces: of one draft.
        found: the calibration for one text.
        candidates: settings that may be chosen; none may always be chosen.
        sizes: numbers of texts, each at least 2.
        costs: with ``batches`` of these numbers.
        advance: called after each number.
    """
    chosen: dict[int, Choice] = {}
    eligible = {NONE, *candidates}
    scores: dict[int, list[Score]] = {}
    for rows in sizes:
        settings = finalists(found, costs, rows)
        scores[rows] = [score(one, traces, found.chosen_on, costs, rows) for one in settings]
        chosen[rows] = choose([one for one in scores[rows] if one.setting in eligible])
        advance()
    if (common := _for_all([found.choice, *chosen.values()])) is not None:
        chosen = {rows: _of(choice, common) for rows, choice in chosen.items()}
        _choose_alone(found, common, traces, costs)
    return [_reported(rows, choice, scores[rows], traces, found, costs) for rows, choice in chosen.items()]


def finalists(found: Calibration, costs: CostTable, rows: int) -> list[Setting]:
    """The settings to replay in batches: none, and by policy and longest draft the fastest alone."""
    table = costs.batches[rows]
    context = float(table.contexts[len(table.contexts) // 2])
    step = table.at(context)[0]

    def promise(one: Score) -> float:
        passes, drafted = float(one.passes.sum()), float(one.drafted.sum())
        return float(one.tokens.sum()) / (passes * table.verifying(context, drafted / passes) + drafted * step)

    groups: dict[tuple[str, int], list[Score]] = {}
    for family, scores in found.families.items():
        for one in scores:
            groups.setdefault((family, one.setting.longest_draft), []).append(one)
    best = [one for group in groups.values() for one in sorted(group, key=promise, reverse=True)[:FINALISTS]]
    return list(dict.fromkeys([NONE, found.choice.chosen.setting, *(one.setting for one in best)]))


def _for_all(choices: Sequence[Choice]) -> Setting | None:
    """The simplest setting within the noise of the fastest in every choice; None if there is none."""
    within = [{one.setting for one in (choice.chosen, *choice.near)} for choice in choices]
    common = set.intersection(*within)
    speeds = {one.setting: one.tokens_per_second for one in (choices[-1].chosen, *choices[-1].near)}
    return min(common, key=lambda one: (*simplicity(one), -speeds[one]), default=None)


def _of(choice: Choice, setting: Setting) -> Choice:
    """The choice with another setting within the noise."""
    if choice.chosen.setting == setting:
        return choice
    chosen = next(one for one in choice.near if one.setting == setting)
    near = [choice.chosen, *(one for one in choice.near if one is not chosen)]
    return replace(choice, chosen=chosen, near=sorted(near, key=lambda one: -one.tokens_per_second))


def _choose_alone(found: Calibration, setting: Setting, traces: TraceSet, costs: CostTable) -> None:
    """Make a setting within the noise the chosen one of a calibration of one text."""
    found.choice = _of(found.choice, setting)
    if found.entry(setting) is None:
        own = score(setting, traces, found.reported_on, costs)
        found.ranking = _ranking([*(one.score for one in found.ranking), own])
    winner = found.entry(setting)
    assert winner is not None
    found.winner = winner


def _reported(
    rows: int, choice: Choice, scores: Sequence[Score], traces: TraceSet, found: Calibration, costs: CostTable
) -> Best:
    best = [choose(family).chosen.setting for family in _by_family(scores).values()]
    wanted = dict.fromkeys([choice.chosen.setting, NONE, *best])
    ranking = _ranking(score(one, traces, found.reported_on, costs, rows) for one in wanted)
    winner = next(one for one in ranking if one.score.setting == choice.chosen.setting)
    return Best(rows=rows, choice=choice, candidates=len(scores), ranking=ranking, winner=winner)


def with_batches(alone: Setting, sizes: Mapping[int, Setting]) -> Setting:
    """Combine the settings for each batch size into one."""
    batches: list[tuple[int, Setting]] = []
    for rows, one in sorted(sizes.items()):
        if one != (batches[-1][1] if batches else alone):
            batches.append((rows, one))
    return replace(alone, batches=tuple(batches))
