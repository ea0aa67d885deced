"""What a calibration warns of once it has searched and run what it chose."""

from dataclasses import replace

import pytest

from specctl.calibration import decision
from specctl.calibration.compared_settings import ComparedSettings, grid
from specctl.calibration.decision import decide
from specctl.calibration.live_check import Measured, doubts
from specctl.errors import UsageError
from specctl.observing.progress import SILENT
from specctl.policies import NONE, Setting
from specctl.profile import resolve
from tests.support.made_traces import SIGNALS, flat_costs, traces

SETTING = Setting("constant")
ASKED = ComparedSettings(SETTING, grid("constant", "paper", SIGNALS), [], None)
PROFILE = resolve("embedded").profile


def test_the_search_what_was_noted_and_the_live_runs_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    some = traces(6)
    some.costs = flat_costs(1, 10)
    measured = [Measured(SETTING, 100.0, 300.0, None)]
    monkeypatch.setattr(decision, "check_live", lambda *_: (measured, None))
    alone = decide(some, ASKED, PROFILE, None, SILENT)
    found = decide(some, ASKED, PROFILE, object(), SILENT, ["noted"])  # type: ignore[arg-type]
    assert (alone.measured, found.measured) == ([], measured)
    assert found.found.warnings[:-1] == [*alone.found.warnings, "noted"]
    assert "+200%" in found.found.warnings[-1]
    assert found.costs is some.costs


@pytest.mark.parametrize(
    ("recorded", "temperature", "warns"), [("token", 1.0, True), ("block", 1.0, False), ("token", 0.0, False)]
)
def test_a_replay_that_verifies_in_another_way_than_live_runs_is_said_so(
    recorded: str, temperature: float, warns: bool
) -> None:
    some = traces(6)
    some.costs = flat_costs(1, 10)
    some.header = replace(some.header, verification=recorded, provenance={"sampling": {"temperature": temperature}})
    warnings = decide(some, ASKED, PROFILE, None, SILENT).found.warnings
    assert any("verified one by one, and live runs verify them as a block" in text for text in warnings) == warns


def test_without_traces_or_costs_there_is_nothing_to_decide() -> None:
    with pytest.raises(UsageError, match="no prompt could be run"):
        decide(traces(6), ASKED, PROFILE, None, SILENT)


SVIP = Setting("svip", (("threshold", 0.4),))


def measured(*pairs: tuple[float | None, float]) -> list[Measured]:
    return [Measured(setting, *pair, None) for setting, pair in zip((SVIP, NONE), pairs, strict=False)]


@pytest.mark.parametrize(
    ("pairs", "off"),
    [
        ([(100.0, 298.0), (100.0, 110.0)], "+198%"),
        ([(100.0, 90.0), (100.0, 60.0)], "-40%"),
        ([(100.0, 119.0), (100.0, 60.0)], "-40%"),
    ],
)
def test_a_machine_whose_speed_changed_is_noticed(pairs: list[tuple[float | None, float]], off: str) -> None:
    (warning,) = doubts(measured(*pairs))
    assert off in warning
    assert "calibrate again" in warning


@pytest.mark.parametrize("pairs", [[(100.0, 120.0), (100.0, 81.0)], [(None, 300.0)], [(100.0, 0.0)], []])
def test_small_differences_and_unknown_predictions_are_no_reason(pairs: list[tuple[float | None, float]]) -> None:
    assert doubts(measured(*pairs)) == []
