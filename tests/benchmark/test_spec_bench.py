"""Answer files, read by a small reader that needs the same fields as Spec-Bench's speed and equality scripts."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from specctl.benchmark.spec_bench import write_answers
from specctl.errors import OutputError
from specctl.observing.results import Candidate, Header, Run, RunSet
from specctl.prompts.suites import MT_BENCH
from specctl.records import CompletionSummary, FinishReason, RoundSummary, StopReason

LABELS = ("none", "svip:threshold=0.3", "hf-constant")


def turn(text: str, tokens: int, ms: float, accepted: list[int]) -> CompletionSummary:
    rounds = tuple(RoundSummary(max(kept, 1), kept, StopReason.POLICY, None, 1.0, 1.0) for kept in accepted)
    passes = len(rounds) or tokens
    return CompletionSummary(3, tuple(range(tokens)), text, FinishReason.LENGTH, 1.0, 2.0, ms, passes, 9, rounds)


def run(
    candidate: str, prompt: str, category: str, *turns: CompletionSummary, repeat: int = 0, length: int = 16
) -> Run:
    return Run(candidate, prompt, category, repeat, length, turns)


def run_set(runs: list[Run]) -> RunSet:
    header = Header(
        created="2025-03-01T12:00:00+00:00",
        argv=[],
        versions={},
        devices={},
        profile={},
        suite={},
        sampling={},
        candidates=list(map(Candidate, LABELS)),
        repeats=1,
        lengths=[16],
    )
    return RunSet(header, runs)


@pytest.fixture
def results() -> RunSet:
    """Three prompts; the second has two turns; svip writes another text for the third."""
    runs = []
    for label, speed in zip(LABELS, (1, 2, 4), strict=True):
        kept = {"none": [0] * 6, "svip:threshold=0.3": [2, 2], "hf-constant": []}[label]
        runs += [
            run(label, "81", "mt_bench", turn("A — ä", 6, 600 / speed, kept)),
            run(label, "159", "mt_bench", turn("B", 6, 300 / speed, kept), turn("C", 6, 300 / speed, kept)),
            run(label, "401", "math_reasoning", turn("D!" if "svip" in label else "D", 6, 200 / speed, kept)),
        ]
    return run_set(runs)


def answers(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def of_task(path: Path, task: str) -> list[dict[str, Any]]:
    """Selects like the speed script: mt_bench is the union of its eight categories."""
    chosen = {"mt_bench": MT_BENCH, "overall": None}.get(task, (task,))
    return [answer for answer in answers(path) if chosen is None or answer["category"] in chosen]


def tokens_per_second(path: Path, task: str) -> float:
    choices = [answer["choices"][0] for answer in of_task(path, task)]
    return mean(sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices)


def mean_accepted(path: Path) -> float:
    return mean(length for answer in answers(path) for length in answer["choices"][0]["accept_lengths"])


def differing(one: Path, other: Path) -> list[int]:
    pairs = zip(answers(one), answers(other), strict=True)
    return [a["question_id"] for a, b in pairs if str(a["choices"][0]["turns"]) != str(b["choices"][0]["turns"])]


def test_speed_and_equality_scripts_find_what_they_read(results: RunSet, tmp_path: Path) -> None:
    none, svip, peer = write_answers(results, tmp_path / "answers")
    assert (none.name, svip.name, peer.name) == ("none.jsonl", "svip-threshold=0.3.jsonl", "hf-constant.jsonl")
    assert tokens_per_second(none, "overall") == pytest.approx(mean([10, 20, 30]))
    assert tokens_per_second(svip, "mt_bench") == pytest.approx(mean([20, 40]))
    assert tokens_per_second(peer, "math_reasoning") == pytest.approx(120)
    assert mean_accepted(none) == 1
    assert mean_accepted(svip) == 3
    assert differing(none, svip) == [401]
    assert differing(none, peer) == []


def test_an_answer_has_every_field_of_the_format(results: RunSet, tmp_path: Path) -> None:
    path = write_answers(results, tmp_path)[1]
    first, second, _ = answers(path)
    assert list(second) == ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
    assert (second["question_id"], second["category"]) == (159, "humanities")
    assert (second["model_id"], second["tstamp"]) == ("svip:threshold=0.3", 1740830400.0)
    assert first["answer_id"] != second["answer_id"]
    (choice,) = second["choices"]
    assert choice == {
        "index": 0,
        "turns": ["B", "C"],
        "decoding_steps": [2, 2],
        "new_tokens": [6, 6],
        "wall_time": pytest.approx([0.15, 0.15]),
        "accept_lengths": [3, 3, 3, 3],
    }
    before = path.read_bytes()
    write_answers(results, tmp_path)
    assert path.read_bytes() == before


def test_a_last_round_cut_short_counts_what_it_emitted(tmp_path: Path) -> None:
    # Five tokens in two rounds that kept two drafts each: the second ended with an accepted end of sequence.
    (path,) = write_answers(run_set([run("none", "x/1", "all", turn("A", 5, 10, [2, 2]))]), tmp_path)
    (answer,) = answers(path)
    assert answer["choices"][0]["accept_lengths"] == [3, 2]
    assert (answer["question_id"], answer["category"]) == ("x/1", "all")


def test_repeats_are_choices_and_lengths_are_files(tmp_path: Path) -> None:
    runs = [
        run("none", "1", "all", turn(f"{length} {repeat}", 2, 10, [1]), repeat=repeat, length=length)
        for length in (16, 32)
        for repeat in (1, 0)
    ]
    short, long = write_answers(run_set(runs), tmp_path)
    assert (short.name, long.name) == ("none-16.jsonl", "none-32.jsonl")
    (answer,) = answers(long)
    assert [(choice["index"], choice["turns"]) for choice in answer["choices"]] == [(0, ["32 0"]), (1, ["32 1"])]


def test_lines_pair_up_though_a_run_is_missing_or_the_order_differs(results: RunSet, tmp_path: Path) -> None:
    results.runs = [run for run in reversed(results.runs) if (run.candidate, run.prompt) != ("hf-constant", "159")]
    read = [[answer["question_id"] for answer in answers(path)] for path in write_answers(results, tmp_path)]
    assert len(read) == 3
    assert read[0] == read[1] == read[2]
    assert sorted(read[0]) == [81, 401]


def test_nothing_has_run_yet(tmp_path: Path) -> None:
    assert write_answers(run_set([]), tmp_path) == []


def test_a_folder_that_cannot_be_written(results: RunSet, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write .*file: File exists"):
        write_answers(results, tmp_path / "file")
