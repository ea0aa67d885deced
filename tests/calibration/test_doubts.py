import pytest

from specctl.calibration.live_check import Measured, doubts
from specctl.policies import NONE, Setting

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
