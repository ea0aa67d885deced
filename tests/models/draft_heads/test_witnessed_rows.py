"""Rows of places that were read are dropped, and a rollback to before them is told of by a smaller count."""

import torch

from specctl.models.draft_heads.witnessed_rows import TAIL, WitnessedRows


def rows_of(count: int) -> WitnessedRows:
    """Place i has the row ``[i]``."""
    rows = WitnessedRows(1, torch.device("cpu"), torch.float32)
    rows.append(torch.arange(count, dtype=torch.float32)[:, None])
    return rows


def test_a_rollback_behind_a_row_that_is_gone_knows_nothing_behind_it() -> None:
    count = 3 * TAIL
    rows = rows_of(count)
    rows.forget_read(count - 10)
    kept = count - 10 - TAIL  # the first place whose row is there
    rows.rollback(kept + 5, kept + 4)
    assert rows.count == kept + 5
    assert rows.of(kept + 4, 1).tolist() == [[kept + 4]]
    rows.rollback(kept - 1, kept - 2)
    assert rows.count == kept - 2  # the place that is needed must be witnessed again
    rows.append(torch.tensor([[7.0]]))
    assert rows.of(kept - 2, 1).tolist() == [[7.0]]


def test_a_rollback_to_rows_that_are_there_keeps_them() -> None:
    rows = rows_of(20)
    rows.rollback(12, 11)
    assert (rows.count, rows.of(11, 1).tolist(), rows.of(-1, 2).tolist()) == (12, [[11.0]], [[0.0], [0.0]])
