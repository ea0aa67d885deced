import json
from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from specctl.jsonl import Record
from specctl.metrics import Metrics, shown_rates
from specctl.records import Completion, DraftStep, ExtraToken, FinishReason, Round, StopReason
from specctl.round_trace import TracedRound, trace_line
from tests.support.toys import round_of

NOT_OF_A_ROUND = {"kind", "id", "turn", "round"}


def timed(accepted: int, drafted: int, stop: StopReason | None) -> Round:
    return replace(round_of(accepted, drafted), stop=stop, draft_seconds=0.5, verify_seconds=0.25, total_seconds=0.8)


# 1 + 4 + 1 = 6 tokens emitted in 3 rounds; 3 of 7 drafts accepted.
ROUNDS = (timed(0, 4, StopReason.POLICY), timed(3, 3, StopReason.MAX_DRAFT), timed(0, 0, None))


def completion(tokens: int = 6) -> Completion:
    return Completion((1,) * 10, 0, tuple(range(tokens)), "", FinishReason.LENGTH, ROUNDS, 1.0, 4.0, 1.5)


def test_rates_of_one_completion() -> None:
    """1 + 3/3 accepted a round; 3 target passes for 6 tokens; 4 of the 7 drafts thrown away for 6 tokens."""
    metrics = Metrics.of([completion()])
    assert metrics.acceptance_rate == pytest.approx(3 / 7)
    assert metrics.mean_acceptance_length == 2.0
    assert metrics.verification_rate == 0.5
    assert metrics.discard_rate == pytest.approx(4 / 6)
    assert metrics.tokens_per_second == 1.5
    assert metrics.stops == {"policy": 1, "max_draft": 1}


def test_rates_of_many_are_rates_of_the_sums() -> None:
    metrics = Metrics.of([completion(), completion(tokens=5)])
    assert (metrics.sequences, metrics.prompt_tokens, metrics.generated_tokens, metrics.rounds) == (2, 20, 11, 6)
    assert metrics.verification_rate == pytest.approx(6 / 11)
    assert (metrics.prefill_seconds, metrics.total_seconds) == (2.0, 8.0)


def test_latencies_of_many_are_means_over_the_sequences() -> None:
    """2.5 s after the first token, for 5, 1 and no further tokens."""
    record = Metrics.of([completion(), completion(tokens=2), completion(tokens=1)]).as_record()
    assert (record["ttft_ms"], record["tpot_ms"]) == (1500.0, (500.0 + 2500.0) / 2)


def test_there_is_no_time_between_tokens_that_came_in_one_round() -> None:
    at_once = replace(completion(), rounds=ROUNDS[:1])
    assert at_once.summary.tpot_ms is None
    assert Metrics.of([at_once]).as_record()["tpot_ms"] is None
    assert Metrics.of([at_once, completion(tokens=2)]).as_record()["tpot_ms"] == 2500.0


def test_a_running_sequence_counts_what_its_rounds_emitted() -> None:
    running, finished = Metrics(), Metrics.of([completion()])
    for round_ in ROUNDS:
        running.add_round(round_)
    same = ("generated_tokens", "rounds", "drafted", "accepted", "draft_seconds", "verify_seconds", "stops")
    assert [getattr(running, name) for name in same] == [getattr(finished, name) for name in same]
    assert (running.sequences, running.total_seconds) == (0, pytest.approx(2.4))


def nested() -> Round:
    """Two inner rounds: 2 of 3 and 0 of 1 kept, so 3 + 1 tokens go up, of which the target keeps 3."""
    inner = (timed(2, 3, StopReason.POLICY), timed(0, 1, StopReason.MAX_DRAFT))
    return replace(timed(3, 4, StopReason.POLICY), inner=inner)


def test_levels_count_their_own_passes() -> None:
    """The upper draft runs once an inner round, the lower once a token; the fourth token is the target's."""
    metrics = Metrics()
    metrics.add_round(nested())
    upper, lower = metrics.levels
    assert (upper.forwards, upper.drafted, upper.accepted, upper.seconds) == (2, 4, 3, pytest.approx(0.5))
    assert (lower.forwards, lower.drafted, lower.accepted, lower.seconds) == (4, 4, 2, pytest.approx(1.0))
    assert (upper.redundancy, upper.utilisation) == (pytest.approx(1 / 4), pytest.approx(2 / 4))
    assert (lower.redundancy, lower.utilisation) == (pytest.approx(1 / 2), 1.0)


