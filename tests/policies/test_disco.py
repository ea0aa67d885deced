"""DISCO's rule: each token is judged by its own prediction."""

import pytest

from specctl.policies.published import Disco
from specctl.records import DraftStep


def stops(policy: Disco, predictions: list[float]) -> list[bool]:
    return [policy.should_stop(DraftStep(n, 3, own_accept_prob=c)) for n, c in enumerate(predictions, start=1)]


def test_it_stops_behind_the_first_token_below_the_threshold() -> None:
    assert stops(Disco(threshold=0.5), [0.9, 0.6, 0.5, 0.499]) == [False, False, False, True]
    # Doubts of one token say nothing about the next: specdec++ would have stopped by 0.6 * 0.6 < 0.4.
    assert stops(Disco(threshold=0.4), [0.6, 0.6, 0.6]) == [False] * 3
    assert stops(Disco(threshold=0.0), [0.0]) == [False]


def test_its_limit_and_its_threshold_are_its_settings() -> None:
    policy = Disco(threshold=0.3, max_draft=7)
    assert (policy.draft_limit(), policy.current_threshold, policy.signals) == (7, 0.3, {"own_accept_prob"})


def test_a_prediction_that_was_not_made_is_an_error() -> None:
    with pytest.raises(ValueError, match="did not compute"):
        Disco().should_stop(DraftStep(1, 3, accept_prob=0.5))
