"""Latencies of tokens: what is counted, and how it is summed up."""

import json
from pathlib import Path

import numpy as np
import pytest
from factory import PREFILL_MS, TARGET_MS, as_json, candidate, drafted_run, peer_run, plain_run, run_set, tables

from specctl.benchmark.summaries import Percentiles, latency, percentiles
from specctl.observing.results import RESULTS, Run, read_results

DATA = Path(__file__).parents[1] / "data"
ROUNDS = [(5, 5, "max_draft"), (5, 0, "max_draft"), (2, 1, "policy")]
"""9 tokens in rounds of 20, 20 and 14 ms."""


def always(value: float) -> Percentiles:
    return Percentiles(*[pytest.approx(value)] * 4)


def test_a_round_is_one_arrival() -> None:
    """6 tokens after 5 + 20 ms, 1 after 20 ms more, 2 after 14 ms more: the gaps are two, not eight."""
    found = latency(drafted_run("svip", "a", ROUNDS).turns)
    assert found.ttft_ms == always(PREFILL_MS + 20)
    assert found.tpot_ms == always((20 + 14) / 8)
    assert found.itl_ms == Percentiles(17.0, 17.0, pytest.approx(19.4), pytest.approx(19.94))
    assert found.e2el_ms == always(PREFILL_MS + 54)


def test_without_a_draft_every_gap_is_the_time_per_token() -> None:
    found = latency(plain_run("a", 4).turns)
    assert (found.tpot_ms, found.itl_ms) == (always(TARGET_MS), always(TARGET_MS))


def test_one_token_has_no_time_per_further_token() -> None:
    found = latency(plain_run("a", 1).turns)
    assert (found.tpot_ms, found.itl_ms) == (None, None)
    assert found.ttft_ms == found.e2el_ms == always(PREFILL_MS + TARGET_MS)
    assert latency([]).ttft_ms is None


def test_every_turn_is_a_request() -> None:
    turns = plain_run("a", 4).turns + plain_run("a", 4, slowdown=3.0).turns
    found = latency(turns)
    assert found.tpot_ms is not None
    assert found.tpot_ms[:2] == (2 * TARGET_MS, 2 * TARGET_MS)


def many_runs() -> list[Run]:
    generator = np.random.default_rng(3)
    return [
        drafted_run(
            "svip",
            f"p{number}",
            [(k, int(generator.integers(k + 1)), "policy") for k in generator.integers(1, 9, size=12).tolist()],
            slowdown=float(generator.uniform(0.5, 3.0)),
        )
        for number in range(40)
    ]


def test_percentiles_are_numpys_on_what_the_file_holds(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = [RESULTS.line(run_set([candidate("svip")], []).header), *map(RESULTS.line, many_runs())]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    turns = [line["turns"][0] for line in lines[1:]]
    by_hand = {
        "ttft_ms": [turn["arrivals_ms"][0] for turn in turns],
        "tpot_ms": [(turn["arrivals_ms"][-1] - turn["arrivals_ms"][0]) / (len(turn["tokens"]) - 1) for turn in turns],
        "itl_ms": np.concatenate([np.diff(turn["arrivals_ms"]) for turn in turns]),
        "e2el_ms": [turn["arrivals_ms"][-1] for turn in turns],
    }
    shown = as_json(read_results(path))["overall"][0]["latency"]
    assert list(shown) == list(by_hand)
    for name, values in by_hand.items():
        expected = [np.mean(values), *(np.percentile(values, [50, 90, 99]))]
        assert list(shown[name]) == ["mean", "p50", "p90", "p99"]
        assert list(shown[name].values()) == pytest.approx(expected, abs=2e-6), name


def test_percentiles_lie_between_the_values_next_to_them() -> None:
    assert percentiles([4.0, 1.0, 3.0, 2.0, 5.0]) == Percentiles(3.0, 3.0, pytest.approx(4.6), pytest.approx(4.96))
    assert percentiles([7.0]) == Percentiles(7.0, 7.0, 7.0, 7.0)
    assert percentiles([]) is None


def test_the_table_has_a_row_for_each_latency_and_candidate() -> None:
    runs = [plain_run("a", 9), drafted_run("svip", "a", ROUNDS), peer_run("hf", "a", 9, 45.0)]
    results = run_set([candidate("none"), candidate("svip"), candidate("hf", "constant")], runs)
    table = next(table for table in tables(results) if table.title == "Latency")
    assert table.columns == ("latency", "candidate", "mean ms ↓", "p50 ms ↓", "p90 ms ↓", "p99 ms ↓")
    assert [row[:2] for row in table.rows] == [
        (name, label) for name in ("TTFT", "TPOT", "ITL", "E2EL") for label in ("none", "svip", "hf")
    ]
    assert table.rows[1] == ("TTFT", "svip", "25.0", "25.0", "25.0", "25.0")
    assert table.rows[7] == ("ITL", "svip", "17.00", "17.00", "19.40", "19.94")
    assert table.rows[8] == ("ITL", "hf", "-", "-", "-", "-")


def test_a_file_without_arrivals_has_all_but_the_gaps() -> None:
    results = read_results(DATA / "results.jsonl")
    turns = [run.turns[0] for run in results.of("none")]
    found = latency(turns)
    assert found.itl_ms is None
    assert found.ttft_ms is not None
    assert found.tpot_ms is not None
    assert found.ttft_ms.mean == pytest.approx(np.mean([turn.first_token_ms for turn in turns]))
    assert found.tpot_ms.mean == pytest.approx(np.mean([(turn.total_ms - turn.first_token_ms) / 7 for turn in turns]))
    rows = next(table for table in tables(results) if table.title == "Latency").rows
    assert {row[2:] for row in rows if row[0] == "ITL"} == {("-",) * 4}
