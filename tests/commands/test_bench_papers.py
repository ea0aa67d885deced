"""`specctl bench --papers` from the command line to the table and back."""

import json
from functools import partial

import pytest
from transformers import GenerationMixin

from specctl.benchmark.papers import PAPERS, PEERS
from specctl.observing.results import read_results
from tests.support.invoked import invoke

pytestmark = pytest.mark.slow

TITLE = "The papers' policies"


bench = partial(invoke, "bench")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("papers") / "prompts.jsonl"
    path.write_text(json.dumps({"id": "kite", "prompt": "Tom had a red kite. One windy day"}) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def whole(prompts):
    """A finished results file and what was printed."""
    path = prompts.with_name("results.jsonl")
    return path, bench("--papers", "--details", "--no-counterpart", "-i", prompts, "-n", "10", "-o", path)


def rows(text):
    """The first two cells of each row of the papers' table."""
    lines = text[text.index(TITLE) :].split("\n\n")[0].splitlines()
    start = lines[[line.split()[0] for line in lines].index("candidate")].index("settings of")
    body = lines[[line.split()[0] for line in lines].index("candidate") + 1 :]
    return {line[:start].strip(): line[start:].split("  ")[0].strip() for line in body}


def test_every_policy_that_the_pair_can_run_has_its_row_and_paper(whole):
    results = read_results(whole[0])
    left_out = set(results.header.papers)
    assert left_out == {"self-verify at every level", "disco", "confidence", "cost-optimal:use_foresight=true"}
    shown = rows(whole[1].stdout)
    expected = {one.label: one.source for one in PAPERS if one.label not in left_out} | PEERS
    assert expected.items() <= shown.items()
    assert {run.candidate for run in results.runs} == {*expected, "none", "svip:threshold=0.54"}


def test_the_tokens_of_all_are_those_of_none(whole):
    results = read_results(whole[0])
    (baseline,) = results.of("none")
    for run in results.runs:
        assert run.difference is None
        assert [turn.tokens for turn in run.turns] == [turn.tokens for turn in baseline.turns]


def test_what_is_left_out_is_told_once_for_each_reason(whole):
    lines = [line for line in whole[1].stderr.splitlines() if "left out" in line]
    assert lines == [
        "note: left out, because the profile has one draft: self-verify at every level",
        "note: left out, because the profile names no head of the kind disco: disco",
        "note: left out, because the draft predicts nothing of its next token: confidence, "
        "cost-optimal:use_foresight=true",
    ]
    assert "Left out, because the profile has one draft: self-verify at every level." in whole[1].stdout


def test_earlier_results_show_the_same_table(whole):
    assert bench("--from", whole[0], "--details").stdout == whole[1].stdout
    document = json.loads(bench("--from", whole[0], "--json").stdout)
    assert set(document["provenance"]["papers"]) == set(read_results(whole[0]).header.papers)
    rates = {summary["candidate"]: summary["draft_rate"] for summary in document["overall"]}
    (run,) = read_results(whole[0]).of("constant")
    drafted = sum(round_.drafted for round_ in run.rounds)
    assert rates["constant"] == pytest.approx(drafted / run.tokens, abs=1e-6)
    assert rates["none"] is None


def test_without_the_flag_there_is_no_such_table(prompts, tmp_path):
    found = bench("--policy", "svip", "-i", prompts, "-n", "4", "-o", tmp_path / "results.jsonl", "-q")
    assert TITLE not in found.stdout
    assert read_results(tmp_path / "results.jsonl").header.papers is None


def test_a_pair_that_transformers_cannot_run_after_all_fails_alone(prompts, tmp_path, monkeypatch):
    def generate(*_: object, **__: object) -> None:
        raise ValueError("assisted generation is not supported with stateful models")

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    path = tmp_path / "results.jsonl"
    options = ["--policy", "svip", "--peer", "hf-constant", "--no-counterpart", "-i", prompts, "-n", "4", "-o", path]
    found = bench(*options)
    results = read_results(path)
    assert list(results.failed) == ["hf-constant"]
    assert "is not supported with stateful models" in found.stdout
    assert {run.candidate for run in results.runs} == {"none", "svip"}
