"""Rows of places that were read are dropped, and a rollback to before them is told of by a smaller count."""

import torch

from specctl.models.draft_heads.verifier_states import TAIL, WitnessedRows


def rows_of(count: int) -> WitnessedRows:
    """Place i has the row ``[i]``."""
    rows = WitnessedRows(torch.zeros(1, 1), lambda states: states[0])
    rows.witness(0, {0: torch.arange(count, dtype=torch.float32)[:, None]})
    rows.take_waiting()
    return rows


def test_a_rollback_behind_a_row_that_is_gone_knows_nothing_behind_it() -> None:
    count = 3 * TAIL
    rows = rows_of(count)
    for length, read in ((0, count - 10), (count - 10, 5)):
        rows.advance(length, read, torch.zeros(1, 1))
    kept = count - 10 - TAIL  # the first place whose row is there
    assert rows.rollback(kept + 5) == kept + 5
    assert rows.count == kept + 5
    assert rows.next(kept + 5, 1).tolist() == [[kept + 4]]
    assert rows.rollback(kept - 1) == kept - 1
    assert rows.count == kept - 2  # the place that is needed must be witnessed again
    rows.witness(kept - 2, {0: torch.tensor([[7.0]])})
    rows.take_waiting()
    assert rows.of(kept - 2, 1).tolist() == [[7.0]]


def test_a_rollback_to_rows_that_are_there_keeps_them() -> None:
    rows = rows_of(20)
    rows.advance(0, 20, torch.zeros(1, 1))
    assert rows.rollback(12) == 12
    assert (rows.count, rows.next(12, 1).tolist(), rows.of(-1, 2).tolist()) == (12, [[11.0]], [[0.0], [0.0]])
