"""What a table of times says between and beyond what was measured."""

import numpy as np
import pytest

from specctl.replay.costs import CostTable


@pytest.mark.parametrize(
    ("lengths", "draft_ms", "step"),
    [([0, 4], [0.0, 8.0], 2.0), ([0, 1, 3], [0.0, 5.0, 9.0], 2.0)],
    ids=["one length", "the first step is dearer"],
)
def test_a_step_of_a_draft_is_told_from_whatever_lengths_there_are(
    lengths: list[int], draft_ms: list[float], step: float
) -> None:
    both = np.array([draft_ms, [3 * each for each in draft_ms]])
    table = CostTable(np.array([0.0, 100.0]), np.array(lengths), both, both + np.array([[7.0], [9.0]]), {}, 0.0)
    assert table.at(0) == pytest.approx((step, 7.0))
    assert table.at(50) == pytest.approx((2 * step, 8.0))
