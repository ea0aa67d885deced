"""`specctl bench` from the command line to the results file and back, on the embedded models."""

import json
from functools import partial

import pytest

from specctl.benchmark.cost_model import CostModel, oracle_bound, signal_speed
from specctl.errors import UsageError
from specctl.observing.results import read_results
from tests.support.invoked import invoke

PROMPTS = [
    {"id": "kite", "category": "stories", "prompt": "Tom had a red kite. One windy day"},
    {"id": "apples", "category": "maths", "prompt": "Question: Ann has 3 apples and buys 2. How many?\nAnswer:"},
    {"id": "long", "category": "stories", "prompt": "Once upon a time " * 700},
    {"id": "talk", "category": "stories", "turns": ["Who are you?", "And then?"]},
]
OPTIONS = ["-n", "8", "--engine", "eager", "--policy", "constant:draft_length=3", "--policy", "svip",
           "--peer", "hf-constant", "--oracle"]  # fmt: skip


bench = partial(invoke, "bench")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(prompts):
    """A finished results file and its printed tables."""
    path = prompts.with_name("results.jsonl")
    return path, bench("-i", prompts, *OPTIONS, "--details", "-o", path, "-q").stdout


def test_every_candidate_runs_every_prompt_once_in_a_rotating_order(whole):
    results = read_results(whole[0])
    labels = [candidate.label for candidate in results.header.candidates]
    assert labels == ["none", "constant:draft_length=3", "svip", "hf-constant"]
    assert [(run.prompt, run.candidate) for run in results.runs] == [
        (prompt, labels[(place + turn) % 4])
        for place, prompt in [(0, "kite"), (1, "apples"), (3, "talk")]
        for turn in range(4)
    ]


def test_greedy_output_is_the_targets_own(whole):
    results = read_results(whole[0])
    tokens = {run.prompt: [turn.tokens for turn in run.turns] for run in results.of("none")}
    for run in results.runs:
        assert run.difference is None
        assert [turn.tokens for turn in run.turns] == tokens[run.prompt]
    assert "9 runs gave exactly the tokens of none." in whole[1]


def test_the_last_line_is_the_verdict(whole):
    assert whole[1].splitlines()[-1].startswith("verdict: ")
    assert whole[1].count("verdict: ") == 1


def test_quiet_leaves_out_what_was_written(whole, tmp_path):
    assert bench("--from", whole[0], "--spec-bench-out", tmp_path, "-q").stderr == ""
    assert bench("--from", whole[0], "--spec-bench-out", tmp_path, "--force").stderr.startswith("wrote ")


def test_a_prompt_that_does_not_fit_is_left_out_with_a_message(whole):
    assert list(read_results(whole[0]).skipped) == ["long"]
    assert "1 of 4 prompts could not be run" in whole[1]


