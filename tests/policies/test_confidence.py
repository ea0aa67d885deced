import pytest

from specctl.policies.published import ConfidentPrefix
from specctl.records import DraftStep


def stops(policy: ConfidentPrefix, *confidences: float) -> list[bool]:
    steps = (DraftStep(index, 0, next_accept_prob=c) for index, c in enumerate(confidences, start=1))
    return [policy.should_stop(step) for step in steps]


def test_it_stops_where_the_product_falls_below_the_threshold() -> None:
    # Products 0.9, 0.72, 0.504, 0.4536: alone, none of the four is below 0.5.
    assert stops(ConfidentPrefix(threshold=0.5), 0.9, 0.8, 0.7, 0.9) == [False, False, False, True]
    assert stops(ConfidentPrefix(threshold=0.75), 0.9, 0.8) == [False, True]


def test_every_round_begins_anew() -> None:
    policy = ConfidentPrefix(threshold=0.5)
    assert stops(policy, 0.6, 0.6) == [False, True]
    assert stops(policy, 0.6, 0.9) == [False, False]


def test_a_threshold_of_zero_never_stops() -> None:
    policy = ConfidentPrefix(threshold=0.0, max_draft=7)
    assert stops(policy, 0.0, 0.0) == [False, False]
    assert policy.draft_limit() == 7


def test_a_missing_prediction_is_an_error() -> None:
    with pytest.raises(ValueError, match="did not compute"):
        ConfidentPrefix().should_stop(DraftStep(1, 0))
