"""The decision of a calibration from its traces: search, run the best settings live, and advise."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specctl.calibration.compared_settings import UNTUNED, ComparedSettings
from specctl.calibration.live_check import (
    Measured,
    Stopped,
    check_live,
    doubts,
    rivals_of,
    rivals_together,
    stopped_live,
)
from specctl.calibration.search import Best, Calibration, Score, require_priced, search, search_sizes, with_batches
from specctl.errors import UsageError
from specctl.models.running.pair import Pair
from specctl.observing.progress import Progress
from specctl.policies import NONE, Setting
from specctl.profile.schema import Profile
from specctl.replay.costs import CostTable
from specctl.replay.play import replayable
from specctl.replay.trace_files import TraceSet
from specctl.reporting.placing import listed, times
from specctl.statistics import Interval, is_clear


@dataclass(frozen=True, slots=True)
class Rival:
    """The chosen setting, or one that it has to beat."""

    setting: Setting  # with its policy and values
    tokens_per_second: float  # after the prompt
    speedup: Interval  # over target-only decoding
    behind: Interval  # the speed of the fastest rival over its own, by the same prompts


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommendation and its reasons."""

    chosen: Setting  # the setting that the search chose
    old: Setting | None  # the profile's own setting
    # of the chosen setting, the profile's own, the best constant, `UNTUNED` and none those that are known, the fastest
    # first
    rivals: Sequence[Rival]
    measured: bool  # whether the rivals' speeds are of live runs; otherwise they are predicted
    found: Calibration  # the outcome of the search

    @classmethod
    def of(cls, found: Calibration, old: Setting | None, measured: "Sequence[Measured]") -> "Advice":
        """Advice from the live runs of single texts, or from the search if there are none."""
        chosen = found.winner.score.setting
        live = [
            Rival(one.setting, one.measured, one.speedup, one.behind)
            for one in measured
            if one.rows == 1 and one.speedup is not None
        ]
        known = live if any(one.setting == chosen for one in live) else _predicted(found, old)
        # Among equally fast settings the chosen one comes first.
        order = sorted(known, key=lambda one: (-one.speedup.value, one.setting != chosen))
        return cls(chosen, old, order, known is live, found)

    def rival(self, setting: Setting) -> Rival | None:
        """The entry of a setting, if it is one of the rivals."""
        return next((one for one in self.rivals if one.setting == setting), None)

    @property
    def setting(self) -> Setting:
        """The setting to use, never one that is clearly slower than another rival.

        - The chosen one, if it was fastest.
        - None, if the search chose none and no other is clearly faster.
        - The profile's own, if it was no slower than the chosen one and may be as fast as the fastest.
        - Otherwise the fastest.
        """
        first, mine = self.rivals[0], self.rival(self.chosen)
        own = None if self.old is None else self.rival(self.old)
        if mine is None or first.setting in (self.chosen, NONE):
            return first.setting
        if self.chosen == NONE and not is_clear(mine.behind):
            return NONE
        if own is not None and own.speedup.value >= mine.speedup.value and not is_clear(own.behind):
            return own.setting
        return first.setting

    @property
    def rival_used(self) -> Rival:
        """The entry of `setting`."""
        found = self.rival(self.setting)
        assert found is not None, "it is chosen among them"
        return found

    def predicted(self, setting: Setting) -> Interval | None:
        """The speedup that replay predicts for a setting; None if it was not replayed on these prompts."""
        ranked = self.found.entry(setting)
        return None if ranked is None else ranked.speedup

    @property
    def verdict(self) -> str:
        """The advice as one line of text."""
        used, how = self.setting, "measured" if self.measured else "predicted"
        others = [one for one in self.rivals if one.setting not in (used, NONE)]
        if used == NONE:
            other = f"; the best other setting is {self._figures(others[0])}" if others else ""
            if self.rivals[0].setting == NONE:
                return f"use none: target-only decoding is the right choice here{other}"
            return f"draft nothing (none): no setting is clearly faster than target-only decoding{other}"
        verb, own = "keep" if used == self.old else "use", self.rival_used
        parts = [f"{verb} {self._figures(own)}"]
        if not is_clear(own.speedup) and own.speedup.low is not None:
            parts.append("level with none")
        for one in others:
            level = ", level with it" * self._level(own, one)
            parts.append(f"{self._name(one.setting)} {how} {one.speedup.value:.2f}x{level}")
        parts.append(f"oracle {self.found.oracle.speedup.value:.2f}x (predicted)")
        return "; ".join(parts)

    def _figures(self, one: Rival) -> str:
        how = "measured" if self.measured else "predicted"
        before = self.predicted(one.setting) if self.measured else None
        return f"{one.setting.label}: {how} {times(one.speedup)}" + (
            f", predicted {before.value:.2f}x" if before is not None else ""
        )

    def _level(self, one: Rival, other: Rival) -> bool:
        """Whether two rivals may be equally fast; False unless one is the fastest, with which all are compared."""
        first = self.rivals[0]
        later = other if one is first else one if other is first else None
        return later is not None and later.behind.low is not None and not is_clear(later.behind)

    def _name(self, setting: Setting) -> str:
        if setting == Setting(UNTUNED):
            return setting.label
        what = "the best constant" if setting.policy == "constant" else "another policy"
        what = "your own" if setting == self.old else what
        return f"{'the choice of the search' if setting == self.chosen else what} ({setting.label})"


