"""Drafting in parallel from the command line, on the embedded models."""

import json

import pytest

from specctl.errors import ProfileError, UsageError
from specctl.observing.results import read_results
from specctl.replay.pearl import parallel_steps, rounds_in_turns
from tests.support.invoked import invoke

BLOCK = 3
FORCED = ["-p", "embedded-constant", "--set", "draft.parallel=force", "--set", f"policy.draft_length={BLOCK}"]
PROMPT = "Once upon a time"


def answered(*arguments):
    return json.loads(invoke("generate", *arguments, "-n", 40, "--rounds", "--token-ids", "--json", PROMPT).stdout)


@pytest.mark.slow
def test_generate_gives_the_tokens_of_none(tmp_path):
    alone = answered("-p", "embedded", "--set", "policy.name=none")
    ours = answered(*FORCED, "--trace", tmp_path / "trace.jsonl")
    assert ours["completion_ids"] == alone["completion_ids"]
    assert ours["metrics"]["rounds"] == len(ours["rounds"]) < alone["metrics"]["rounds"]
    assert ours["metrics"]["overlap_ms"] > 0
    emitted = [one["accepted"] + (one["accepted"] < one["drafted"]) for one in ours["rounds"]]
    assert sum(emitted) == 40
    assert ours["metrics"]["mean_acceptance_length"] == pytest.approx(40 / len(emitted), abs=1e-3)
    traced = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    rounds = [line for line in traced if line["kind"] == "round"]
    assert [one["extra"] is None for one in rounds] == [one["accepted"] == one["drafted"] for one in ours["rounds"]]
    assert all("entropy" in step and "overlap_ms" in one for one in rounds for step in one["steps"])
    invoke("analyze", "--from", tmp_path / "trace.jsonl")


def test_models_on_one_device_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ProfileError, match=r"\[draft\] parallel: target and draft share cpu") as caught:
        invoke("generate", *FORCED[:2], "--set", "draft.parallel=true", "-o", tmp_path / "out.txt", PROMPT)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out.txt").exists()


def test_calibrate_has_nothing_to_choose():
    with pytest.raises(UsageError, match="drafting in parallel uses no stopping policy") as caught:
        invoke("calibrate", *FORCED)
    assert "--set draft.parallel=false" in caught.value.hint


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    prompts, path = folder / "prompts.jsonl", folder / "results.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n" + json.dumps({"turns": ["Who is Tom?", "Say it again."]}))
    invoke("bench", *FORCED, "-i", prompts, "-n", 24, "--oracle", "-o", path, "-q")
    return path


@pytest.mark.slow
def test_the_rounds_of_a_benchmark_are_those_that_the_simulation_counts(results):
    found = read_results(results)
    labels = [candidate.label for candidate in found.header.candidates]
    live, *_ = [label for label in labels if label.endswith("(parallel)")]
    assert {run.difference for run in found.runs} == {None}
    for prompt, turns in found.stretches.items():
        (ours,) = [run for run in found.of(live) if run.prompt == prompt]
        (turned,) = [run for run in found.of("constant") if run.prompt == prompt]
        for lengths, parallel, in_turns in zip(turns, ours.turns, turned.turns, strict=True):
            assert sum(lengths) == len(parallel.tokens)
            assert parallel.target_forwards == sum(parallel_steps(length, BLOCK) for length in lengths)
            assert in_turns.target_forwards == sum(rounds_in_turns(length, 5) for length in lengths)


@pytest.mark.slow
def test_the_tables_are_shown_again_with_another_time_to_synchronise(results):
    shown = [invoke("bench", "--from", results, "--json", "--sync-ms", ms).stdout for ms in (0, 2.5)]
    without, with_it = map(json.loads, shown)
    for before, after in zip(*(one["parallel"]["simulated"] for one in (without, with_it)), strict=True):
        if before["parallel"] and before["block"] == after["block"]:
            assert after["milliseconds"] == pytest.approx(before["milliseconds"] + 2.5 * before["steps"])
    assert with_it["parallel"]["sync_ms"] == 2.5
    assert "In parallel (simulated: two devices)" in invoke("bench", "--from", results, "--details").stdout


@pytest.mark.slow
def test_an_earlier_file_without_stretches_gets_them(results, tmp_path):
    lines = results.read_text().splitlines(keepends=True)
    older = tmp_path / "older.jsonl"
    older.write_text("".join(line for line in lines if json.loads(line)["kind"] != "stretches"))
    assert read_results(older).stretches == {}
    invoke(
        "bench", *FORCED, "-i", results.parent / "prompts.jsonl", "-n", 24, "--oracle", "-o", older, "--resume", "-q"
    )
    assert read_results(older).stretches == read_results(results).stretches
