"""Searches the setting to use: replays and prices every candidate, chooses, and reports on held-out prompts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specctl.calibration.ascent import Space, explore
from specctl.calibration.choice import Choice, choose
from specctl.calibration.compared_settings import settings_replayed
from specctl.calibration.scores import Score, score, score_oracle, score_signal_bound
from specctl.policies import NONE, Setting
from specctl.profile.schema import Verification
from specctl.replay.costs import CostTable
from specctl.replay.trace_files import TraceSet
from specctl.statistics.intervals import FEW, Interval

MOST_RANKED = 12
"""Combinations of a hierarchy's policies that are ranked, besides the best of each way to pre-verify."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A policy's best setting, scored on the prompts reported on, and its speedup over target-only decoding."""

    score: Score
    speedup: Interval


@dataclass(slots=True)
class Calibration:
    """The outcome of a search.

    Attributes:
        choice: among all candidates, on the prompts chosen on.
        candidates: number of settings that were replayed.
        ranking: each policy's best setting, the profile's own and none, on the prompts reported on, fastest first. For
            a hierarchy, of the combinations of policies only those that were fastest on the prompts chosen on, and the
            fastest of each way to pre-verify, a single draft included.
        winner: the entry of the chosen setting in the ranking.
        oracle: the policy of Theorem 4.1 of SpecDec++, on the prompts reported on.
        signal_bound: the best stopping rule on entropy and top probability, on the prompts reported on; None for a
            hierarchy, for which it is not defined.
        baseline: none, on the prompts chosen on.
        families: by policies and head, the scores of all replayed settings on the prompts chosen on.
        chosen_on, reported_on: prompt ids; equal if there were too few prompts to hold some out.
        verification: how replayed draft tokens were verified; None in greedy decoding.
        warnings: what a reader has to know before trusting the outcome.
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
    verification: Verification | None = None
    warnings: list[str] = field(default_factory=list)

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
            # The next prompt goes to the shorter part, so that odd categories do not all favour the same part.
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
        space: settings of a hierarchy, explored from the old setting on; they may be chosen too.
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
    families: dict[str, list[Score]] = {}
    for found in scores.values():
        families.setdefault(found.setting.family, []).append(found)

    wanted = [choice.chosen, scores[NONE], *_best_of_families(families, hierarchy=space is not None)]
    wanted += [choose([scores[setting] for setting in also_ranked]).chosen] if also_ranked else []
    wanted += [] if old is None else [scores[old]]
    reported = [score(setting, traces, reported_on, costs) for setting in dict.fromkeys(one.setting for one in wanted)]
    baseline = next(found for found in reported if found.setting == NONE)

    def ranked(found: Score) -> Ranked:
        return Ranked(found, found.speedup(baseline))

    ranking = sorted(map(ranked, reported), key=lambda entry: -entry.score.tokens_per_second)
    if choice.chosen.setting == NONE and len(scores) > 1:
        warnings.append("no setting is faster than target-only decoding beyond the noise: do not speculate here")
    return Calibration(
        choice=choice,
        candidates=len(scores),
        ranking=ranking,
        winner=next(entry for entry in ranking if entry.score.setting == choice.chosen.setting),
        oracle=ranked(score_oracle(traces, reported_on, costs)),
        signal_bound=ranked(score_signal_bound(traces, reported_on, costs)) if costs.below is None else None,
        baseline=scores[NONE],
        families=families,
        chosen_on=chosen_on,
        reported_on=reported_on,
        verification=traces.verification,
        warnings=warnings,
    )


def _warnings(traces: TraceSet, chosen_on: Sequence[str], reported_on: Sequence[str]) -> list[str]:
    """Warnings that a reader needs before trusting the outcome."""
    warnings = []
    if not reported_on:
        warnings.append("there is only one prompt: it both chose the setting and reports on it")
    report = len(reported_on or chosen_on)
    if min(len(chosen_on), report) < FEW:
        warnings.append(f"{len(chosen_on)} prompts chose and {report} report: too few for the intervals to be trusted")
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
