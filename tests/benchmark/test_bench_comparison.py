"""`bench --compare`: two results files, made by hand with exact times."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factory import PREFILL_MS, candidate, drafted_run, peer, peer_run, plain_run, run_set
from typer.testing import CliRunner

from specctl.benchmark.comparison import (
    Comparison,
    Texts,
    compare_files,
    compare_results,
    comparison_json,
    comparison_tables,
    pair_up,
)
from specctl.commands.app import app
from specctl.errors import UsageError
from specctl.observing.results import RESULTS, Candidate, Run, RunSet
from specctl.statistics import Interval

DATA = Path(__file__).parents[1] / "data"
CANDIDATES = [candidate("none"), candidate("svip", threshold=0.3)]
ROUNDS = [(5, 5, "max_draft"), (5, 0, "max_draft"), (2, 1, "policy")]
"""9 tokens in 54 ms after the prompt's 5."""


def some_runs(prompts: str = "abcd", slower: float = 1.0, svip: float = 1.0, **changes: Any) -> list[Run]:
    """Runs of `none` and svip whose passes take ``slower`` times as long; those of svip ``svip`` times that."""
    return [
        run
        for prompt in prompts
        for run in (
            plain_run(prompt, 9, slowdown=slower, **changes),
            drafted_run("svip", prompt, ROUNDS, slowdown=slower * svip, **changes),
        )
    ]


def results(runs: list[Run], candidates: list[Candidate] | None = None, **header: Any) -> RunSet:
    made = run_set(candidates or CANDIDATES, runs)
    return RunSet(replace(made.header, **header), made.runs)


def compared(a: RunSet, b: RunSet) -> Comparison:
    return compare_results(a, b)


def constant(value: float, prompts: int = 4) -> Interval:
    return Interval(*[pytest.approx(value)] * 3, prompts)


