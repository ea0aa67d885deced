"""Which setting is chosen, and how sure that is, against counts by hand."""

from itertools import product

import numpy as np
import pytest

from specctl.calibration.search import Score, choose
from specctl.policies import Setting

CONSTANT, SVIP = Setting("constant"), Setting("svip")


def scored(setting: Setting, ms: list[float]) -> Score:
    """Ten tokens of each prompt."""
    times = np.array(ms)
    return Score(setting, np.full(len(ms), 10.0), times, times, times, times)


def test_a_difference_on_every_prompt_is_seen_however_much_the_prompts_differ() -> None:
    """The simpler setting is two percent slower on each: that is no noise, though prompts differ fourfold."""
    ms = [1.0, 4.0, 3.0, 1.5, 2.0, 3.5, 2.5, 1.2]
    found = choose([scored(CONSTANT, [1.02 * each for each in ms]), scored(SVIP, ms)])
    assert found.chosen.setting == SVIP
    assert found.near == []


def test_the_share_of_resamples_is_that_within_one_standard_error() -> None:
    simple, fast = [10.9, 13.2, 9.6], [12.8, 11.3, 8.1]
    draws = [np.bincount(draw, minlength=3) for draw in product(range(3), repeat=3)]
    speeds = [[30e3 / float(draw @ np.array(ms)) for ms in (simple, fast)] for draw in draws]
    error = float(np.std([b - a for a, b in speeds]))
    within = float(np.mean([a >= max(a, b) - error for a, b in speeds]))
    ahead = float(np.mean([a >= b for a, b in speeds]))
    assert ahead < within - 0.1 < 0.9, "the standard error tells, and not every resample is within it"
    found = choose([scored(CONSTANT, simple), scored(SVIP, fast)])
    assert (found.chosen.setting, found.fastest.setting) == (CONSTANT, SVIP)
    assert found.share == pytest.approx(within, abs=0.02)
