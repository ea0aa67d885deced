"""Drafts of several profiles on one target: each is calibrated, then all run live in turn to choose between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specctl.calibration.calibration_report import speedup_cells
from specctl.calibration.decision import Decision
from specctl.calibration.live_check import Measured, ran, run_candidates, stopped_live
from specctl.calibration.search import Calibration, Ranked
from specctl.errors import UsageError
from specctl.models.running.pair import Pair
from specctl.observing.candidates import Candidates, candidates_of
from specctl.observing.progress import SILENT, Progress
from specctl.observing.results import BASELINE
from specctl.policies import NONE, Setting
from specctl.profile.schema import Profile
from specctl.prompts.suites import SuitePrompt
from specctl.reporting.placing import Placed, level, listed, times
from specctl.reporting.table import Columns, Table
from specctl.statistics import Interval


@dataclass(frozen=True, slots=True)
class Entrant:
    """The drafts of one profile with their calibration."""

    name: str  # of the profile
    profile: Profile  # as it was resolved
    decision: Decision  # their calibration, before live runs

    @property
    def found(self) -> Calibration:
        """The outcome of the search."""
        return self.decision.found

    @property
    def setting(self) -> Setting:
        """The one to run and to use: the chosen one, unless another rival is faster."""
        return self.decision.advice.setting

    @property
    def ranked(self) -> Ranked:
        """The predicted entry of `setting`."""
        return next(one for one in self.found.ranking if one.score.setting == self.setting)


@dataclass(frozen=True, slots=True)
class Standing:
    """An entrant's setting."""

    entrant: Entrant  # the profile and its calibration
    measured: float | None  # tokens/s after the prompt, live; None if it was not run
    speedup: Interval  # over target-only decoding: measured, the time of the prompt included, or else predicted
    behind: Interval  # the speed of the first over its own, by the same prompts

    @property
    def decision(self) -> Decision:
        """The entrant's, with its live runs."""
        one = self.entrant
        if self.measured is None:
            return one.decision
        found, predicted = replace(one.found, winner=one.ranked), one.ranked.score.tokens_per_second
        runs = [Measured(one.setting, predicted, self.measured, self.speedup, self.behind)]
        # The target's own tokens/s follow from neither; its speed over its own is 1.
        alone = self.measured / self.speedup.value
        runs += [Measured(NONE, None, alone, Interval(1.0), self.behind)] * (one.setting != NONE)
        return replace(one.decision, found=found, measured=runs)


def candidates_of_entrants(entrants: Sequence[Entrant]) -> Candidates:
    """The candidates to load and run: the chosen setting of each entrant that drafts at all.

    Raises:
        UsageError: two entrants would have one name in the results.
    """
    drafting = [one for one in entrants if one.setting != NONE]
    tables = [one.profile.draft.stopped_by(one.setting) for one in drafting if one.profile.draft is not None]
    candidates = candidates_of(tables)
    if len(candidates.all) != 1 + len(drafting):
        raise UsageError(
            "two of the profiles have the same drafts and settings",
            "name each pair once; --policy all compares the policies of one",
        )
    return candidates


def predicted(entrants: Sequence[Entrant]) -> list[Standing]:
    """The standings by prediction, fastest first."""
    order = sorted(entrants, key=lambda one: -one.ranked.speedup.value)
    first = order[0]
    found = []
    for one in order:
        # Left-out prompts may differ between entrants; ratios are paired only over equal prompts.
        same = one.found.reported_on == first.found.reported_on
        behind = first.ranked.score.speedup(one.ranked.score) if same else Interval(1.0)
        found.append(Standing(one, None, one.ranked.speedup, behind))
    return found


def run_live(
    pair: Pair, candidates: Candidates, entrants: Sequence[Entrant], progress: Progress = SILENT
) -> tuple[list[Standing], bool]:
    """Run every entrant's setting and none in turn, on the prompts that all reported on.

    Doubts about the outcome become warnings of each entrant.

    Returns:
        The standings, fastest first, empty where no prompt was run; and whether Ctrl-C ended the runs.

    Args:
        pair: the target with the drafts of the candidates.
        candidates: of the entrants.
        entrants: at least one.
        progress: receives a count of runs.
    """
    first = entrants[0]
    shared = [name for name in first.found.reported_on if all(name in one.found.reported_on for one in entrants)]
    prompts = [SuitePrompt(identity, **first.decision.traces.records[identity]) for identity in shared]
    results, stopped = run_candidates(pair, first.profile, candidates, prompts, candidates.names, progress)
    warnings = [] if stopped is None else [stopped_live(*stopped)]
    if missing := {name for one in entrants for name in one.found.reported_on} - set(shared):
        warnings.append(f"{len(missing)} prompts are left out of the live runs: not every profile reports on them")
    for one in entrants:
        one.found.warnings.extend(warnings)
    drafting = iter(candidate.label for candidate in candidates.all if candidate.label != BASELINE)
    labels = [BASELINE if one.setting == NONE else next(drafting) for one in entrants]
    measured = ran(results, labels)
    standings = [
        Standing(one, found.tokens_per_second, found.speedup, found.behind)
        for one, label in zip(entrants, labels, strict=True)
        if (found := measured.get(label)) is not None and found.speedup is not None
    ]
    return sorted(standings, key=lambda one: -one.speedup.value), stopped is not None


def standings_table(standings: Sequence[Standing]) -> Table:
    """The entrants next to each other."""
    how = "measured" if any(one.measured is not None for one in standings) else "predicted"
    columns: Columns[Standing] = {
        "profile": lambda one: one.entrant.name,
        "policy": lambda one: one.entrant.setting.label,
        "predicted tokens/s": lambda one: one.entrant.ranked.score.tokens_per_second,
        "measured tokens/s": lambda one: one.measured,
        f"{how} speedup": lambda one: speedup_cells(one.speedup)[0],
        "95% interval": lambda one: speedup_cells(one.speedup)[1],
    }
    return Table.of("Side by side", columns, standings)


def verdict_of(standings: Sequence[Standing]) -> str:
    """Which profile to use, as one line of text."""
    best, *others = standings
    if best.entrant.setting == NONE or best.speedup.value <= 1:
        return "use none: no draft here is faster than target-only decoding"
    how = "predicted" if best.measured is None else "measured"
    parts = [f"use {best.entrant.name} with {best.entrant.setting.label}: {how} {times(best.speedup)}"]
    if best.measured is not None:
        parts[0] += f", predicted {best.entrant.ranked.speedup.value:.2f}x"
    parts += [f"{one.entrant.name} {times(one.speedup)}" for one in others]
    leading = level([Placed(one.entrant.name, one.speedup, one.behind) for one in standings])
    if len(leading) > 1:
        parts.append(f"{listed([one.name for one in leading])} are level on these prompts")
    return "; ".join(parts)
