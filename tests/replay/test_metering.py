"""A round is timed as it runs: a draft head reads what the round before emitted, several texts share each pass."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
import torch

from specctl.commands.flags import batch_sizes
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.draft_heads.block_runner import BlockPasses
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.passes.forward import Forward
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from specctl.policies import Signal
from specctl.replay.costs import signal_key
from specctl.replay.recording import metering
from specctl.replay.recording.metering import (
    ALONE,
    BATCH_PASSES,
    IN_A_ROW,
    NOT_COUNTED,
    PASSES,
    TYPICAL,
    WARM_UPS,
    WARMING,
    measure,
    measure_batches,
    require_batches,
    timed_round,
)
from tests.support.made_traces import flat_costs
from tests.support.toy_heads import random_block
from tests.support.toys import StateTable, TableRunner, ToldPasses, ToyDraftHead, table
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
    draft = Slot(
        BlockPasses(random_block(block_size=4, vocabulary=VOCABULARY, markov="gated", shape=shape), VOCABULARY)
    )
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


class Rows(TableRunner):
    """Notes the texts of each pass and how many tokens each reads."""

    no_rows = None

    def over(self, count: int) -> Any:
        self.passes: list[tuple[int, set[int]]] = []

        def run(requests: Sequence[Request]) -> list[Forward]:
            self.passes.append((len(requests), {len(request.tokens) for request in requests}))
            return [Forward(torch.zeros(request.keep, VOCABULARY)) for request in requests]

        return ToldPasses(count, run)


def test_every_text_takes_part_in_every_pass_and_the_tables_are_by_number() -> None:
    target, draft = (Rows(table(seed, vocabulary=VOCABULARY)) for seed in (1, 2))
    alone = flat_costs(1.0, 10.0, rest=0.5)
    found = measure_batches(pair_of(target, draft), [3], alone, [frozenset({"entropy"})], Sampling())
    (rows, costs), *others = found.items()
    assert (rows, others) == (3, [])
    assert {count for count, _ in [*target.passes, *draft.passes]} == {3}
    for length in costs.lengths.astype(int):
        read = target.passes.count((3, {length + 1}))
        assert read >= 2 * BATCH_PASSES * IN_A_ROW, (
            "a verification reads the newest token and the draft, at both contexts"
        )
    assert costs.draft_ms.shape == costs.verify_ms.shape == (2, len(costs.lengths))
    assert (costs.lengths[-1], costs.contexts.tolist()) == (40, [10, 100])
    assert (costs.verify_ms > 0).all()
    assert (costs.overhead_ms, list(costs.signal_ms)) == (1.5, ["entropy"])


def test_a_round_of_a_batch_takes_what_all_its_texts_took(monkeypatch: pytest.MonkeyPatch) -> None:
    def round_of(pair: Pair, sequence: list[int], length: int, signals: Any, *more: Any) -> tuple[float, float]:
        timed_round(pair, sequence, length, signals, *more)
        return length + (4.0 if signals else 1.0), 10.0

    monkeypatch.setattr("specctl.replay.recording.metering.timed_round", round_of)
    target, draft = (Rows(table(seed, vocabulary=VOCABULARY)) for seed in (1, 2))
    found = measure_batches(pair_of(target, draft), [3], flat_costs(1.0, 10.0), [frozenset({"entropy"})], Sampling())
    costs = found[3]
    assert costs.draft_ms.tolist() == [[3 * (length + 1.0) for length in costs.lengths]] * 2
    assert (costs.verify_ms == 30.0).all()
    assert costs.signal_ms["entropy"] * min(TYPICAL, costs.lengths[-1]) == pytest.approx(3.0)


def test_a_pair_that_writes_one_text_at_a_time_has_no_numbers() -> None:
    with pytest.raises(UsageError, match="texts are written one at a time"):
        require_batches(pair_of(*(TableRunner(table(seed, vocabulary=VOCABULARY)) for seed in (1, 2))))


def test_numbers_of_texts_are_read_from_the_flag() -> None:
    assert batch_sizes(None) == batch_sizes("1") == (1, [])
    assert batch_sizes("8") == (8, [8])
    assert batch_sizes("16, 1,4,4") == (16, [4, 16])
    assert batch_sizes("auto") == ("auto", [])
    for wrong in ("1,x", "0,4", "4,", "0", "1,auto"):
        with pytest.raises(UsageError, match="--batch"):
            batch_sizes(wrong)
