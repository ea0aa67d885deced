from dataclasses import replace

import pytest

from tools.scale.passes import LLAMA_8B, LLAMA_70B, Card, Network, best_round, pass_seconds
from tools.scale.run import Plan, length, loading, simulated

QUIET = Plan(records=400, replicas=4, between_failures=float("inf"), command=0.0, longest=256)


def test_tensor_shards_are_read_at_once_and_stages_in_turn():
    card = Card(bandwidth=1e12, all_reduce=1e-5, hop=1e-4)
    network = Network(8e9, 10)
    assert pass_seconds(network, "one card", 1, card) == pytest.approx(8e-3)
    assert pass_seconds(network, "tensor", 4, card) == pytest.approx(2e-3 + 20e-5)
    assert pass_seconds(network, "pipeline", 4, card) == pytest.approx(8e-3 + 4e-4)
    assert pass_seconds(network, "tensor", 4, card, host=1e-3) == pytest.approx(10e-3)


def test_the_best_round_is_that_of_the_closed_form():
    # Half of all drafts are right and a draft costs a tenth: 1, 1.5, 1.75 and 1.875 tokens for 1, 1.1, 1.2 and 1.3.
    assert best_round(1.0, 0.1, 0.5).drafted == 2
    assert best_round(1.0, 0.1, 0.5).per_second == pytest.approx(1.75 / 1.2)
    assert best_round(1.0, 2.0, 0.5).drafted == 0


def test_a_large_draft_pays_on_shards_of_its_own():
    card = Card()
    target = pass_seconds(LLAMA_70B, "tensor", 4, card)
    alone, split = (
        best_round(target, pass_seconds(LLAMA_8B, *how, card), 0.75) for how in (("one card", 1), ("tensor", 4))
    )
    assert split.per_second > 1.2 * alone.per_second


def test_a_run_without_trouble_takes_what_its_tokens_take():
    found = simulated(QUIET)
    least = (found.generated / QUIET.per_second + QUIET.records * QUIET.prompt) / QUIET.replicas
    assert least <= found.seconds - found.starting < least + QUIET.longest / QUIET.per_second + QUIET.prompt
    assert found.starting == loading(QUIET, 4)
    assert (found.failures, found.repeated, found.commanding) == (0, 0, 0.0)
    assert simulated(QUIET) == found


def test_shared_storage_bounds_the_start_of_many():
    plan = replace(QUIET, weights=10e9, storage=10e9, link=5e9, start=1.0)
    assert [loading(plan, replicas) for replicas in (1, 2, 10)] == [3.0, 3.0, 11.0]


def test_a_command_that_is_slower_than_its_replicas_sets_the_pace():
    plan = replace(QUIET, replicas=64, command=0.5)
    found = simulated(plan)
    assert found.seconds - found.starting >= plan.records * plan.command
    assert found.commanding > 0.95


def test_a_small_window_lets_replicas_wait_for_the_longest_record():
    wide, narrow = (simulated(replace(QUIET, window=window)) for window in (32, 1))
    assert wide.held == 0
    assert narrow.held > 0.1 * narrow.seconds * QUIET.replicas
    assert narrow.seconds > wide.seconds


def test_failures_repeat_records_and_lose_none():
    found = simulated(replace(QUIET, between_failures=60.0))
    calm = simulated(QUIET)
    assert found.failures > 10
    assert found.repeated > 0
    assert found.down == pytest.approx(found.failures * (QUIET.noticed + loading(QUIET, 1)))
    assert found.seconds > calm.seconds


def test_lengths_have_the_mean_that_was_asked_for():
    import random

    draw, plan = random.Random(1), replace(QUIET, tokens=20, longest=10**6)
    drawn = [length(plan, draw) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(20, rel=0.03)
