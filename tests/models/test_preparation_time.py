"""The clock that stands still while passes are compiled and captured."""

import pytest

from specctl.models.passes import preparation_time
from specctl.models.passes.preparation_time import OwnClock, preparing, waited_seconds, working_seconds


def test_no_preparation_is_work_and_one_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(preparation_time, "perf_counter", lambda: now[0])
    before = working_seconds()
    for worked in (1.0, 2.0):
        with preparing():
            now[0] += 8.0
            with preparing():
                now[0] += 16.0
            now[0] += 32.0
        now[0] += 1.0
        assert working_seconds() - before == pytest.approx(worked)


def test_what_others_did_was_waited_for_and_what_was_prepared_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(preparation_time, "perf_counter", lambda: now[0])
    before, own = waited_seconds(), working_seconds()
    with preparing():
        now[0] += 8.0
    assert waited_seconds() - before == pytest.approx(0)
    now[0] += 3.0
    with OwnClock(own):
        assert waited_seconds() - before == pytest.approx(3)
