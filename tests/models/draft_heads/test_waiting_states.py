"""States wait as they came until a draft head drafts, and what is taken back of them is gone."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specctl.models.draft_heads.block_runner import BlockRunner
from specctl.models.draft_heads.chain_runner import HeadRunner
from specctl.models.draft_heads.verifier_states import MOST, WaitingStates
from specctl.models.passes.watching import States
from specctl.models.running.slot import Slot
from tests.support.toy_heads import random_block, random_eagle3


def states(start: int, end: int) -> States:
    """Place i has the state ``[i]``."""
    return {layer: torch.arange(start, end, dtype=torch.float32)[:, None] for layer in (0, 2)}


def test_parts_are_joined_cut_and_taken_once() -> None:
    waiting = WaitingStates()
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
    waiting, given = WaitingStates(), states(0, 4)
    with pytest.raises(ValueError, match="the states of 2 places before these were not given"):
        waiting.add({layer: rows.numpy() for layer, rows in given.items()} if of_numpy else given, -2)
    assert waiting.count == 0


def test_numpys_rows_may_be_overwritten_once_they_wait() -> None:
    waiting, shared = WaitingStates(), np.zeros((1, 1), np.float32)
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
    waiting = WaitingStates()
    for place in range(6):
        tensors = states(place, place + 1)
        of_numpy = (place < 3) == numpys_first
        waiting.add({layer: rows.numpy() for layer, rows in tensors.items()} if of_numpy else tensors, 0)
    waiting.cut(5)
    taken = waiting.take()
    assert taken is not None
    assert taken[0][:, 0].tolist() == taken[2][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_there_is_an_end_to_waiting() -> None:
    waiting = WaitingStates()
    waiting.add(states(0, MOST - 1), 0)
    assert not waiting.full
    waiting.add(states(MOST - 1, MOST), 0)
    assert waiting.full


def chain() -> Slot:
    return HeadRunner(random_eagle3(states=3, vocabulary=5), 5)


def block() -> Slot:
    return BlockRunner(random_block(), 5)


@pytest.mark.parametrize(("make", "work"), [(chain, "fuse"), (block, "context_rows")])
def test_a_head_makes_nothing_of_states_until_it_drafts(
    make: Callable[[], Slot], work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, soon = make(), make()
    given = {layer: torch.rand(9, late.state_size) for layer in late.layers}
    made: list[int] = []
    head = vars(late)["head"]
    original = getattr(head, work)

    def counted(states: States) -> torch.Tensor:
        made.append(len(next(iter(states.values()))))
        return original(states)

    monkeypatch.setattr(head, work, counted)
    for start, end in ((0, 4), (4, 5), (4, 8), (8, 9)):
        for runner in (late, soon):
            runner.witness(start, {layer: rows[start:end] for layer, rows in given.items()})
        soon.extend([1] * (end - soon.length), keep=0)
        soon.extend([2], keep=1)
        soon.rollback(end)
    late.rollback(7)
    late.witness(7, {layer: rows[7:] for layer, rows in given.items()})
    assert made == []
    assert late.witnessed == 9
    late.extend([1] * (9 - late.length), keep=0)
    torch.testing.assert_close(late.extend([2], keep=1).logits, soon.extend([2], keep=1).logits)
    assert made == [9]
