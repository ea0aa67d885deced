"""The table of batches: what it says, and where it is written."""

from typing import Any

from tools.batch_table import HEADING, NAMES, PAGE, section, table, updated


def document(rate: float) -> dict[str, Any]:
    times = {"p50": 2.0, "p99": 3.25}
    latency = {"ttft_ms": times, "tpot_ms": None}
    return {"overall": [{"candidate": name, "tokens_per_second": rate, "latency": latency} for name in NAMES]}


def test_a_line_for_each_policy_and_number_of_texts() -> None:
    lines = table({1: document(1000.0), 4: document(1500.0)}).splitlines()
    assert lines[2] == "| none | 1 | 1,000 | 1.00 | 2.0, 3.2 | - |"
    assert lines[-1] == "| cost-optimal | 4 | 1,500 | 1.50 | 2.0, 3.2 | - |"
    assert len(lines) == 2 + 2 * len(NAMES)


def test_the_section_takes_the_place_of_an_earlier_one() -> None:
    first, second = (section({0.0: table({1: document(rate)})}, "Facts.") for rate in (1000.0, 2000.0))
    page = PAGE.read_text("utf-8")
    once = updated(page, first)
    assert once.count(HEADING) == 1
    assert updated(once, second) == once.replace(first, second)
    assert {line for line in page.splitlines() if line.startswith("#")} <= {*once.splitlines()}
