"""Decoding beside its bare passes: of each text the least time counts, and a round's share is of all rounds."""

import pytest

from tools.loop_time import Spent, line


def test_the_least_times_of_each_text_are_compared() -> None:
    first = [Spent(3.0, 2.0, rounds=10, drafted=40), Spent(2.5, 2.2, rounds=10, drafted=40)]
    second = [Spent(1.5, 1.0, rounds=10, drafted=60), Spent(9.0, 9.0, rounds=10, drafted=60)]
    ratio, interval, beside, drafted, bare = line([first, second]).replace(", ", ",").split()
    assert float(ratio) == pytest.approx(4.0 / 3.0, abs=1e-3)
    assert interval == "[1.250,1.500]"
    assert (float(beside), float(drafted), float(bare)) == (50000, 5, 150000)