def test_only_a_hierarchy_has_levels_in_its_record() -> None:
    metrics = Metrics()
    metrics.add_round(nested())
    assert json.loads(json.dumps(metrics.as_record()))["levels"] == [
        {
            "draft": "draft",
            "forwards": 2,
            "forwards_per_token": 0.5,
            "drafted": 4,
            "accepted": 3,
            "redundancy": 0.25,
            "utilisation": 0.5,
            "ms": 500.0,
        },
        {
            "draft": "draft.draft",
            "forwards": 4,
            "forwards_per_token": 1.0,
            "drafted": 4,
            "accepted": 2,
            "redundancy": 0.5,
            "utilisation": 1.0,
            "ms": 1000.0,
        },
    ]


def test_nothing_yet_is_zero_everywhere() -> None:
    record = Metrics().as_record()
    assert record.pop("tpot_ms") is None
    assert set(record.values()) == {0}


def test_the_record_is_in_milliseconds() -> None:
    record = Metrics.of([completion()]).as_record()
    assert json.loads(json.dumps(record)) == {
        "prompt_tokens": 10,
        "generated_tokens": 6,
        "rounds": 3,
        "drafted": 7,
        "accepted": 3,
        "acceptance_rate": 0.4286,
        "mean_acceptance_length": 2.0,
        "verification_rate": 0.5,
        "discard_rate": 0.6667,
        "draft_ms": 1500.0,
        "verify_ms": 750.0,
        "prefill_ms": 1000.0,
        "total_ms": 4000.0,
        "ttft_ms": 1500.0,
        "tpot_ms": 500.0,
        "tokens_per_second": 1.5,
    }


def test_nodes_count_where_there_are_trees() -> None:
    """Three levels of 10, 20 and 5 tokens, of which a path of two stays; one that the steps do not name."""
    round_ = replace(timed(2, 3, StopReason.POLICY), tree=(10, 20, 5), path=(7, 8))
    assert round_.emitted == (7, 8, 99)
    assert (round_.nodes, round_.summary.nodes) == (35, 35)
    metrics = Metrics()
    metrics.add_round(round_)
    metrics.add_round(timed(1, 3, StopReason.POLICY))
    assert (metrics.nodes, metrics.mean_acceptance_length, metrics.acceptance_rate) == (35, 2.5, 1 / 2)
    assert metrics.as_record()["nodes"] == 35
    assert ("nodes a round", "17.5") in shown_rates(metrics)
    assert "nodes" not in Metrics.of([completion()]).as_record()


def test_a_traced_round_has_its_tree() -> None:
    round_ = replace(timed(2, 3, StopReason.POLICY), tree=(10, 20, 5), path=(7, 8))
    line = trace_line(Record(1, {"id": "a"}), 0, round_)
    assert (line["tree"], line["path"]) == ([10, 20, 5], [7, 8])
    kept = TypeAdapter(TracedRound).validate_python({key: line[key] for key in line if key not in NOT_OF_A_ROUND})
    assert (kept.nodes, kept.accepted, kept.path) == (35, 2, (7, 8))
    assert not {"tree", "path"} & trace_line(Record(1, {}), 0, timed(1, 3, StopReason.POLICY)).keys()


def test_after_an_accepted_end_of_sequence_nothing_was_rejected() -> None:
    """A tree may have grown on elsewhere."""
    round_ = replace(timed(1, 3, StopReason.POLICY), tree=(2, 2, 2), path=(7,), extra=None, extra_kind=None)
    assert round_.fully_accepted
    assert round_.rejected is None


def test_copies_of_a_chain_are_counted() -> None:
    steps = tuple(DraftStep(index, 1) for index in (1, 2, 3))
    rounds = [
        Round(0, steps, 2, 7, ExtraToken.CORRECTION, StopReason.POLICY, copied=2),
        Round(1, steps, 0, 7, ExtraToken.CORRECTION, StopReason.POLICY, copied=3),
    ]
    metrics = Metrics()
    for round_ in rounds:
        metrics.add_round(round_)
    assert (metrics.copied, metrics.accepted_copies) == (5, 1)
    assert (metrics.as_record()["copied"], metrics.as_record()["accepted_copies"]) == (5, 1)
    assert ("accepted copies", "1 of 5") in shown_rates(metrics)
    assert metrics.levels[0].forwards == 1  # what was copied takes no pass of the draft
    assert [step.source for step in TracedRound.of(rounds[0]).steps] == [None, "lookup", "lookup"]
