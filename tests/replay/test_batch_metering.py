"""Rounds of several texts are timed as the hub runs them: all of them in each pass."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specctl.commands.flags import batch_sizes
from specctl.decoding.sampling import Sampling
from specctl.errors import UsageError
from specctl.models.passes.forward import Forward
from specctl.models.running.pair import Pair
from specctl.models.running.passes import Request
from specctl.replay.recording.batch_metering import IN_A_ROW, REPEATS, TYPICAL, measure_batches, require_batches
from specctl.replay.recording.metering import timed_round
from tests.support.made_traces import flat_costs
from tests.support.toys import TableRunner, ToldPasses, table
from tests.support.traced import pair_of

VOCABULARY = 120


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
        assert read >= 2 * REPEATS * IN_A_ROW, "a verification reads the newest token and the draft, at both contexts"
    assert costs.draft_ms.shape == costs.verify_ms.shape == (2, len(costs.lengths))
    assert (costs.lengths[-1], costs.contexts.tolist()) == (40, [10, 100])
    assert (costs.verify_ms > 0).all()
    assert (costs.overhead_ms, list(costs.signal_ms)) == (1.5, ["entropy"])


def test_a_round_of_a_batch_takes_what_all_its_texts_took(monkeypatch: pytest.MonkeyPatch) -> None:
    def round_of(pair: Pair, sequence: list[int], length: int, signals: Any, *more: Any) -> tuple[float, float]:
        timed_round(pair, sequence, length, signals, *more)
        return length + (4.0 if signals else 1.0), 10.0

    monkeypatch.setattr("specctl.replay.recording.batch_metering.timed_round", round_of)
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
