from dataclasses import FrozenInstanceError, replace

import pytest

from specctl.records import StopReason
from tests.support.toys import round_of


@pytest.mark.parametrize(
    ("accepted", "drafted", "emitted", "rejected", "full"),
    [
        (0, 0, (99,), None, True),
        (0, 2, (99,), 0, False),
        (1, 3, (0, 99), 1, False),
        (3, 3, (0, 1, 2, 99), None, True),
    ],
)
def test_what_a_round_says_of_itself(
    accepted: int, drafted: int, emitted: tuple[int, ...], rejected: int | None, full: bool
) -> None:
    round_ = round_of(accepted, drafted)
    assert (round_.drafted, round_.emitted, round_.fully_accepted) == (drafted, emitted, full)
    assert (round_.rejected and round_.rejected.token) == rejected


def test_an_accepted_end_of_sequence_has_nothing_after_it() -> None:
    assert replace(round_of(2, 2), extra=None, extra_kind=None).emitted == (0, 1)


def test_summaries_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        round_of(1, 1).summary.accepted = 0  # type: ignore[misc]


def test_stop_reasons_are_the_words_people_read() -> None:
    assert [str(reason) for reason in StopReason] == ["policy", "max_draft", "budget", "eos"]
