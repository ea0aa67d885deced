"""Chooses a setting for each number of texts at once, by replaying these texts together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specctl.calibration.choice import Choice, choose, simplicity
from specctl.calibration.scores import Score, score, score_together
from specctl.calibration.search import Calibration, Ranked
from specctl.errors import UsageError
from specctl.policies import NONE, Setting
from specctl.replay.costs import CostTable
from specctl.replay.trace_files import TraceSet

FINALISTS = 3
"""Settings of a policy with one longest draft that are replayed together: those that promise most by what they draft
and keep alone."""


@dataclass(slots=True)
class BatchSize:
    """What was found for a number of texts at once.

    Attributes:
        rows: how many.
        choice: on the prompts chosen on.
        winner: the chosen setting, on the prompts reported on.
        ranking: each policy's best setting and none, on the prompts reported on, fastest first.
        candidates: how many settings were replayed together.
    """

    rows: int
    choice: Choice
    winner: Ranked
    ranking: list[Ranked]
    candidates: int


def require_priced(sizes: Sequence[int], costs: CostTable | None, where: str) -> None:
    """Raise UsageError where costs of a number of texts were not measured."""
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
) -> list[BatchSize]:
    """The setting for each number of texts, on the prompts and by the rule of a calibration.

    A single setting that is within one standard error of the fastest at every number, one text included, is chosen for
    all: the simplest of these. Then ``found`` says so too.

    Args:
        traces: of one draft.
        found: the calibration for one text.
        candidates: settings that may be chosen; none may always be.
        sizes: numbers of texts, each at least 2.
        costs: with ``batches`` of these numbers.
        advance: called after each number.
    """
    chosen: dict[int, Choice] = {}
    eligible = {NONE, *candidates}
    scores: dict[int, list[Score]] = {}
    for rows in sizes:
        settings = finalists(found, costs, rows)
        scores[rows] = [score_together(one, traces, found.chosen_on, rows, costs) for one in settings]
        chosen[rows] = choose([one for one in scores[rows] if one.setting in eligible])
        advance()
    if (common := _for_all([found.choice, *chosen.values()])) is not None:
        chosen = {rows: _of(choice, common) for rows, choice in chosen.items()}
        _choose_alone(found, common, traces, costs)
    return [_reported(rows, choice, scores[rows], traces, found, costs) for rows, choice in chosen.items()]


def finalists(found: Calibration, costs: CostTable, rows: int) -> list[Setting]:
    """The settings to replay together: by policy and longest draft those that would be fastest if no draft had to wait
    for a longer one, and none."""
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
    """The simplest setting within the noise of the fastest in every choice; None if there is no such setting."""
    within = [{one.setting for one in (choice.chosen, *choice.near)} for choice in choices]
    common = set.intersection(*within)
    speeds = {one.setting: one.tokens_per_second for one in (choices[-1].chosen, *choices[-1].near)}
    return min(common, key=lambda one: (*simplicity(one), -speeds[one]), default=None)


def _of(choice: Choice, setting: Setting) -> Choice:
    """A choice with another setting within the noise."""
    if choice.chosen.setting == setting:
        return choice
    chosen = next(one for one in choice.near if one.setting == setting)
    near = [choice.chosen, *(one for one in choice.near if one is not chosen)]
    return replace(choice, chosen=chosen, near=sorted(near, key=lambda one: -one.tokens_per_second))


def _choose_alone(found: Calibration, setting: Setting, traces: TraceSet, costs: CostTable) -> None:
    """Let a calibration of one text have chosen a setting that it has within the noise."""
    found.choice = _of(found.choice, setting)
    ranked = next((one for one in found.ranking if one.score.setting == setting), None)
    if ranked is None:
        baseline = next(one.score for one in found.ranking if one.score.setting == NONE)
        reported = score(setting, traces, found.reported_on, costs)
        ranked = Ranked(reported, reported.speedup(baseline))
        found.ranking = sorted([*found.ranking, ranked], key=lambda one: -one.score.tokens_per_second)
    found.winner = ranked


def _reported(
    rows: int, choice: Choice, scores: Sequence[Score], traces: TraceSet, found: Calibration, costs: CostTable
) -> BatchSize:
    families: dict[str, list[Score]] = {}
    for one in scores:
        families.setdefault(one.setting.family, []).append(one)
    best = [choose(family).chosen.setting for family in families.values()]
    reported = [
        score_together(one, traces, found.reported_on, rows, costs)
        for one in dict.fromkeys([choice.chosen.setting, NONE, *best])
    ]
    baseline = next(one for one in reported if one.setting == NONE)
    ranking = sorted(
        (Ranked(one, one.speedup(baseline)) for one in reported), key=lambda one: -one.score.tokens_per_second
    )
    winner = next(one for one in ranking if one.score.setting == choice.chosen.setting)
    return BatchSize(rows, choice, winner, ranking, len(scores))


def with_batches(alone: Setting, sizes: Mapping[int, Setting]) -> Setting:
    """A setting for every number of texts: of those in a row that are equal the first."""
    batches: list[tuple[int, Setting]] = []
    for rows, one in sorted(sizes.items()):
        if one != (batches[-1][1] if batches else alone):
            batches.append((rows, one))
    return replace(alone, batches=tuple(batches))
