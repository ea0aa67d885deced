"""Drafts of several profiles, each calibrated: their order, their table and which to use."""

from dataclasses import replace
from functools import cache

from specctl.calibration.compared_settings import ComparedSettings, grid
from specctl.calibration.decision import decide
from specctl.calibration.several_drafts import Entrant, predicted, standings_table, verdict_of
from specctl.observing.progress import SILENT
from specctl.policies import NONE
from specctl.profile import resolve
from specctl.statistics import Interval
from tests.support.made_traces import SIGNALS, flat_costs, traces

ASKED = ComparedSettings(NONE, [*grid("constant", "paper", SIGNALS), NONE], [], None)


@cache
def entrant(name: str, draft: float, prompts: int = 12) -> Entrant:
    """One whose draft tokens take so many milliseconds, and target tokens ten."""
    some = traces(6, prompts)
    some.costs = flat_costs(draft, 10)
    profile = resolve("embedded").profile
    return Entrant(name, profile, decide(some, ASKED, profile, None, SILENT))


def test_predictions_of_the_same_prompts_are_paired() -> None:
    slow, fast = entrant("slow", 4.0), entrant("fast", 1.0)
    first, second = predicted([slow, fast])
    assert (first.entrant, second.entrant) == (fast, slow)
    assert (first.measured, first.speedup, second.speedup) == (
        None,
        fast.found.winner.speedup,
        slow.found.winner.speedup,
    )
    assert first.behind.value == 1.0
    assert second.behind.value == fast.found.winner.score.speedup(slow.found.winner.score).value > 1
    _, apart = predicted([entrant("other", 2.0, 10), fast])
    assert apart.behind == Interval(1.0)


def test_the_table_tells_what_was_measured() -> None:
    standings = predicted([entrant("slow", 4.0), entrant("fast", 1.0)])
    table = standings_table(standings)
    assert [row[0] for row in table.rows] == ["fast", "slow"]
    assert "predicted speedup" in " ".join(table.columns)
    live = standings_table([replace(standings[0], measured=123.4), standings[1]])
    assert "measured speedup" in " ".join(live.columns)
    assert [row[3] for row in live.rows] == ["123.4", table.rows[1][3]]


def test_the_verdict_names_the_first_unless_no_draft_pays() -> None:
    first, second = predicted([entrant("slow", 4.0), entrant("fast", 1.0)])
    told = verdict_of([first, second])
    assert told.startswith(f"use fast with {first.entrant.setting.label}")
    assert "; slow " in told
    dear, dearer = entrant("dear", 50.0), entrant("dearer", 90.0)
    assert verdict_of(predicted([dear, dearer])).startswith("use none")
    level = replace(second, behind=Interval(1.01, 0.9, 1.1))
    assert "fast and slow are level on these prompts" in verdict_of([first, level])


def test_what_was_measured_is_written_for_the_profile_that_is_used() -> None:
    (best,) = predicted([entrant("fast", 1.0)])
    assert not best.decision.advice.measured
    live = replace(best, measured=150.0, speedup=Interval(1.5, 1.4, 1.6, 12))
    assert live.decision.setting == best.entrant.setting
    assert live.decision.advice.measured
    assert live.decision.advice.rival_used.speedup == live.speedup
    assert verdict_of([live]).startswith(
        f"use fast with {best.entrant.setting.label}: measured 1.50x (1.40 to 1.60), predicted "
    )
    slow = replace(best, measured=90.0, speedup=Interval(0.9, 0.8, 0.95, 12))
    assert slow.decision.setting == NONE
    assert verdict_of([slow]).startswith("use none")
