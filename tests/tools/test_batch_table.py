"""The table of batches: what it says, and where it is written."""

from pathlib import Path
from typing import Any

from tools.batch_table import HEADING, NAMES, PAGE, PEERS, against_peers, peer_flags, section, table, updated


def document(rate: float) -> dict[str, Any]:
    times = {"p50": 2.0, "p99": 3.25}
    latency = {"ttft_ms": times, "tpot_ms": None}
    return {"overall": [{"candidate": name, "tokens_per_second": rate, "latency": latency} for name in NAMES]}


def test_a_line_for_each_policy_and_number_of_texts() -> None:
    lines = table({1: document(1000.0), 4: document(1500.0)}).splitlines()
    assert lines[2] == "| none | 1 | 1,000 | 1.00 | 2.0, 3.2 | - |"
    assert lines[-1] == "| cost-optimal | 4 | 1,500 | 1.50 | 2.0, 3.2 | - |"
    assert len(lines) == 2 + 2 * len(NAMES)


def test_peers_have_lines_and_are_compared_at_their_best() -> None:
    one, two = PEERS
    documents = {batch: document(100.0 * batch) for batch in (1, 4)}
    for batch, found in documents.items():
        found["overall"] = [{**each, "runs": 5} for each in found["overall"]]
        found["overall"].append({**found["overall"][0], "candidate": one, "tokens_per_second": 250.0 / batch})
        found["differences"] = [{"candidate": one}, {"candidate": "cost-optimal"}]
    assert against_peers({1: document(1.0)}) == ""
    told = against_peers(documents)
    assert f"It writes 1.60 times the tokens/s of `{one}` with 1, whose texts differ from ours in 2 of 10 runs." in told
    assert two not in told
    documents[4]["failed"] = {two: f"{two}: out of cheese"}
    assert f"With 4 texts it failed: {two}: out of cheese." in against_peers(documents)
    assert table(documents).splitlines()[-1] == f"| `{one}` | 4 | 62 | 0.62 | 2.0, 3.2 | - |"
    del documents[4]["overall"][-1]
    assert table(documents).splitlines()[-1] == f"| `{one}` | 4 | - | - | - | - |"
    models, program = peer_flags(one, Path("p"))[3::2]
    assert (models, program) == (f"{PEERS[one]}=p/{PEERS[one]}/models", f"{PEERS[one]}=p/{PEERS[one]}/env/bin/python")


def test_the_section_takes_the_place_of_an_earlier_one() -> None:
    first, second = (section({0.0: table({1: document(rate)})}, "Facts.") for rate in (1000.0, 2000.0))
    page = PAGE.read_text("utf-8")
    once = updated(page, first)
    assert once.count(HEADING) == 1
    assert updated(once, second) == once.replace(first, second)
    said = once.replace(first, f"{first}\nWhat it tells.\n")
    assert updated(said, second) == said.replace(first, second), "what was written behind it stays"
    assert {line for line in page.splitlines() if line.startswith("#")} <= {*once.splitlines()}
