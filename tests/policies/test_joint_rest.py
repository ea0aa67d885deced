"""Rows of a batch rest together: all begin and end in the same rounds, which are told of once."""

import pytest

from specctl.policies.cost_optimal import JointRest
from specctl.policies.draft_account import DraftAccount, DraftAllowance
from specctl.policies.round_times import RoundTimes


@pytest.fixture
def allowance() -> DraftAllowance:
    return DraftAllowance(RoundTimes(0.125), DraftAccount(), asleep=7)


@pytest.fixture
def rest(allowance: DraftAllowance) -> "JointRest":
    """Of three rows."""
    found: JointRest = JointRest(allowance)
    assert not found
    assert found.begin("a") == 0, "nothing was offered"
    found.offer("abc")
    assert [found.begin(row) for row in "abcx"] == [7, 7, 7, 0]
    assert found
    return found


def test_a_rest_is_told_of_once(allowance: DraftAllowance, rest: "JointRest") -> None:
    for row in "abc":
        rest.end(row, 7)
    assert (allowance.asleep, allowance.idle, bool(rest)) == (0, 7, False)
    assert [rest.begin(row) for row in "abc"] == [0] * 3, "it was offered for one round"


def test_whoever_ends_at_the_end_ends_it_for_all(rest: "JointRest") -> None:
    rest.end("a", 7)
    assert not rest


def test_texts_that_end_before_leave_the_others_at_rest(allowance: DraftAllowance, rest: "JointRest") -> None:
    rest.end("a", 4)
    rest.end("b", 2)
    rest.end("a", 5)
    assert (allowance.asleep, allowance.idle, bool(rest)) == (3, 4, True)
    rest.end("c", 7)
    assert (allowance.asleep, allowance.idle, bool(rest)) == (0, 7, False)


def test_the_next_rest_is_counted_anew(allowance: DraftAllowance, rest: "JointRest") -> None:
    for row in "abc":
        rest.end(row, 3)
    rest.offer("ab")
    assert [rest.begin(row) for row in "abc"] == [4, 4, 0]
    rest.end("a", 2)
    assert (allowance.asleep, allowance.idle) == (2, 5)


def test_a_row_in_which_another_text_begins_rests_no_more_and_may_not(
    allowance: DraftAllowance, rest: "JointRest"
) -> None:
    for row in "abc":
        rest.leave(row)
    assert not rest
    rest.offer("ab")
    rest.leave("a")
    assert (rest.begin("a"), rest.begin("b"), allowance.idle) == (0, 7, 0)