def _predicted(found: Calibration, old: Setting | None) -> list[Rival]:
    """The rivals that the search ranked."""
    families = [found.ranked("constant"), found.ranked(UNTUNED)]
    wanted = {found.winner.score.setting, old, NONE, *(one.score.setting for one in families if one is not None)}
    ranked = [one for one in found.ranking if one.score.setting in wanted]
    first: Score = max(ranked, key=lambda one: one.speedup.value).score
    return [
        Rival(one.score.setting, one.score.tokens_per_second, one.speedup, first.speedup(one.score)) for one in ranked
    ]


def fastest(chosen: Setting, measured: "Sequence[Measured]") -> Setting:
    """The setting to use for several texts at once: the chosen one, unless another measured faster."""
    known = [one for one in measured if one.speedup is not None]
    best = max(known, key=lambda one: (one.measured, one.setting == chosen), default=None)
    return chosen if best is None else best.setting


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a calibration."""

    traces: TraceSet  # the traces searched
    found: Calibration  # the outcome of the search
    costs: CostTable  # the costs that priced the rounds
    measured: list[Measured]  # the live runs; empty without any
    old: Setting | None = None  # the profile's own setting
    sizes: list[Best] = field(default_factory=list)  # the outcomes for several texts at once, by ascending batch size
    given: int | None = None  # number of prompts before sampling; None if unknown
    interrupted: bool = False  # whether Ctrl-C ended the live runs

    @property
    def advice(self) -> Advice:
        """The advice for one text at a time, from the live runs if there are any."""
        return Advice.of(self.found, self.old, self.measured)

    @property
    def setting(self) -> Setting:
        """The setting to use, combined with the settings for several texts."""
        return with_batches(self.advice.setting, {size.rows: self.setting_of(size) for size in self.sizes})

    def setting_of(self, size: Best) -> Setting:
        """The setting to use for several texts at once: the chosen one, unless another measured faster."""
        return fastest(size.winner.score.setting, [one for one in self.measured if one.rows == size.rows])

    @property
    def prompts(self) -> dict[str, int]:
        """The numbers of prompts given, used to choose, used to report, failed, and left out for another reason."""
        chose, reported = set(self.found.chosen_on), set(self.found.reported_on)
        used, failed = len(chose | reported), len(self.traces.failures)
        given = used + failed if self.given is None else self.given
        counts = {"given": given, "chose": len(chose), "reported": len(reported), "failed": failed}
        return {**counts, "left_out": given - used - failed}

    @property
    def prompts_as_text(self) -> str:
        """`prompts` as a sentence, without its full stop."""
        counts = self.prompts
        parts = [f"{counts['chose']} chose the setting", f"{counts['reported']} report on it"]
        parts += [f"{counts['failed']} could not be run"] if counts["failed"] else []
        parts += [f"{counts['left_out']} were left out (--samples)"] if counts["left_out"] else []
        return f"{counts['given']} prompts: {listed(parts)}"


def decide(
    traces: TraceSet,
    asked: ComparedSettings,
    profile: Profile,
    pair: Pair | None,
    progress: Progress,
    noted: Sequence[str] = (),
    sizes: Sequence[int] = (),
    given: int | None = None,
) -> Decision:
    """Search the compared settings, and run the best ones live if there is a pair; collects the warnings of both steps.

    Warns if live runs verify in another way than the replay.

    Args:
        traces: recorded with the profile.
        asked: the settings compared.
        profile: the pair's, with the sampling settings of live runs.
        pair: with the drafts and heads that the settings use; None to run nothing live.
        progress: receives counts of settings and of live runs.
        noted: further warnings, given before those of the live runs.
        sizes: numbers of texts at once, ascending from 2, for which settings are chosen too.
        given: the number of prompts before sampling.

    Raises:
        UsageError: there is no trace, or no cost of a number of texts.
    """
    if not traces.traces or traces.costs is None:
        raise UsageError("no prompt could be run, so there is nothing to calibrate on")
    require_priced(sizes, traces.costs, "the trace")
    old = asked.old if replayable(asked.old, sampled=profile.sampling.temperature > 0) else None
    with progress.counting("settings", asked.most(old)) as advance:
        found = search(traces, asked.candidates, old, traces.costs, asked.also_ranked, advance, space=asked.space)
    chosen: list[Best] = []
    if sizes:
        with progress.counting("numbers of texts", len(sizes)) as advance:
            chosen = search_sizes(traces, found, asked.candidates, sizes, traces.costs, advance)
    verification = profile.sampling.verification
    if traces.verification not in (None, verification):
        played, runs = (
            {"token": "one by one", "block": "as a block"}[each] for each in (traces.verification, verification)
        )
        found.warnings.append(
            f"predictions are of draft tokens verified {played}, and live runs verify them {runs} "
            "(sampling.verification): more are accepted as a block"
        )
    found.warnings += noted
    measured: list[Measured] = []
    stopped: Stopped = None
    if pair is not None:
        rivals = {1: rivals_of(found, asked), **{size.rows: rivals_together(size) for size in chosen}}
        for rows, predicted in rivals.items():
            if stopped is None:
                live, stopped = check_live(pair, profile, traces, predicted, found.reported_on, progress, rows)
                measured += live
    found.warnings += doubts(measured)
    if stopped is not None:
        found.warnings.append(stopped_live(*stopped))
    return Decision(traces, found, traces.costs, measured, asked.old, chosen, given, stopped is not None)
