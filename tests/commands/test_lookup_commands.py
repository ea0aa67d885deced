"""Drafts copied from the text, from the command line: the embedded target with a lookup."""

import json

import pytest

from specctl.errors import ProfileError, UsageError
from specctl.observing.results import read_results
from tests.support.invoked import invoke

PROMPT = "Tom said: I like my red kite. Mia said: I like my red kite too. Sam said: I like my red"


def answered(*arguments):
    return json.loads(invoke("generate", *arguments, "-n", 40, "--rounds", "--token-ids", "--json", PROMPT).stdout)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_targets_own_text_in_fewer_passes(temperature):
    alone = answered("-p", "embedded", "--set", "policy.name=none", "-t", temperature)
    ours = answered("-p", "embedded-lookup", "--set", "policy.name=constant", "-t", temperature)
    assert sum(one["accepted"] for one in ours["rounds"]) > 0
    assert ours["metrics"]["rounds"] < alone["metrics"]["rounds"]
    if not temperature:
        assert ours["completion_ids"] == alone["completion_ids"]


def test_a_trace_has_what_a_lookup_predicts(tmp_path):
    trace = tmp_path / "trace.jsonl"
    invoke("generate", "-p", "embedded-lookup", "-n", 30, "--trace", trace, PROMPT)
    rounds = [line for text in trace.read_text().splitlines() if (line := json.loads(text))["kind"] == "round"]
    steps = [step for line in rounds for step in line["steps"]]
    assert steps
    assert all(0 < step["next_accept_prob"] < 1 and "entropy" not in step for step in steps)


@pytest.mark.slow
def test_lookups_drafts_and_hierarchies_in_one_benchmark(tmp_path):
    over = tmp_path / "over.toml"
    over.write_text('extends = "embedded-constant"\n[draft.draft]\nkind = "lookup"\npolicy.name = "constant"\n')
    results = tmp_path / "results.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n" + json.dumps({"turns": ["Who is Tom?", "Say it again."]}))
    profiles = ["-p", "embedded-lookup", "-p", "embedded-constant", "-p", over]
    invoke("bench", *profiles, "-i", prompts, "-n", 24, "-o", results, "-q")
    found = read_results(results)
    assert found.header.drafts == ["prompt:lookup", "embedded:draft"]
    assert [candidate.label for candidate in found.header.candidates] == [
        "none",
        "cost-optimal:use_foresight=true@lookup",
        "constant@draft",
        "constant < constant",
    ]
    assert len(found.runs) == 8
    assert not any(one.difference for one in found.runs)
    shown = invoke("bench", "--from", results, "--details").stdout
    assert "pays" in shown.lower()


def test_doctor_says_that_there_is_nothing_to_load():
    report = json.loads(invoke("doctor", "-p", "embedded-lookup", "--json").stdout)
    assert report["ready"]
    draft = report["models"][1]
    assert draft["found"] == "copies from the text"
    shown = invoke("doctor", "-p", "embedded-lookup").stdout
    assert "draft\n  model: prompt:lookup\n  found: copies from the text\n" in shown


@pytest.mark.slow
def test_doctor_tries_it_out():
    report = json.loads(invoke("doctor", "-p", "embedded-lookup", "--run", "--json").stdout)
    assert report["run"]["same"]
    assert {passes["model"] for passes in report["run"]["passes"]} == {"target"}


def test_profiles_lists_it():
    shown = invoke("profiles", "list").stdout
    assert "embedded-lookup" in shown
    assert "prompt:lookup" in shown


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["bench", "--policy", "svip"], ProfileError, "svip reads signals that a lookup does not have"),
        (["bench", "--oracle"], UsageError, "--oracle reads a draft's distributions"),
        (["analyze"], UsageError, "analyze reads a draft's distributions"),
        (["calibrate"], UsageError, "calibrate reads a draft's distributions"),
        (["train-head", "-i", "prompts.jsonl", "-o", "head"], UsageError, "train-head reads a draft's distributions"),
    ],
)
def test_what_a_lookup_cannot_do_is_told_before_anything_is_loaded(arguments, error, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    monkeypatch.setattr("specctl.models.loading.assembly.load_pair", None)
    with pytest.raises(error, match=message):
        invoke(*arguments, "-p", "embedded-lookup")
