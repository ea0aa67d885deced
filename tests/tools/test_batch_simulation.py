"""Batches at the prices of a card and of a processor."""

import pytest

from tests.support.made_traces import traces
from tools.batch_simulation import standing
from tools.scale.roofline import PAIRS, Line, price_table


def test_a_pass_over_a_card_waits_for_memory_until_arithmetic_takes_longer() -> None:
    target, draft = PAIRS["h200"]
    assert target(1, 1) == pytest.approx(4.1e-3, abs=1e-4)
    assert draft(1, 1) == pytest.approx(0.7e-3, abs=5e-5)
    assert target(64, 64) == target(128, 64) < target(256, 64)


def test_prices_of_rounds_follow_from_those_of_passes() -> None:
    costs = price_table(Line(5e-3, 1e-3, 0.5e-3), Line(1e-3, 0.0, 0.25e-3), (1, 4))
    assert costs.draft_ms[0, 2] == pytest.approx(2 * 1.25)
    assert costs.batches[4].draft_ms[0, 2] == pytest.approx(2 * 2.0)
    assert costs.batches[4].verify_ms[0, 2] == pytest.approx(5 + 12 + 2)


def test_every_policy_has_a_standing_and_alone_is_joint_for_one_text() -> None:
    none, found = standing(traces(5, prompts=3), 1, price_table(*PAIRS["cpu"], (1, 4)))
    assert none > 0
    assert [*found][1:] == ["svip", "max-confidence", "alone", "joint"]
    assert found["alone"] == found["joint"] > 1
