"""The table of rules: how many times as fast the first policy is."""

from tests.benchmark.factory import candidate, peer_run, run_set
from tools.measure.rules import rules_table

TOKEN_MS = {"none": 10.0, "cost-optimal": 4.0, "constant": 5.0}


def test_the_first_policy_is_compared_with_all_others_over_all_repeats() -> None:
    runs = [
        peer_run(label, prompt, 20, 20 * took * (1 + repeat), repeat=repeat)
        for prompt in ("a", "b")
        for repeat in (0, 1)
        for label, took in TOKEN_MS.items()
    ]
    results = run_set([candidate(label) for label in TOKEN_MS], runs)
    headings, rows, note = rules_table({"greedy": results, "T = 1": results})
    assert headings == ["`cost-optimal`", "greedy", "T = 1"]
    assert [one[0] for one in rows] == ["over `none`", "over `constant`"]
    assert rows[1][1] == rows[1][2]
    assert rows[0][1] > rows[1][1] > "1.2"
    assert not note
