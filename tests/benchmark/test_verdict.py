import pytest
from factory import candidate, drafted_run, peer, peer_run, plain_run, run_set, tables
from test_tables import CANDIDATES, ROUNDS, some_runs

from specctl.benchmark.digest import digest, verdict
from specctl.benchmark.report import as_json
from specctl.observing.results import Difference, RunSet


def said(results: RunSet) -> str:
    whole = digest(results)
    assert as_json(whole)["verdict"] == verdict(whole)
    return verdict(whole)


def test_the_fastest_candidate_with_its_interval_and_identity() -> None:
    assert said(run_set(CANDIDATES, some_runs())) == (
        "verdict: hf is fastest: 1.90x (1.90 to 1.90, only 4 prompts), 1.18x (1.18 to 1.18, only 4 prompts) as fast as "
        "svip; all 8 runs gave the tokens of none"
    )
    assert said(run_set(CANDIDATES, [run for run in some_runs() if run.candidate != "hf"])).startswith(
        "verdict: svip is fastest: 1.61x (1.61 to 1.61, only 4 prompts), 1.61x (1.61 to 1.61, only 4 prompts) as fast "
        "as none; all 4 runs gave"
    )


def test_intervals_of_few_prompts_are_doubted_under_their_table() -> None:
    note = tables(run_set(CANDIDATES, some_runs()))[0].note
    assert "Do not trust these intervals: only 4 prompts." in note


def test_where_drafting_does_not_pay() -> None:
    runs = [run for prompt in "ab" for run in (plain_run(prompt, 30), drafted_run("svip", prompt, [(4, 0, "policy")]))]
    line = said(run_set([candidate("none"), candidate("svip", "svip")], runs))
    assert line.startswith("verdict: none is fastest: 1.00x, 2.26x (2.26 to 2.26, only 2 prompts) as fast as svip; ")


def test_a_policy_that_stopped_drafting_is_named() -> None:
    seldom = [(2, 0, "policy"), *[(0, 0, "max_draft")] * 19]
    runs = [*some_runs("a"), drafted_run("cost-optimal", "a", seldom)]
    line = said(run_set([*CANDIDATES, candidate("cost-optimal")], runs))
    assert "; cost-optimal drafted in 5% of its rounds; " in line
    assert "svip drafted" not in line


def test_a_difference_is_not_overlooked() -> None:
    noted = Difference(turn=0, position=4, expected=11, found=12, gap=0.5)
    runs = [*some_runs("a"), plain_run("b", 9), drafted_run("svip", "b", ROUNDS, difference=noted)]
    assert "; GREEDY OUTPUT DIFFERS in 1 of 3 runs" in said(run_set(CANDIDATES, runs))


@pytest.mark.parametrize(
    ("results", "line"),
    [
        (run_set(CANDIDATES, []), "verdict: no candidate shares a prompt with none; tokens not compared"),
        (run_set(CANDIDATES, some_runs(), temperature=0.5), "; tokens not compared, since they were sampled"),
        (run_set(CANDIDATES, some_runs("a"), prompts=4), "; stopped after 3 of 12 runs"),
    ],
)
def test_what_is_missing_is_said(results: RunSet, line: str) -> None:
    assert line in said(results)


def test_candidates_whose_distance_may_be_chance_are_level() -> None:
    """Each is faster on one prompt, though both are clearly faster than none."""
    fast, slow = [(5, 5, "policy")] * 4, [(5, 4, "policy")] * 5
    field = [candidate("none"), candidate("constant"), candidate("svip")]
    runs = [plain_run(prompt, 24) for prompt in "ab"]
    runs += [drafted_run("svip", "a", fast), drafted_run("svip", "b", slow)]
    runs += [drafted_run("constant", "a", slow), drafted_run("constant", "b", fast)]
    results = run_set(field, runs)
    results.header.engines.update({"target": "onnx", "draft": "onnx"})
    assert said(results).startswith("verdict: constant and svip are level on onnx: 2.")
    results.header.engines["draft"] = "eager"
    assert said(results).startswith("verdict: constant and svip are level on target onnx, draft eager: 2."), (
        "the engine of the baseline is not theirs"
    )


def test_a_difference_that_is_small_on_every_prompt_is_no_chance() -> None:
    """The prompts differ by much more than the candidates, whose own intervals overlap."""
    field = [candidate("none"), candidate("constant"), candidate("svip")]
    runs = []
    for prompt, accepted in zip("abcd", (3, 4, 6, 8), strict=True):
        shapes = [(8, accepted, "policy")] * 10
        runs += [plain_run(prompt, 10 * (accepted + 1)), drafted_run("svip", prompt, shapes)]
        runs += [drafted_run("constant", prompt, shapes, slowdown=1.02)]
    whole = digest(run_set(field, runs))
    svip, constant = (one.speedup.of_totals for one in whole.overall if one.candidate != "none" and one.speedup)
    assert None not in (svip.low, constant.high)
    assert svip.low < constant.high  # type: ignore[operator]
    assert verdict(whole).startswith("verdict: svip is fastest: ")
    assert ", 1.02x (1.02 to 1.02, only 4 prompts) as fast as constant" in verdict(whole)


def test_one_prompt_names_no_winner() -> None:
    assert said(run_set(CANDIDATES, some_runs("a"))).startswith(
        "verdict: one prompt cannot show which is fastest: hf 1.90x (only 1 prompt), svip 1.61x (only 1 "
        "prompt), none 1.00x; "
    )


def test_what_ran_eagerly_beside_others_is_compared_by_itself() -> None:
    ours = candidate("svip").eagerly
    field = [candidate("none"), candidate("svip"), ours, peer("hf-constant")]
    runs = []
    for prompt in "ab":
        runs += [plain_run(prompt, 30), drafted_run("svip", prompt, ROUNDS), peer_run("hf-constant", prompt, 9, 205.0)]
        runs += [drafted_run("svip (eager)", prompt, ROUNDS, slowdown=4.0)]
    results = run_set(field, runs)
    results.header.engines.update({"target": "onnx", "draft": "onnx"})
    line = said(results)
    assert line.startswith("verdict: svip is fastest on onnx: ")
    assert "; of those that ran eagerly, hf-constant is fastest: " in line
    assert " as fast as svip (eager); " in line


def test_a_difference_in_an_incomplete_round_is_told_too() -> None:
    noted = Difference(turn=0, position=4, expected=11, found=12, gap=0.5)
    runs = [*some_runs("a"), plain_run("b", 9), drafted_run("svip", "b", ROUNDS, difference=noted)]
    line = said(run_set(CANDIDATES, runs, prompts=4))
    assert "; GREEDY OUTPUT DIFFERS in 1 of 3 runs; stopped after 5 of 12 runs (only the 3 in complete" in line
