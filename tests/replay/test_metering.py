"""A draft head is timed as it runs: each round begins with what the round before it emitted."""

from collections import defaultdict
from statistics import median
from typing import Any

import pytest
import torch

from specctl.decoding.sampling import Sampling
from specctl.models.draft_heads.block_runner import BlockRunner
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.passes.forward import Forward
from specctl.policies import Signal
from specctl.replay.costs import signal_key
from specctl.replay.recording import metering
from specctl.replay.recording.metering import ALONE, IN_A_ROW, NOT_COUNTED, PASSES, WARM_UPS, WARMING, measure
from tests.support.toy_heads import random_block
from tests.support.toys import StateTable, TableRunner, ToyDraftHead, table
from tests.support.traced import pair_of

VOCABULARY, CONTEXT, LONGEST = 120, 20, 6


class Noting(ToyDraftHead):
    """Notes how many tokens each pass reads, and for how many of them the state before was known."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(logits, 1)
        self.passes: list[tuple[int, int]] = []

    def extend(self, tokens: list[int], keep: int, *, hidden: bool = False) -> Forward:
        before = self._true
        forward = super().extend(tokens, keep, hidden=hidden)
        self.passes.append((len(tokens), self._true - before))
        return forward


def test_rounds_of_a_draft_head_begin_with_the_tokens_of_the_round_before() -> None:
    draft = Noting(table(2, vocabulary=VOCABULARY))
    pair = pair_of(StateTable(table(1, vocabulary=VOCABULARY)), draft)
    pair.target.watch(draft.layers)
    costs = measure(pair, [CONTEXT], LONGEST, [frozenset({"entropy"})], Sampling(), [0.0])
    assert costs.lengths.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert costs.draft_ms.shape == (1, 7)
    for length in range(1, LONGEST + 1):
        reread = length // 2
        round_ = [(reread + 1, reread + 1), *[(1, 0)] * (length - 1)]
        starts = [n for n in range(len(draft.passes)) if draft.passes[n : n + len(round_)] == round_]
        assert len(starts) >= PASSES * IN_A_ROW


class WideTable(TableRunner):
    """Its states are as wide as those that a block head reads."""

    def _states(self, count: int) -> dict[int, torch.Tensor] | None:
        return {layer: torch.zeros(count, 8) for layer in self._watched} or None


def test_a_head_that_drafts_blocks_is_timed_with_what_it_foresees() -> None:
    shape = LayerShape(hidden_size=8, intermediate_size=8, heads=1, kv_heads=1, head_dim=4)
    draft = BlockRunner(random_block(block_size=4, vocabulary=VOCABULARY, markov="gated", shape=shape), VOCABULARY)
    target = WideTable(table(1, vocabulary=VOCABULARY))
    target.watch(draft.layers)
    signals: frozenset[Signal] = frozenset({"next_accept_prob"})
    costs = measure(pair_of(target, draft), [CONTEXT], LONGEST, [signals], Sampling(), [0.0])
    assert costs.lengths.tolist() == [0, 1, 2, 3, 4], "a longer draft than its blocks cannot be timed"
    assert signal_key(signals) in costs.signal_ms


def test_rounds_that_warm_up_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    played = defaultdict[int, list[float]](list)  # milliseconds by length, infinite where it warms up

    def round_(_pair: Any, _sequence: Any, length: int, *_: Any) -> tuple[float, float]:
        number, again = divmod(len(played[length]), IN_A_ROW if length else ALONE)
        cold = number < WARM_UPS or again < (NOT_COUNTED if length else WARMING)
        played[length].append(float("inf") if cold else len(played[length]))
        return played[length][-1], 2 * played[length][-1]

    monkeypatch.setattr(metering, "timed_round", round_)
    pair = pair_of(*(TableRunner(table(seed, vocabulary=VOCABULARY)) for seed in (1, 2)))
    costs = measure(pair, [CONTEXT], LONGEST, [], Sampling(), [0.0])
    expected = [median(time for time in played[length] if time < float("inf")) for length in range(LONGEST + 1)]
    assert len(played[1]) == PASSES * IN_A_ROW
    assert costs.draft_ms.tolist() == [expected]
    assert costs.verify_ms.tolist() == [[2 * time for time in expected]]
