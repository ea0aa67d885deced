"""What `cost-optimal` makes of a lookup: times of passes by width, and that it is never much slower than no draft."""

from random import Random

import numpy as np
import pytest

from specctl.policies import Setting
from specctl.policies.cost_optimal import CopyTimes, CostOptimal
from specctl.policies.estimators import UNKNOWN, WidthCurve
from specctl.replay.costs import CostTable
from specctl.replay.play import players_of, replay_levels
from specctl.replay.traces import Trace, recorded_copies
from tests.support.toys import round_of

SETTING = Setting.of({"name": "cost-optimal", "use_foresight": True})
SHAPES = {
    "two tokens as fast as one": (10.0, 10.0, 14.1, 17.0, 21.0, 24.1, 27.8, 31.5),
    "each token dearer": (7.5, 10.0, 14.1, 17.0, 21.0, 24.1, 27.8, 31.5),
    "nearly flat": (28.8, 31.1, 32.4, 33.9, 34.5, 36.4, 42.1, 47.8),
    "each token as dear as a pass": (10.5, 21.1, 32.0, 36.8, 48.2, 52.0, 59.6, 67.3),
}


def costs(shape: str) -> CostTable:
    times = [*SHAPES[shape]]
    rise = times[-1] - times[-2]
    times += [times[-1] + rise * more for more in range(1, 40)]
    return CostTable(
        np.zeros(1), np.arange(len(times), dtype=np.float64), np.zeros((1, len(times))), np.array([times]), {}, 0.0
    )


def texts(repeated: float, count: int = 6, length: int = 128) -> list[Trace]:
    """Texts of random tokens, of which a share repeats what followed the last token before."""
    draws, found = Random(7), []
    for number in range(count):
        ids = [draws.randrange(300) for _ in range(60)]
        for _ in range(length):
            earlier = [place for place, token in enumerate(ids[:-1]) if token == ids[-1]]
            copied = earlier and draws.random() < repeated
            ids.append(ids[earlier[-1] + 1] if copied else draws.randrange(300))
        draft = recorded_copies([0] * length)
        found.append(Trace(f"p{number}", "c", 0, 60, length, ids[60:], draft, 0.0, ids[:60]))
    return found


def speed(setting: Setting, some: list[Trace], table: CostTable) -> float:
    played = replay_levels(players_of(setting, [table.clock(setting.signals)]), some, frozenset())
    return sum(one.tokens for one in played) / table.milliseconds(played, setting.signals)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("repeated", [0.0, 0.3, 0.6, 0.9])
def test_it_is_never_much_slower_than_no_draft(shape: str, repeated: float) -> None:
    some, table = texts(repeated), costs(shape)
    ratio = speed(SETTING, some, table) / speed(Setting("none"), some, table)
    assert ratio > 0.98
    if repeated == 0.9:
        lengths = [Setting.of({"name": "constant", "draft_length": length}) for length in (1, 2, 4, 8)]
        assert speed(SETTING, some, table) > 0.95 * max(speed(one, some, table) for one in lengths)


def test_a_token_that_costs_nothing_is_copied_even_if_it_is_rarely_right() -> None:
    table, some = costs("two tokens as fast as one"), texts(0.3)
    (first, *_) = replay_levels(players_of(SETTING, [table.clock(SETTING.signals)]), some, frozenset())
    assert first.top.drafted.count(1) > len(first.top.drafted) / 4
    dear = costs("each token as dear as a pass")
    (first, *_) = replay_levels(players_of(SETTING, [dear.clock(SETTING.signals)]), some, frozenset())
    assert sum(first.top.drafted) < 10


def test_times_between_and_beyond_known_widths() -> None:
    curve = WidthCurve()
    assert not curve.known
    curve.learn(1, 2.0)
    assert curve.upto(4) == pytest.approx([2.0, 2.0, 2.0 + 2 * UNKNOWN, 2.0 + 4 * UNKNOWN])
    curve.learn(3, 3.0)
    rising = [2.0, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.0 + 2 * UNKNOWN]
    assert curve.upto(9) == pytest.approx(rising)
    curve.learn(5, 2.0)  # a width that is faster than a narrower one
    assert curve.upto(12)[4:] == pytest.approx([2.5, *[2.0] * 7])


def test_a_slower_machine_slows_all_widths_and_a_moment_none() -> None:
    curve = WidthCurve()
    for width in (0, 1, 4) * 20:
        curve.learn(width, 1.0 + width)
    for _ in range(200):
        curve.learn(0, 2.0)
    assert curve.upto(5)[0] == pytest.approx(2.0, rel=0.05)
    assert curve.upto(5)[4] > 1.3 * 5.0
    before = curve.upto(5)
    curve.learn(4, 1000.0)
    assert curve.upto(5)[0] < 1.15 * before[0]


def test_before_anything_is_timed_drafts_are_short() -> None:
    times = CopyTimes()
    assert times.upto(3) == [1.0, 1.0 + UNKNOWN, 1.0 + 2 * UNKNOWN]
    times.learn(round_of(0, 0), 1)  # a text's first round also reads the prompt
    assert times.upto(1)[1] == 1.0 + UNKNOWN
    policy = CostOptimal(use_foresight=True)
    policy.expect(0.9)
    assert policy.draft_limit() == policy.max_draft
    policy.expect(0.1)
    assert policy.draft_limit() == 0
    policy.expect(0.0)
    assert policy.draft_limit() == 0
    assert policy.current_threshold == UNKNOWN
