"""What a calibration says to use: never what was slower than a constant, `cost-optimal`, or what is there already."""

import re
import tomllib
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

import pytest

from specctl.calibration.calibrated import calibrated_profile, profile_text
from specctl.calibration.calibration_report import as_document
from specctl.calibration.compared_settings import UNTUNED, compared_settings, grid
from specctl.calibration.decision import Advice, Decision, fastest
from specctl.calibration.live_check import Measured
from specctl.calibration.search import Calibration, search
from specctl.policies import NONE, Setting
from specctl.profile import resolve
from specctl.statistics import Interval
from tests.support.made_traces import SIGNALS, flat_costs, traces

COSTS = flat_costs(1, 10)
OLD = Setting.of({"name": "svip", "threshold": 0.9})
FREE = Setting(UNTUNED)


@pytest.fixture(scope="module")
def found() -> Calibration:
    return search(traces(6), grid("svip", "paper", SIGNALS), OLD, COSTS, grid("constant", "paper", SIGNALS))


def named(found: Calibration) -> dict[str, Setting]:
    constant = found.ranked("constant")
    assert constant is not None
    return {"chosen": found.winner.score.setting, "old": OLD, "constant": constant.score.setting, "free": FREE}


def live(found: Calibration, speeds: Mapping[str, float], width: float = 0.01) -> list[Measured]:
    """Live runs of these speedups; behind the fastest by ratios whose intervals are so wide."""
    settings = {**named(found), "none": NONE}
    best = max(1.0, *speeds.values())
    return [
        Measured(
            settings[name],
            100.0,
            100 * speed,
            Interval(speed, speed - width, speed + width, 10),
            Interval(best / speed, best / speed - width, best / speed + width, 10),
        )
        for name, speed in {**speeds, "none": 1.0}.items()
    ]


def decision(found: Calibration, measured: list[Measured]) -> Decision:
    return Decision(traces(6), found, COSTS, measured, OLD)


@pytest.mark.parametrize("order", list(permutations(("chosen", "old", "constant", "free"))))
def test_the_fastest_that_was_measured_is_advised_with_its_own_number(
    found: Calibration, order: tuple[str, ...]
) -> None:
    speeds = dict(zip(order, (1.9, 1.6, 1.3, 0.8), strict=True))
    made = decision(found, live(found, speeds))
    best = named(found)[order[0]]
    assert made.setting == best
    verb = "keep" if order[0] == "old" else "use"
    assert made.advice.verdict.startswith(f"{verb} {best.label}: measured 1.90x (1.89 to 1.91)")
    assert "use" not in made.advice.verdict.partition(":")[2]
    document = as_document(made)
    assert document["use"] == best.table
    assert (document["speedup"]["value"], document["speedup"]["from"]) == (1.9, "live runs")
    assert document["tokens_per_second"] == 190


def test_the_prediction_stands_beside_the_measured_number(found: Calibration, tmp_path: Path) -> None:
    made = decision(found, live(found, {"chosen": 1.2, "old": 1.1, "constant": 1.15, "free": 1.05}))
    predicted = found.winner.speedup.value
    assert abs(predicted - 1.2) > 0.05, "the case"
    assert f": measured 1.20x (1.19 to 1.21), predicted {predicted:.2f}x; " in made.advice.verdict
    assert "oracle" in made.advice.verdict
    assert made.advice.verdict.endswith("(predicted)")
    table = calibrated_profile(resolve("embedded"), made, {}, tmp_path / "own.toml")
    expected = table["provenance"]["expected"]
    assert (expected["from"], expected["speedup"], expected["low"]) == ("live runs", 1.2, 1.19)
    assert expected["predicted_speedup"] == round(predicted, 3)
    text = profile_text(table, made.advice.verdict)
    assert text.startswith(f"# use {found.winner.score.setting.label}: measured 1.20x")
    assert tomllib.loads(text) == table
    assert as_document(made)["speedup"]["predicted"] == round(predicted, 4)


def test_without_live_runs_the_number_is_called_predicted(found: Calibration) -> None:
    advice = decision(found, []).advice
    assert not advice.measured
    assert re.match(r"(use|keep) \S+: predicted \d", advice.verdict)
    assert "measured" not in advice.verdict
    used = advice.rival_used
    assert all(used.speedup.value >= one.speedup.value for one in advice.rivals) or advice.setting == OLD
    assert as_document(decision(found, []))["speedup"]["from"] == "prediction"


def test_what_is_there_is_kept_where_nothing_is_clearly_faster(found: Calibration) -> None:
    """The fastest is a constant by chance, and the chosen setting is slower than both."""
    made = decision(found, live(found, {"chosen": 1.3, "old": 1.49, "constant": 1.5, "free": 1.2}, width=0.1))
    assert made.setting == OLD
    assert made.advice.verdict.startswith(f"keep {OLD.label}: measured 1.49x")
    assert f"the choice of the search ({found.winner.score.setting.label}) measured 1.30x; " in made.advice.verdict
    constant = named(found)["constant"].label
    assert f"the best constant ({constant}) measured 1.50x, level with it; " in made.advice.verdict
    assert "; cost-optimal measured 1.20x; " in made.advice.verdict
    clear = decision(found, live(found, {"chosen": 1.3, "old": 1.4, "constant": 1.5, "free": 1.2}))
    assert clear.setting == named(found)["constant"]


def test_where_no_draft_pays_nothing_is_drafted(found: Calibration) -> None:
    slow = decision(found, live(found, {"chosen": 0.9, "old": 0.8, "constant": 0.95, "free": 0.7}))
    assert slow.setting == NONE
    assert slow.advice.verdict.startswith("use none: target-only decoding is the right choice here; the best other")
    none = search(traces(6), [], None, flat_costs(20, 10), grid("constant", "paper", SIGNALS))
    assert none.winner.score.setting == NONE
    constant = none.ranked("constant")
    assert constant is not None
    level = [
        Measured(NONE, 1.0, 100.0, Interval(1.0, 1.0, 1.0, 10), Interval(1.02, 0.97, 1.05, 10)),
        Measured(constant.score.setting, 1.0, 102.0, Interval(1.02, 0.97, 1.05, 10)),
    ]
    verdict = Advice.of(none, None, level).verdict
    assert verdict.startswith("draft nothing (none): no setting is clearly faster than target-only decoding; the best")
    assert "use" not in verdict


def test_for_several_texts_a_faster_rival_is_used_too() -> None:
    runs = [Measured(FREE, 1.0, 50.0, Interval(0.9), rows=4), Measured(NONE, 1.0, 55.0, Interval(1.0), rows=4)]
    assert fastest(FREE, runs) == NONE
    assert fastest(FREE, runs[:1]) == FREE
    assert fastest(FREE, []) == FREE


def test_the_untuned_policy_runs_live_beside_every_other() -> None:
    draft = resolve("embedded").profile.draft
    assert draft is not None
    computed = {"embedded:draft-head": "accept_prob"}
    for policy in ("svip", "all", None):
        assert compared_settings(draft, policy, "paper", [], SIGNALS, computed).untuned == FREE
