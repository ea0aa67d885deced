"""A verifier's states wait until a draft head drafts. A rollback drops them, and inputs that were read are dropped."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specctl.models.draft_heads.block_runner import BlockPasses
from specctl.models.draft_heads.chain_runner import ChainPasses
from specctl.models.draft_heads.verifier_states import MOST, TAIL, HeadInputs, PendingStates
from specctl.models.passes.watching import States
from specctl.models.running.slot import Slot
from tests.support.toy_heads import random_block, random_eagle3


def states(start: int, end: int) -> States:
    """Place i has the state ``[i]``."""
    return {layer: torch.arange(start, end, dtype=torch.float32)[:, None] for layer in (0, 2)}


def test_parts_are_joined_cut_and_taken_once() -> None:
    waiting = PendingStates()
    waiting.add(states(0, 4), 0)
    waiting.add(states(2, 7), 2)  # two of them wait already
    waiting.add(states(5, 7), 2)
    assert waiting.count == 7
    waiting.cut(5)
    waiting.add(states(5, 6), 0)
    taken = waiting.take()
    assert taken is not None
    assert taken[0][:, 0].tolist() == taken[2][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert (waiting.count, waiting.take()) == (0, None)


@pytest.mark.parametrize("of_numpy", [False, True])
def test_a_place_that_is_left_out_is_an_error(of_numpy: bool) -> None:
    waiting, given = PendingStates(), states(0, 4)
    with pytest.raises(ValueError, match="the states of 2 places before these were not given"):
        waiting.add({layer: rows.numpy() for layer, rows in given.items()} if of_numpy else given, -2)
    assert waiting.count == 0


def test_numpys_rows_may_be_overwritten_once_they_wait() -> None:
    waiting, shared = PendingStates(), np.zeros((1, 1), np.float32)
    for place in range(150):
        shared[:] = place
        waiting.add({0: shared, 2: shared}, 0)
    waiting.cut(140)
    shared[:] = 140
    waiting.add({0: shared, 2: shared}, 0)
    taken = waiting.take()
    assert taken is not None
    assert taken[0][:, 0].tolist() == taken[2][:, 0].tolist() == list(range(141))
    assert (waiting.count, waiting.take()) == (0, None)


@pytest.mark.parametrize("numpys_first", [False, True])
def test_rows_of_numpy_and_tensors_wait_in_their_order(numpys_first: bool) -> None:
    waiting = PendingStates()
    for place in range(6):
        tensors = states(place, place + 1)
        of_numpy = (place < 3) == numpys_first
        waiting.add({layer: rows.numpy() for layer, rows in tensors.items()} if of_numpy else tensors, 0)
    waiting.cut(5)
    taken = waiting.take()
    assert taken is not None
    assert taken[0][:, 0].tolist() == taken[2][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_there_is_an_end_to_waiting() -> None:
    waiting = PendingStates()
    waiting.add(states(0, MOST - 1), 0)
    assert not waiting.full
    waiting.add(states(MOST - 1, MOST), 0)
    assert waiting.full


def chain() -> Slot:
    return Slot(ChainPasses(random_eagle3(states=3, vocabulary=5), 5))


def block() -> Slot:
    return Slot(BlockPasses(random_block(), 5))


@pytest.mark.parametrize(("make", "work"), [(chain, "fuse"), (block, "context_rows")])
def test_a_head_makes_nothing_of_states_until_it_drafts(
    make: Callable[[], Slot], work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, soon = make(), make()
    given = {layer: torch.rand(9, late.state_size) for layer in late.layers}
    made: list[int] = []
    head = late.passes.head  # type: ignore[attr-defined]
    original = getattr(head, work)

    def counted(states: States) -> torch.Tensor:
        made.append(len(next(iter(states.values()))))
        return original(states)

    monkeypatch.setattr(head, work, counted)
    for start, end in ((0, 4), (4, 5), (4, 8), (8, 9)):
        for runner in (late, soon):
            runner.observe_states(start, {layer: rows[start:end] for layer, rows in given.items()})
        soon.extend([1] * (end - soon.length), keep=0)
        soon.extend([2], keep=1)
        soon.rollback(end)
    late.rollback(7)
    late.observe_states(7, {layer: rows[7:] for layer, rows in given.items()})
    assert made == []
    assert late.observed == 9
    late.extend([1] * (9 - late.length), keep=0)
    torch.testing.assert_close(late.extend([2], keep=1).logits, soon.extend([2], keep=1).logits)
    assert made == [9]


def rows_of(count: int) -> HeadInputs:
    """Place i has the row ``[i]``."""
    rows = HeadInputs(torch.zeros(1, 1), lambda states: states[0])
    rows.observe_states(0, {0: torch.arange(count, dtype=torch.float32)[:, None]})
    rows.take_pending()
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
    assert rows.count == kept - 2  # the place that is needed must be observed again
    rows.observe_states(kept - 2, {0: torch.tensor([[7.0]])})
    rows.take_pending()
    assert rows.of(kept - 2, 1).tolist() == [[7.0]]


def test_a_rollback_to_rows_that_are_there_keeps_them() -> None:
    rows = rows_of(20)
    rows.advance(0, 20, torch.zeros(1, 1))
    assert rows.rollback(12) == 12
    assert (rows.count, rows.next(12, 1).tolist(), rows.of(-1, 2).tolist()) == (12, [[11.0]], [[0.0], [0.0]])
