import pytest
from factory import candidate, drafted_run, plain_run, run_set
from test_tables import CANDIDATES, ROUNDS, some_runs

from specctl.benchmark.digest import digest
from specctl.benchmark.tables import as_json
from specctl.benchmark.verdict import verdict
from specctl.observing.results import Difference, RunSet


def said(results: RunSet) -> str:
    whole = digest(results)
    assert as_json(whole)["verdict"] == verdict(whole)
    return verdict(whole)


def test_the_fastest_candidate_with_its_interval_and_identity() -> None:
    line = "verdict: hf is fastest: 1.90x (1.90 to 1.90); all 8 runs gave the tokens of none"
    assert said(run_set(CANDIDATES, some_runs())) == line
    assert said(run_set(CANDIDATES, [run for run in some_runs() if run.candidate != "hf"])).startswith(
        "verdict: svip is fastest: 1.61x (1.61 to 1.61); all 4 runs gave"
    )


def test_where_drafting_does_not_pay() -> None:
    runs = [run for prompt in "ab" for run in (plain_run(prompt, 30), drafted_run("svip", prompt, [(4, 0, "policy")]))]
    line = said(run_set([candidate("none"), candidate("svip", "svip")], runs))
    assert line.startswith("verdict: none is fastest, before svip: 0.")


def test_a_difference_is_not_overlooked() -> None:
    noted = Difference(turn=0, position=4, expected=11, found=12, gap=0.5)
    runs = [*some_runs("a"), plain_run("b", 9), drafted_run("svip", "b", ROUNDS, difference=noted)]
    assert "; GREEDY OUTPUT DIFFERS in 1 of 3 runs" in said(run_set(CANDIDATES, runs))


@pytest.mark.parametrize(
    ("results", "line"),
    [
        (run_set(CANDIDATES, []), "verdict: no candidate shares a prompt with none; tokens not compared"),
        (run_set(CANDIDATES, some_runs(), temperature=0.5), "; tokens not compared, since they were sampled"),
        (run_set(CANDIDATES, some_runs("a"), prompts=4), "; unfinished: 3 of 12 runs"),
    ],
)
def test_what_is_missing_is_said(results: RunSet, line: str) -> None:
    assert line in said(results)