@pytest.mark.slow
def test_a_peer_leaves_out_a_prompt_that_does_not_fit(tmp_path):
    """The peer is third of three candidates and runs first on the third prompt."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(PROMPTS[place]) + "\n" for place in (0, 1, 2)), encoding="utf-8")
    results = tmp_path / "results.jsonl"
    bench("-i", path, "-n", "4", "--policy", "constant", "--peer", "hf-constant", "-o", results, "-q")
    assert list(read_results(results).skipped) == ["long"]


def test_no_policy_beats_the_oracle(whole):
    results = read_results(whole[0])
    for run in results.runs:
        if run.turns[0].rounds:
            assert sum(turn.target_forwards for turn in run.turns) >= results.oracle[run.prompt] - len(run.turns)


@pytest.mark.slow
def test_no_policy_beats_the_oracle_of_a_draft_head(prompts, tmp_path):
    """A round of the oracle begins where the one before ended, which a reading by places alone would not know."""
    path = tmp_path / "results.jsonl"
    policies = [part for name in ("constant", "cost-optimal") for part in ("--policy", name)]
    bench("-p", "embedded-eagle3", "-i", prompts, "-n", "12", *policies, "--oracle", "-o", path, "-q")
    results = read_results(path)
    drafted = [run for run in results.runs if run.turns[0].rounds and run.candidate != "none"]
    assert len(drafted) >= 4
    for run in drafted:
        assert sum(turn.target_forwards for turn in run.turns) >= results.oracle[run.prompt] - len(run.turns)
        assert results.oracle[run.prompt] < sum(len(turn.tokens) for turn in run.turns)


def test_the_tokens_of_every_candidate_arrive_round_by_round(whole):
    """Peers too, whose rounds are seen by their streamer only."""
    for run in read_results(whole[0]).runs:
        for turn in run.turns:
            assert len(turn.arrivals_ms) == turn.target_forwards
            assert turn.arrivals_ms[0] == pytest.approx(turn.first_token_ms, abs=1e-3)
            assert list(turn.arrivals_ms) == sorted(turn.arrivals_ms)
            assert turn.arrivals_ms[-1] <= turn.total_ms


def test_the_signal_bound_is_shown_with_the_oracle(whole):
    results = read_results(whole[0])
    bound = results.signal_bound
    assert bound is not None
    baseline = results.of("none")
    assert bound.tokens == sum(run.tokens for run in baseline)
    assert bound.prompts == len(results.oracle)
    assert sum(results.oracle.values()) - len(baseline) <= bound.passes <= bound.tokens
    document = json.loads(bench("--from", whole[0], "--json").stdout)
    assert document["signal_bound"]["tokens_per_second"] > 0
    assert document["oracle"]["tokens_per_second"] > 0
    steady = CostModel(1.0, 8.0, None, 0)  # times that were measured on a busy machine may make any order of the two
    limit = oracle_bound(results, "none", steady)
    assert signal_speed(results, steady) <= limit.tokens_per_second
    shares = {cost["candidate"]: cost["signal_share"] for cost in document["costs"]}
    assert shares["svip"] > 0
    assert shares["hf-constant"] is not None


def test_costs_are_measured_at_every_width_that_runs(whole):
    results = read_results(whole[0])
    widths = {round_.drafted + 1 for run in results.runs for round_ in run.rounds}
    assert results.costs is not None
    assert results.costs.draft > 0
    assert max(results.costs.target) >= max(widths)


def test_earlier_results_show_the_same_table(whole):
    assert bench("--from", whole[0], "--details").stdout == whole[1]
    brief = bench("--from", whole[0]).stdout.splitlines()
    assert brief[-1] == whole[1].splitlines()[-1]
    assert [line.split()[0] for line in brief[2:6]] == ["none", "constant:draft_length=3", "svip", "hf-constant"]
    assert "1 of 4 prompts could not be run on this pair. --details shows" in brief[-2]
    assert len(brief) == 8
    document = json.loads(bench("--from", whole[0], "--json").stdout)
    assert document["expected_runs"] == 12


@pytest.mark.slow
def test_a_killed_benchmark_continues_where_it_stopped(whole, prompts, tmp_path):
    path = tmp_path / "half.jsonl"
    lines = whole[0].read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:7]) + lines[7][:40], encoding="utf-8")
    bench("-i", prompts, *OPTIONS, "-o", path, "--resume", "-q")
    resumed, uninterrupted = read_results(path), read_results(whole[0])
    assert [run.key for run in resumed.runs] == [run.key for run in uninterrupted.runs]
    assert [run.tokens for run in resumed.runs] == [run.tokens for run in uninterrupted.runs]
    assert resumed.oracle == uninterrupted.oracle
    assert resumed.signal_bound is not None


def test_a_benchmark_killed_before_its_last_comparison_makes_it(tmp_path):
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text(json.dumps(PROMPTS[0]) + "\n", encoding="utf-8")
    options = ["-i", prompts, "-n", "6", "--policy", "svip", "-o", path, "-q"]
    bench(*options)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    (run,) = (line for line in lines if line["kind"] == "run" and line["candidate"] == "svip")
    run["turns"][0]["tokens"][3] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    bench(*options, "--resume")
    (different,) = [run for run in read_results(path).runs if run.difference is not None]
    assert (different.candidate, different.difference.position) == ("svip", 3)


def test_the_default_policies_need_no_calibration(prompts, tmp_path):
    path = tmp_path / "results.jsonl"
    bench("-i", prompts, "--limit", "1", "-n", "4", "-o", path, "-q")
    labels = [one.label for one in read_results(path).header.candidates]
    assert labels == ["none", "svip:threshold=0.54", "constant", "heuristic", "cost-optimal"]


def test_a_target_alone_has_nothing_to_be_compared_with(prompts):
    found = bench("-i", prompts, "--limit", "1", "-n", "4", "--target", "embedded:target")
    assert "there is nothing to compare the target with: name a draft with --draft MODEL" in found.stderr
    assert found.stdout.splitlines()[-1].startswith("verdict: none ran alone, with nothing to compare it with")


def test_another_benchmark_is_not_mixed_in(whole, prompts):
    before = whole[0].read_bytes()
    with pytest.raises(UsageError, match="another benchmark: not the same candidates"):
        bench("-i", prompts, "-n", "8", "--engine", "eager", "-o", whole[0], "--resume")
    assert whole[0].read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "hf-constnat"], "did you mean 'hf-constant'"),
        (["--resume"], "--resume needs the results of the earlier run"),
        (["--lengths", "1,x"], "not a list of positive numbers"),
        (["--oracle", "-t", "1"], "only in greedy decoding"),
        (["-p", "embedded", "-p", "qwen14b-svip"], "different models"),
        (["--suite", "spec-bnch"], "no suite"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(UsageError, match=message):
        bench(*arguments)


@pytest.mark.slow
def test_answers_for_spec_bench_and_a_report(whole, tmp_path):
    bench("--from", whole[0], "--spec-bench-out", tmp_path / "answers", "--report", tmp_path / "report")
    assert len(list((tmp_path / "answers").glob("*.jsonl"))) == 4
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


def test_trees_have_no_oracle(prompts):
    with pytest.raises(UsageError, match="--oracle is a bound for chains"):
        bench("-i", prompts, "--policy", "svip", "--tree", "9", "--oracle")
    with pytest.raises(UsageError, match="--tree 99"):
        bench("-i", prompts, "--policy", "svip", "--tree", "99")


@pytest.mark.slow
def test_trees_are_compared_with_chains(prompts, tmp_path):
    results = tmp_path / "results.jsonl"
    bench("-i", prompts, "-n", "12", "--limit", "1", "--policy", "svip", "--tree", "12", "-o", results, "-q")
    chain, tree = (read_results(results).of(label) for label in ("svip", "svip(tree=12)"))
    assert tree[0].turns[0].text == chain[0].turns[0].text
    assert all(sum(round_.tree) <= 11 for round_ in tree[0].rounds)
    assert any(round_.nodes > round_.drafted for round_ in tree[0].rounds)
    table = bench("--from", results, "--details").stdout
    assert "svip(tree=12)" in table
    assert "nodes" in table


@pytest.mark.exhaustive
def test_ours_runs_eagerly_too_beside_transformers_own_loop(prompts, tmp_path):
    asked = ["-i", prompts, "--limit", "1", "-n", "8", "--policy", "svip", "--peer", "hf-constant", "-q"]
    path = tmp_path / "static.jsonl"
    shown = bench(*asked, "--engine", "static", "-o", path, "--details").stdout
    results = read_results(path)
    assert [one.label for one in results.header.candidates] == ["none", "svip", "svip (eager)", "hf-constant"]
    first, *others = ([turn.tokens for turn in run.turns] for run in results.runs)
    assert len(others) == 3
    assert all(tokens == first for tokens in others)
    rounds = {run.candidate: [(one.drafted, one.accepted) for one in run.rounds] for run in results.runs}
    assert rounds["svip (eager)"] == rounds["svip"] != []
    assert "compare hf-constant with svip (eager)" in shown
    speed = next(line for line in shown.splitlines() if line.startswith("svip (eager)"))
    assert speed.split()[1:3] == ["(eager)", "eager"]
    whole = path.read_bytes()
    bench(*asked, "--engine", "static", "-o", path, "--resume")
    assert path.read_bytes() == whole, "nothing is missing"

    assert "svip (eager)" not in bench(*asked, "--engine", "static", "--no-counterpart").stdout
    assert "svip (eager)" not in bench(*asked, "--engine", "eager").stdout, "all run eagerly"


def test_an_interrupt_shows_the_rounds_that_are_complete(prompts, monkeypatch):
    ended = []

    def interrupt(_, run):
        ended.append(run)
        if len(ended) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("specctl.benchmark.progress.BenchProgress.add", interrupt)
    found = bench("-i", prompts, "-n", "4", "--policy", "svip", "--policy", "constant", code=130)
    assert "Stopped after 4 of 12 runs (only the 3 in complete rounds count)." in found.stdout
    last = found.stdout.splitlines()[-1]
    assert last.endswith("; stopped after 4 of 12 runs (only the 3 in complete rounds count)")
    assert "interrupted" in found.stderr