def save(path: Path, made: RunSet) -> Path:
    lines = [json.dumps(RESULTS.line(record)) for record in (made.header, *made.runs)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_the_same_file_twice_is_as_fast_as_itself() -> None:
    found = compared(results(some_runs()), results(some_runs()))
    assert found.differences == []
    assert (found.candidates_left_out, found.prompts_left_out) == ({}, {})
    assert found.none_differs is None
    assert [one.verdict for one in found.candidates] == [
        "none: A and B are level, B at 1.00x (1.00 to 1.00, only 4 prompts) of A; texts identical",
        "svip: A and B are level, B at 1.00x (1.00 to 1.00, only 4 prompts) of A; texts identical",
    ]


def test_ratios_by_hand() -> None:
    """A takes 5 + 54 ms for 9 tokens, 20 of them for the first; B 5 + 27, 10 for the first. `none`: 5 + 90, 5 + 45."""
    found = compared(results(some_runs()), results(some_runs(slower=0.5)))
    svip = found.candidates[1]
    assert svip.tokens_per_second == (pytest.approx(9e3 / 59), pytest.approx(9e3 / 32))
    assert svip.ratio.of_totals == svip.ratio.of_prompts == constant(59 / 32)
    assert svip.ttft == constant((PREFILL_MS + 10) / (PREFILL_MS + 20))
    assert svip.tpot == constant(0.5)
    assert svip.against_none == constant((59 / 32) / (95 / 50))
    assert svip.texts == Texts(4, 0)
    assert svip.verdict == "svip: B is faster, B at 1.84x (1.84 to 1.84, only 4 prompts) of A; texts identical"
    assert found.none_differs == constant(95 / 50)


def test_a_slower_machine_is_told_from_a_slower_policy() -> None:
    """Everything takes twice as long in B, passes and prompts; svip three times on top of it."""
    slow = [
        replace(run, turns=tuple(replace(turn, total_ms=2 * turn.total_ms) for turn in run.turns))
        for run in some_runs(svip=3.0)
    ]
    none, svip = compared(results(some_runs()), results(slow)).candidates
    assert none.ratio.of_totals == constant(0.5)
    assert none.against_none == constant(1.0)
    assert svip.ratio.of_totals == constant(59 / (2 * 167))
    assert svip.against_none == constant(59 / 167)


def test_intervals_are_of_a_bootstrap_over_prompts_paired_by_prompt() -> None:
    """B is twice as fast on every prompt, however long it takes: pairing leaves no doubt."""
    runs = [peer_run("svip", prompt, 10, 95.0 * (1 + place)) for place, prompt in enumerate("abcdef")]
    faster = [replace(run, turns=(replace(run.turns[0], total_ms=run.turns[0].total_ms / 2),)) for run in runs]
    (svip,) = compared(results(runs), results(faster)).candidates
    assert svip.ratio.of_totals == constant(2.0, 6)
    assert svip.against_none is None
    generator = np.random.default_rng(7)
    noisy = [
        replace(run, turns=(replace(run.turns[0], total_ms=run.turns[0].total_ms * generator.uniform(0.8, 1.2)),))
        for run in runs
    ]
    ratio = compared(results(runs), results(noisy)).candidates[0].ratio.of_totals
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.low < 1 < ratio.high
    assert 0.8 < ratio.low < ratio.value < ratio.high < 1.25


def test_one_prompt_has_no_interval() -> None:
    found = compared(results(some_runs("a")), results(some_runs("a", slower=0.5)))
    assert (
        found.candidates[1].verdict
        == "svip: one prompt cannot show which is faster, B at 1.84x (only 1 prompt) of A; texts identical"
    )
    assert found.none_differs is None


def test_only_prompts_of_both_count_and_the_others_are_named() -> None:
    found = compared(results(some_runs("abc")), results(some_runs("bcd", slower=0.5)))
    assert found.prompts_left_out == {"a": "only in A", "d": "only in B"}
    assert [one.ratio.prompts for one in found.candidates] == [2, 2]
    assert found.candidates[1].texts.compared == 2


def test_an_id_that_stands_for_another_prompt_is_left_out() -> None:
    """Records without an id have line numbers; another file's line 1 is another prompt."""
    other = some_runs("ab")
    other[:2] = [replace(run, turns=(replace(run.turns[0], prompt_tokens=8),)) for run in other[:2]]
    suite = {"name": "mine", "sha256": "1" * 64}
    found = compared(results(some_runs("ab")), results(other, suite=suite))
    assert found.prompts_left_out == {"a": "7 tokens in A, 8 in B"}
    assert ("suite.name", "embedded", "mine") in [(one.fact, one.a, one.b) for one in found.differences]
    # The same prompts become other tokens where the tokenizer is another.
    suite_of_a = results(some_runs("ab"))
    assert compared(suite_of_a, results(other)).prompts_left_out == {}
    elsewhere = results(other, suite=suite, profile={"target": {"model": "bigger"}})
    assert compared(suite_of_a, elsewhere).prompts_left_out == {}


def test_repeats_are_averaged_and_lengths_paired_one_by_one() -> None:
    a = [*some_runs("a"), *some_runs("a", slower=3.0, repeat=1), *some_runs("a", length=128)]
    b = [*some_runs("a", slower=2.0), *some_runs("a", slower=9.0, length=256)]
    none = compared(results(a), results(b)).candidates[0]
    assert none.ratio.of_totals.value == pytest.approx((5 + 180) / (5 + 180))
    assert none.texts.compared == 1


def test_texts_that_differ_are_counted() -> None:
    b = some_runs()
    b[1] = drafted_run("svip", "a", ROUNDS, tokens=range(1, 10))
    verdicts = [one.verdict for one in compared(results(some_runs()), results(b)).candidates]
    assert verdicts[0].endswith("; texts identical")
    assert verdicts[1].endswith("; texts differ in 1 of 4 runs")


@pytest.mark.parametrize(
    ("a", "b", "pairs"),
    [
        (["svip"], ["svip:threshold=0.5", "svip"], [("svip", "svip")]),
        (
            ["svip:threshold=0.3"],
            ["svip:threshold=0.9", "svip:threshold=0.35"],
            [("svip:threshold=0.3", "svip:threshold=0.35")],
        ),
        (["svip:threshold=0.3", "svip"], ["svip"], [("svip", "svip")]),
        (["svip"], ["adaedl"], []),
    ],
)
def test_candidates_are_paired_by_label_then_by_the_nearest_of_the_same_policy(
    a: list[str], b: list[str], pairs: list[tuple[str, str]]
) -> None:
    def of(label: str) -> Candidate:
        name, _, value = label.partition(":threshold=")
        return candidate(label, name, **({"threshold": float(value)} if value else {}))

    assert [(one.label, other.label) for one, other in pair_up([*map(of, a)], [*map(of, b)])] == pairs


def test_a_peer_is_paired_with_itself_only() -> None:
    assert pair_up([peer("hf-constant")], [peer("hf-heuristic")]) == []


def test_another_label_is_said() -> None:
    runs = [replace(run, candidate="svip:0.5") if run.candidate == "svip" else run for run in some_runs(slower=0.5)]
    b = results(runs, [candidate("none"), candidate("svip:0.5", "svip", threshold=0.5), candidate("adaedl")])
    a = results([*some_runs(), *[plain_run("a", 9, "constant")]], [*CANDIDATES, candidate("constant")])
    found = compared(a, b)
    assert found.candidates[1].verdict.startswith("svip (A), svip:0.5 (B): B is faster, B at 1.84x")
    assert found.candidates_left_out == {"constant": "only in A"}, "adaedl has no run in B"


def facts(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    found = compared(results(some_runs("a"), **a), results(some_runs("a"), **b))
    return [(one.fact, one.a, one.b) for one in found.differences]


def test_whatever_was_measured_otherwise_is_named() -> None:
    def profile(dtype: str, policy: str) -> dict[str, Any]:
        draft = {"model": "small", "policy": {"name": policy}}
        return {"target": {"model": "big", "dtype": dtype}, "draft": draft, "sampling": {"seed": 1}}

    a = {"profile": profile("float32", "svip"), "devices": {"target": "cpu"}, "lengths": [64]}
    b = {"profile": profile("bfloat16", "adaedl"), "devices": {"target": "cuda:0 (H100)"}, "lengths": [64, 128]}
    assert facts(a, b) == [
        ("devices.target", "cpu", "cuda:0 (H100)"),
        ("profile.target.dtype", "float32", "bfloat16"),
        ("lengths", [64], [64, 128]),
    ]
    assert facts({"created": "x", "argv": ["y"]}, {}) == []
    assert facts({"sampling": {"temperature": 0.0, "top_k": 3}}, {"sampling": {"temperature": 0.5}}) == [
        ("sampling.temperature", 0.0, 0.5),
        ("sampling.top_k", 3, None),
    ]


def test_verification_differs_where_both_files_drew_tokens() -> None:
    def sampling(**table: Any) -> dict[str, Any]:
        return {"sampling": {"temperature": 1.0, **table}}

    token, block = sampling(verification="token"), sampling(verification="block")
    assert facts(token, token) == []
    assert facts(token, block) == [("sampling.verification", "token", "block")]
    greedy = [{"sampling": {**one["sampling"], "temperature": 0.0}} for one in (token, block)]
    assert facts(*greedy) == []


def test_a_draft_that_one_file_lacks_is_named_key_by_key() -> None:
    third = {"draft": {"model": "tiny", "policy": {"name": "svip"}}}
    a, b = ({"profile": {"target": {"model": "big"}, "draft": {"model": "small", **more}}} for more in (third, {}))
    assert facts(a, b) == [("profile.draft.draft.model", "tiny", None)]


def test_another_version_is_no_alarm() -> None:
    def shown(**header: Any) -> list[tuple[str, bool]]:
        found = compared(results(some_runs("a")), results(some_runs("a"), **header))
        return [(table.title, table.alarm) for table in comparison_tables(found)][1:-1]

    newer = {"specctl": "0.2.0", "torch": "2.13.0"}
    assert shown() == []
    assert shown(versions=newer) == [("Versions differ", False)]
    assert shown(versions=newer, devices={"target": "cuda:0"}) == [("NOT MEASURED ALIKE", True)]


def test_equal_labels_with_other_values_are_named() -> None:
    b = results(some_runs("a"), [candidate("none"), candidate("svip", threshold=0.4)])
    (difference,) = compared(results(some_runs("a")), b).differences
    assert (difference.fact, difference.a, difference.b) == ("svip.settings.threshold", 0.3, 0.4)


def test_tables() -> None:
    found = compared(results(some_runs("abc")), results(some_runs("bcd", slower=0.5)))
    shown = {table.title: table for table in comparison_tables(found)}
    assert list(shown) == ["Compared", "B over A", "Prompts left out"]
    ratio = "1.84 [1.84, 1.84]"
    row = ("svip", "2", "152.5", "281.2", ratio, "0.97 [0.97, 0.97]", "0.60 [0.60, 0.60]", "0.50 [0.50, 0.50]")
    assert shown["B over A"].rows[1] == (*row, "0 of 2")
    assert shown["B over A"].note.startswith("none itself is 1.90x as fast in B")
    assert "a machine that was busier" in shown["B over A"].note
    assert shown["Prompts left out"].rows == (("a", "only in A"), ("d", "only in B"))


def test_many_prompts_left_out_are_cut_short() -> None:
    many = [run for number in range(30) for run in (plain_run(f"p{number}", 9),)]
    table = comparison_tables(compared(results([*some_runs("a"), *many]), results(some_runs("a"))))[-1]
    assert (len(table.rows), table.note) == (20, "10 more prompts in the JSON.")


def test_json_holds_it_all() -> None:
    found = compared(results(some_runs("abc")), results(some_runs("bcd", slower=0.5)))
    document = json.loads(json.dumps(comparison_json(found)))
    svip = document["candidates"][1]
    assert svip["ratio"]["of_totals"] == {"value": 1.84375, "low": 1.84375, "high": 1.84375, "prompts": 2}
    assert svip["verdict"] == found.candidates[1].verdict
    assert svip["texts"] == {"compared": 2, "differing": 0}
    assert document["prompts_left_out"] == {"a": "only in A", "d": "only in B"}
    assert document["alike"] is True


# The command


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_two_files_are_compared_and_not_changed(tmp_path: Path) -> None:
    a = save(tmp_path / "a.jsonl", results(some_runs()))
    b = save(tmp_path / "b.jsonl", results(some_runs(slower=0.5)))
    before = a.read_bytes(), b.read_bytes()
    lines = run("--compare", a, b).splitlines()
    assert lines[-2:] == [
        "none: B is faster, B at 1.90x (1.90 to 1.90, only 4 prompts) of A; texts identical",
        "svip: B is faster, B at 1.84x (1.84 to 1.84, only 4 prompts) of A; texts identical",
    ]
    assert json.loads(run("--compare", a, b, "--json"))["b"] == {
        "file": str(b),
        "started": "2026-01-02T03:04:05+00:00",
        "runs": 8,
    }
    assert (a.read_bytes(), b.read_bytes()) == before
    assert sorted(tmp_path.iterdir()) == [a, b]


def test_a_file_is_compared_with_itself() -> None:
    old = DATA / "results.jsonl"
    assert "svip: A and B are level, B at 1.00x (1.00 to 1.00, only 2 prompts) of A" in run("--compare", old, old)


@pytest.mark.parametrize(
    ("runs", "candidates", "message"),
    [
        ([plain_run("a", 9, "adaedl")], [candidate("adaedl")], "have no candidate in common"),
        (some_runs("xyz"), CANDIDATES, "have no prompt in common"),
        (some_runs(length=7), CANDIDATES, "have no prompt in common"),
        ([], CANDIDATES, "have no candidate in common"),
    ],
)
def test_nothing_in_common(tmp_path: Path, runs: list[Run], candidates: list[Candidate], message: str) -> None:
    a, b = save(tmp_path / "a", results(some_runs())), save(tmp_path / "b", results(runs, candidates))
    with pytest.raises(UsageError, match=message) as caught:
        compare_files(a, b)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("options", "named"), [(["--repeats", "2", "-o", "x"], "--repeats, --output"), (["--from", "x"], "--from")]
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, options: list[str], named: str) -> None:
    a = save(tmp_path / "a", results(some_runs()))
    with pytest.raises(UsageError, match=f"--compare runs nothing, so {named} "):
        run("--compare", a, a, *options)


def test_options_that_results_cannot_change_are_refused(tmp_path: Path) -> None:
    a = save(tmp_path / "a", results(some_runs()))
    with pytest.raises(UsageError, match="--from runs nothing, so --policy, --temperature has no effect"):
        run("--from", a, "--policy", "svip", "-t", "0", "--json")
