"""SpecDec++'s rule against numbers worked out by hand."""

import pytest

from specctl.policies.published import SpecDecPlusPlus, implied_threshold
from specctl.records import DraftStep


def stops(policy: SpecDecPlusPlus, *accept_probs: float) -> list[bool]:
    return [policy.should_stop(DraftStep(index, 0, accept_prob=p)) for index, p in enumerate(accept_probs, start=1)]


def test_it_stops_when_a_rejection_is_likelier_than_the_threshold() -> None:
    # 1, 0.9, 0.63, 0.504, 0.2520: the last is the first whose complement passes 0.7.
    assert stops(SpecDecPlusPlus(), 1.0, 0.9, 0.7, 0.8, 0.5) == [False, False, False, False, True]


def test_the_threshold_itself_is_not_beyond_it() -> None:
    assert stops(SpecDecPlusPlus(threshold=0.5), 1.0, 0.5) == [False, False]
    assert stops(SpecDecPlusPlus(threshold=0.5), 1.0, 0.499) == [False, True]


def test_a_round_has_its_least_length() -> None:
    assert stops(SpecDecPlusPlus(min_draft=3), 1.0, 0.1, 0.9) == [False, False, True]


def test_the_product_restarts_each_round() -> None:
    policy = SpecDecPlusPlus()
    assert stops(policy, 1.0, 0.2) == [False, True]
    assert stops(policy, 1.0, 0.9) == [False, False]


def test_a_signal_left_out_is_noticed() -> None:
    with pytest.raises(ValueError, match="signal"):
        SpecDecPlusPlus().should_stop(DraftStep(1, 0))


def test_the_least_length_cannot_be_more_than_the_most() -> None:
    with pytest.raises(ValueError, match="min_draft = 5"):
        SpecDecPlusPlus(min_draft=5, max_draft=4)


@pytest.mark.parametrize(("draft", "target", "threshold"), [(1.0, 10.0, 0.9), (2.0, 3.0, 1 / 3), (5.0, 4.0, 0.0)])
def test_the_threshold_of_the_theorem(draft: float, target: float, threshold: float) -> None:
    assert implied_threshold(draft, target) == pytest.approx(threshold)
