"""A few sequences of many are read the way that takes less time."""

import pytest

from specctl.models.onnx.passes import AGAIN, RISING, WIDEST, PassWays


@pytest.fixture
def ways() -> PassWays:
    """Of 16 sequences: a pass over all takes 7 ms, one over a single one 1.3."""
    found = PassWays(16)
    assert not found.apart([1, 1], 14), "a pass over all is timed first"
    found.took(16, 7e-3, alone=False)
    assert found.apart([1, 1], 14), "and then one over a single one"
    found.took(1, 1.3e-3, alone=True)
    return found


def test_as_many_as_take_less_time_than_all_have_passes_of_their_own(ways: PassWays) -> None:
    assert [ways.apart([1] * count, 16 - count) for count in range(1, 10)] == [False, *[True] * 4, *[False] * 4]


def test_more_than_half_of_all_and_prompts_are_read_together(ways: PassWays) -> None:
    ways.took(1, 1e-6, alone=True)
    assert ways.apart([1] * 8, 8)
    assert not ways.apart([1] * 9, 7)
    assert ways.apart([WIDEST, 1], 14)
    assert not ways.apart([WIDEST + 1, 1], 14)


def test_times_are_those_of_the_nearest_number_of_tokens(ways: PassWays) -> None:
    ways.took(5, 4e-3, alone=True)
    assert not ways.apart([5, 4], 14)
    assert ways.apart([2, 1], 14)
    ways.took(23, 9e-3, alone=False)
    assert ways.apart([5, 4], 14)
    ways.took(WIDEST + 1, 1.0, alone=True)
    ways.took(WIDEST * 16 + 1, 1.0, alone=False)
    assert ways.apart([5, 4], 14), "prompts tell nothing"


def test_a_slow_pass_is_soon_forgotten_and_a_slower_machine_noticed(ways: PassWays) -> None:
    ways.took(1, 1.0, alone=True)
    assert ways.apart([1, 1], 14)
    for _ in range(100):
        ways.took(1, 4e-3, alone=True)
    assert not ways.apart([1, 1], 14)
    assert 1.3e-3 * RISING**100 > 4e-3


def test_the_other_way_is_timed_again_now_and_then(ways: PassWays) -> None:
    found = [ways.apart([1, 1], 14) for _ in range(2 * AGAIN)]
    assert [place for place, apart in enumerate(found, start=1) if not apart] == [AGAIN, 2 * AGAIN]


def test_a_graph_for_fewer_sequences_is_tried_and_has_fewer_fillers(ways: PassWays) -> None:
    assert not ways.apart([1, 1], 2)
    ways.took(4, 2e-3, alone=False)
    assert not ways.apart([1, 1], 2)
    assert ways.apart([1, 1], 14)
