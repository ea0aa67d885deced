"""Drafts copied from the text, from the command line: the embedded target with a lookup."""

import json

import pytest

from specctl.errors import ProfileError, UsageError
from specctl.observing.results import read_results
from specctl.profile import resolve
from specctl.replay.recording import metering
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


@pytest.fixture
def rough_costs(monkeypatch):
    for name, value in {"LENGTHS": (0, 1, 24), "PASSES": 2, "IN_A_ROW": 2, "ALONE": 2, "WARMING": 1}.items():
        monkeypatch.setattr(metering, name, value)


def calibrated(tmp_path, *options):
    """The document of a calibration on three prompts, and the profile that it writes."""
    prompts, written = tmp_path / "prompts.jsonl", tmp_path / "fast.toml"
    texts = ("Tom had a red kite.", "Sam saw a big dog.", PROMPT)
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    asked = "-i", prompts, "-n", 24, "--grid", "paper", "-o", written, "--json", "--force"
    return json.loads(invoke("calibrate", *asked, *options).stdout), written


@pytest.mark.usefixtures("rough_costs")
def test_a_lookup_is_calibrated_and_what_is_written_runs(tmp_path):
    trace = tmp_path / "trace.jsonl"
    document, written = calibrated(tmp_path, "-p", "embedded-lookup", "--policy", "all", "--trace", trace)
    ranked = {one["policy"]["name"] for one in document["ranking"]}
    assert ranked == {"none", "constant", "heuristic", "confidence", "cost-optimal"}
    assert all(one["policy"].get("use_foresight") for one in document["ranking"] if one["policy"]["name"][:4] == "cost")
    assert document["signal_bound"] is None
    assert document["oracle"]["discard_rate"] == 0
    measured = [one["policy"]["name"] for one in document["measured"]]
    assert {"none", "constant", "cost-optimal"} <= {*measured}
    assert resolve(str(written)).profile.draft.setting.table == document["use"]
    invoke("generate", "-p", written, "-n", 8, PROMPT)
    with pytest.raises(UsageError, match="the trace is of a lookup, which has no distributions"):
        invoke("analyze", "--from", trace)
    again, _ = calibrated(tmp_path, "-p", "embedded-lookup", "--policy", "all", "--no-verify", "--from", trace)
    assert again["ranking"] == document["ranking"]


@pytest.mark.slow
@pytest.mark.usefixtures("rough_costs")
def test_a_lookup_is_compared_with_a_model_and_for_several_texts(tmp_path):
    over = tmp_path / "over.toml"
    over.write_text('extends = "embedded-constant"\n[draft.draft]\nkind = "lookup"\npolicy.name = "constant"\n')
    rivals = "--against", "embedded-constant", "--against", over
    document, written = calibrated(tmp_path, "-p", "embedded-lookup", *rivals, "--policy", "constant")
    assert {one["profile"] for one in document["side_by_side"]} == {"embedded-lookup", "embedded-constant", str(over)}
    invoke("generate", "-p", written, "-n", 8, PROMPT)
    document, _ = calibrated(tmp_path, "-p", "embedded-lookup", "--batch", 2, "--policy", "constant", "-t", 1)
    assert [size["texts"] for size in document["batches"]] == [2]
    assert document["verification"] == "block"


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
        (["calibrate", "--policy", "svip"], UsageError, "svip reads signals that a lookup does not have"),
        (["calibrate", "--head", "embedded:draft-head"], UsageError, "--head needs a draft model, and a lookup has no"),
        (["calibrate", "--export", "vllm"], UsageError, "--export needs a draft model or a draft head"),
        (["train-head", "-i", "prompts.jsonl", "-o", "head"], UsageError, "train-head reads a draft's distributions"),
    ],
)
def test_what_a_lookup_cannot_do_is_told_before_anything_is_loaded(arguments, error, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    monkeypatch.setattr("specctl.models.loading.assembly.load_pair", None)
    with pytest.raises(error, match=message):
        invoke(*arguments, "-p", "embedded-lookup")
