"""Drafting in parallel, simulated: the steps are those of the loop, the time is their sum."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.parallel import ParallelDrafter
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.passes.forward import Forward
from specctl.policies import POLICIES
from specctl.policies.published import Constant
from specctl.replay.costs import CostTable
from specctl.replay.pearl import Simulated, TwoDevices, cut, parallel_steps, rounds_in_turns, stretches
from specctl.replay.play import replay
from specctl.replay.traces import Trace, recorded_by_start
from tests.support.made_traces import flat_costs, trace
from tests.support.runner import Runner

BLOCKS = range(1, 7)
WRONG = 7
"""What a draft writes where it is wrong; the text has other tokens."""


def published_steps(kept: int, block: int) -> int:
    """Steps of the published loop, mode by mode, on a run of proposals of which the first ``kept`` are kept."""
    taken, steps, verifying = 0, 0, False
    while True:
        steps += 1
        if not verifying:  # pre-verify: one proposal alone
            if kept == 0:
                return steps
            verifying, taken = True, block
        else:  # post-verify: the rest of the block before, and the first of the new one
            if any(place >= kept for place in range(taken - block + 1, taken + 1)):
                return steps
            taken += block


@pytest.mark.parametrize("block", BLOCKS)
def test_a_stretch_takes_the_steps_of_the_published_loop(block: int) -> None:
    for kept in range(40):
        assert parallel_steps(kept + 1, block) == published_steps(kept, block)


class Reads(Runner):
    """A `Slot` that predicts a token for each place, whatever stands before it."""

    length = 0

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text
        self.context, self.device = 1 << 31, torch.device("cpu")

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:  # noqa: ARG002
        self.length += len(tokens)
        rows = torch.tensor([self.text[place] for place in range(self.length - keep, self.length)])
        return Forward(torch.nn.functional.one_hot(rows, 256).float(), None)

    def rollback(self, length: int) -> None:
        self.length = min(self.length, length)


def played(made: Trace, block: int, *, parallel: bool) -> int:
    """Rounds of the program on a text, after a prompt of one token."""
    assert made.draft.along is not None
    kind = ParallelDrafter if parallel else ModelDrafter
    drafter = kind(Reads([*made.draft.along.tokens, WRONG]), Constant(block))
    with torch.inference_mode():
        rounds = list(decode(Reads([*made.tokens, 1]), drafter, [1], len(made.tokens), Sampling()))
    assert [token for round_ in rounds for token in round_.emitted] == made.tokens
    return len(rounds)


@pytest.mark.parametrize("block", BLOCKS)
def test_rounds_are_those_of_the_program(block: int) -> None:
    """Of one stretch of any length, rejected at its end or cut by the token limit."""
    for kept in range(20):
        for tail in ([False], []):
            if made := [True] * kept + tail:
                text = trace("p", made)
                (stretch,) = stretches(text)
                assert played(text, block, parallel=True) == parallel_steps(stretch, block)
                assert played(text, block, parallel=False) == rounds_in_turns(stretch, block)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("share", [0.3, 0.8, 0.95])
@pytest.mark.representatives("0.3-2", "0.3-5", "0.8-1", "0.8-4", "0.95-3", "0.95-6")
def test_rounds_of_random_texts_are_those_of_the_program(block: int, share: float) -> None:
    chance = random.Random(block)
    for _ in range(5):
        text = trace("p", [chance.random() < share for _ in range(80)])
        found = stretches(text)
        assert sum(found) == 80
        assert played(text, block, parallel=True) == sum(parallel_steps(stretch, block) for stretch in found)
        (again,) = replay(POLICIES["constant"](draft_length=block), [text], frozenset())
        assert len(again.top.starts) == sum(rounds_in_turns(stretch, block) for stretch in found)


@pytest.mark.parametrize(
    ("rejected", "end", "lengths"),
    [([], 0, []), ([], 3, [3]), ([0], 1, [1]), ([0, 1], 2, [1, 1]), ([2], 5, [3, 2]), ([2, 4], 5, [3, 2])],
)
def test_stretches_end_at_each_rejected_token_and_at_the_end(rejected: list[int], end: int, lengths: list[int]) -> None:
    assert cut(rejected, end) == lengths
    if end:
        assert stretches(trace("p", [place not in rejected for place in range(end)])) == lengths


def test_a_draft_head_has_none() -> None:
    text = trace("p", [True])
    with pytest.raises(UsageError, match="never in parallel"):
        stretches(Trace("p", "c", 0, 20, 1, text.tokens, recorded_by_start([], []), 1.0))


def priced(costs: CostTable, lengths: Sequence[int], sync_ms: float = 0.0, widest: int = 40) -> list[Simulated]:
    return TwoDevices(costs, sync_ms, widest).simulate(lengths)


def test_a_step_takes_as_long_as_the_slower_of_both() -> None:
    """5 tokens in a row and the correction, 1 ms a draft token and 10 + 0.1 M ms a pass: the widest step is the
    target's up to 10 tokens, so the fewest steps are the fastest."""
    turns, ratio, best = priced(flat_costs(1.0, 10.0, per_token=0.5), [6])
    assert (turns.parallel, turns.block, turns.steps, turns.tokens) == (False, 5, 1, 6)
    assert turns.milliseconds == pytest.approx(5 * 1.0 + 10 + 0.5 * 5)
    assert (ratio.parallel, ratio.ratio, ratio.block, ratio.steps) == (True, True, 10, 2)
    assert ratio.milliseconds == pytest.approx(10 + (10 + 0.5 * 9))
    assert (best.parallel, best.ratio, best.block, best.steps) == (True, False, 5, 2)
    assert best.milliseconds == pytest.approx(10 + (10 + 0.5 * 4))
    assert best.tokens_per_second == pytest.approx(6e3 / 22)


def test_a_draft_that_is_slower_than_the_target_sets_the_pace() -> None:
    _, ratio, best = priced(flat_costs(8.0, 10.0), [4, 1, 1])
    assert ratio.block == best.block == 1
    assert ratio.steps == 4 + 1 + 1
    assert ratio.milliseconds == pytest.approx(6 * 10.0)
    *_, longer = priced(flat_costs(12.0, 10.0), [30])
    assert (longer.block, longer.milliseconds) == (1, pytest.approx(30 * 12.0))


def test_synchronising_is_paid_in_every_step_in_parallel() -> None:
    turns, ratio, _ = priced(flat_costs(1.0, 4.0), [9, 2])
    turns_too, later, _ = priced(flat_costs(1.0, 4.0), [9, 2], sync_ms=0.5)
    assert turns == turns_too
    assert later.milliseconds == pytest.approx(ratio.milliseconds + 0.5 * ratio.steps)
    assert ratio.steps == 3 + 2


def test_blocks_are_no_longer_than_what_was_measured() -> None:
    costs = CostTable(np.zeros(1), np.arange(5.0), 0.1 * np.arange(5.0)[None], np.full((1, 5), 9.0), {}, 0.0)
    for one in priced(costs, [200], widest=5):
        assert one.block + (not one.parallel) <= 5
