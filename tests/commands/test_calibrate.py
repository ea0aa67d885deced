"""`specctl calibrate` from the command line to the profile it writes, on the embedded models."""

import json
import shutil
import tomllib
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import pytest

from specctl.errors import UsageError
from specctl.models.draft_heads.file_layout import Verifier, write_head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.observing.results import read_results
from specctl.observing.round_robin import RoundRobin
from specctl.policies import POLICIES
from specctl.profile import resolve
from specctl.profile.schema import predictor_path
from specctl.replay.recording import metering as costs
from specctl.replay.trace_files import read_traces
from tests.support.invoked import invoke
from tests.support.toy_heads import random_eagle3

PROMPTS = [
    {"id": "kite", "category": "stories", "prompt": "Tom had a red kite. One windy day"},
    {"id": "dog", "category": "stories", "prompt": "Sam saw a big dog."},
    {"id": "apples", "category": "maths", "prompt": "Question: Ann has 3 apples and buys 2. How many?\nAnswer:"},
    {"id": "pens", "category": "maths", "prompt": "Question: Ben has 12 pens and loses 5. How many?\nAnswer:"},
    {"id": "talk", "category": "talk", "turns": ["Who are you?", "And then?"]},
]


pytestmark = pytest.mark.usefixtures("undrawn")

THOROUGH = {name: getattr(costs, name) for name in ("LENGTHS", "IN_A_ROW", "ALONE", "WARMING", "PASSES")}


@pytest.fixture(scope="module", autouse=True)
def rough_costs() -> Iterator[None]:
    """Measure costs in a twentieth of the passes; no test reads their values."""
    few = {"LENGTHS": (0, 1, 4, 40), "PASSES": costs.WARM_UPS + 1}
    few_together = {"BATCH_LENGTHS": (0, 1, 40), "BATCH_PASSES": costs.WARM_UPS + 1}
    with patch.multiple(costs, **few, **few_together, IN_A_ROW=2, ALONE=2, WARMING=1):
        yield


@pytest.mark.exhaustive
def test_costs_measured_as_thoroughly_as_the_program_does(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:2]), encoding="utf-8")
    with patch.multiple(costs, **THOROUGH):
        shown = calibrate("-i", path, "-n", 8, "--policy", "constant", "--no-verify", "--json")
    measured = json.loads(shown.stdout)["costs"]
    assert set(measured["draft_lengths"]) >= {0, 1, 2, 3, 4, 5, 6, 7, 9}
    assert all(time > 0 for row in measured["verify_ms"] for time in row)


calibrate = partial(invoke, "calibrate")


def test_what_is_chosen_for_several_texts_is_run_with_several(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:3]), encoding="utf-8")
    given = (
        "-i",
        path,
        "-n",
        4,
        "--policy",
        "constant",
        "--grid",
        "paper",
        "--batch",
        2,
        "-o",
        tmp_path / "it.toml",
    )
    document = json.loads(calibrate(*given, "--json").stdout)
    (size,) = document["batches"]
    measured = [one for one in document["measured"] if one["texts"] == 2]
    assert size["texts"] == 2
    assert {json.dumps(one["policy"]) for one in measured} >= {json.dumps(size["chosen"]), '{"name": "none"}'}
    assert all(one["measured_tokens_per_second"] > 0 for one in measured)
    written = resolve(str(tmp_path / "it.toml")).profile.draft
    assert written is not None
    assert written.setting.at(2).table == size["use"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished calibration: prompts, trace, profile, report and document."""
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS), encoding="utf-8")
    files = {"--trace": "trace.jsonl", "-o": "fast.toml", "--report": "report"}
    named = [text for option, name in files.items() for text in (option, folder / name)]
    shown = calibrate("-i", folder / "prompts.jsonl", "-n", 16, "--policy", "all", "--grid", "paper", "--json", *named)
    (folder / "shown.json").write_text(shown.stdout, encoding="utf-8")
    return folder


def test_the_document_ranks_every_policy(folder):
    document = json.loads((folder / "shown.json").read_text(encoding="utf-8"))
    ranked = {entry["policy"]["name"] for entry in document["ranking"]}
    assert ranked == {
        "none",
        "constant",
        "heuristic",
        "max-confidence",
        "svip",
        "adaedl",
        "self-verify",
        "cost-optimal",
        "bandit",
        "vllm-adaptive",
        "specdec++",
    }
    assert document["signal_bound"]["policy"]["name"] == "signal bound"
    assert document["signal_bound"]["tokens_per_second"] > 0
    assert 0 <= document["implied_threshold"] < 1
    assert sorted(document["chosen_on"] + document["reported_on"]) == sorted(prompt["id"] for prompt in PROMPTS)
    assert document["chosen"] in [one["policy"] for one in document["measured"]]
    assert all(one["measured_tokens_per_second"] > 0 for one in document["measured"])
    assert document["oracle"]["discard_rate"] == 0
    assert not any("one by one" in warning for warning in document["warnings"]), "greedy decoding verifies alike"


@pytest.mark.slow
def test_when_sampling_the_verification_of_the_profile_is_replayed(folder, tmp_path):
    options = ["--policy", "constant", "--grid", "paper", "--no-verify", "--json"]
    trace = tmp_path / "blocks.jsonl"
    result = calibrate("-i", folder / "prompts.jsonl", "-n", 12, "-t", 1, *options, "--trace", trace)
    document = json.loads(result.stdout)
    assert document["verification"] == "block"
    assert not any("predictions are of" in warning for warning in document["warnings"])
    result = calibrate("-t", 1, "-n", 12, "--verification", "token", *options, "--from", trace)
    document = json.loads(result.stdout)
    assert document["verification"] == "block"
    assert any("verified as a block, and live runs verify them one by one" in one for one in document["warnings"])


def test_the_profile_extends_the_old_one_and_records_its_provenance(folder):
    document = json.loads((folder / "shown.json").read_text(encoding="utf-8"))
    table = tomllib.loads((folder / "fast.toml").read_text(encoding="utf-8"))
    assert table["extends"] == "embedded"
    assert table["provenance"]["costs"] == document["costs"]
    assert table["provenance"]["expected"]["speedup"] > 0
    found = resolve(str(folder / "fast.toml")).profile
    chosen = document["use"]
    assert found.draft.policy.setting.build() == POLICIES[chosen.pop("name")](**chosen)
    assert found.sampling.max_new_tokens == 16
    assert found.target == resolve("embedded").profile.target


def test_the_profile_of_a_pair_without_one_stands_alone(folder, tmp_path):
    pair = ["--target", "embedded:target", "--draft", "embedded:draft"]
    path = tmp_path / "fast.toml"
    calibrate(*pair, "--from", folder / "trace.jsonl", "--no-verify", "--policy", "svip", "-n", "16", "-o", path, "-q")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    assert "extends" not in table
    assert (table["target"], table["draft"]["model"]) == ({"model": "embedded:target"}, "embedded:draft")
    # On a busy machine the target alone may be faster than its best setting, and so may a constant.
    assert resolve(str(path)).profile.draft.policy.name in ("svip", "none", "constant", "cost-optimal")


def test_the_report_contains_its_figures(folder):
    names = {path.name for path in (folder / "report").iterdir()}
    assert {"report.md", "report.html", "ranking.png", "ranking.svg"} <= names


def test_a_default_setting_still_replaces_the_old_one(folder, tmp_path):
    """The embedded profile sets svip's threshold: without a threshold, the new profile would inherit it."""
    path = tmp_path / "default.toml"
    asked = ("--from", folder / "trace.jsonl", "--no-verify", "--policy", "svip", "--grid", "paper", "-o", path, "-q")
    document = json.loads(calibrate(*asked, "--json").stdout)
    assert document["chosen"]["name"] in ("svip", "none")
    assert document["chosen"].get("threshold", 0.3) in (0.2, 0.3, 0.4, 0.5)
    assert tomllib.loads(path.read_text(encoding="utf-8"))["draft"]["policy"].keys() >= {"name"}
    assert resolve(str(path)).profile.draft.policy.setting.table == document["use"]


@pytest.mark.parametrize("prompts", [0, 1])
def test_ctrl_c_in_the_live_runs_keeps_what_was_computed(folder, tmp_path, monkeypatch, prompts):
    """However many candidates run: the interrupt comes as the first run of the next prompt ends."""
    usual = RoundRobin.run

    def run(self, *arguments):
        begun = set()
        for one in usual(self, *arguments):
            if len(begun := {*begun, one.prompt}) > prompts:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(RoundRobin, "run", run)
    asked = ("--from", folder / "trace.jsonl", "--policy", "svip", "--grid", "paper", "-n", 16)
    files = ("-o", tmp_path / "own.toml", "--report", tmp_path / "report")
    shown = calibrate(*asked, *files, code=130)
    how, said = ("measured", "after 1 of 2 prompts") if prompts else ("predicted", "before any prompt had run")
    assert f": {how} " in shown.stdout.splitlines()[-1], "whether a draft pays here or not"
    assert f"warning: live runs were interrupted {said}" in shown.stderr
    assert tomllib.loads((tmp_path / "own.toml").read_text("utf-8"))["provenance"]["left_out"] == 0
    for name in ("report.md", "report.html"):
        text = (tmp_path / "report" / name).read_text("utf-8")
        assert f": {how} " in text
        assert f"ive runs were interrupted {said}" in text


def test_every_prompt_is_used_or_counted_as_left_out(folder):
    document = json.loads((folder / "shown.json").read_text(encoding="utf-8"))
    counts = document["prompts"]
    assert counts == {"given": 5, "chose": 3, "reported": 2, "failed": 0, "left_out": 0}
    asked = ("--samples", 1, "--policy", "constant", "--grid", "paper", "-n", 4, "--no-verify")
    shown = calibrate("-i", folder / "prompts.jsonl", *asked)
    assert (
        "note: 3 of the 5 prompts are left out, drawn at random: --samples 1 takes 2. --samples 3 takes" in shown.stderr
    )
    told = " ".join(shown.stdout.split())
    assert "5 prompts: 1 chose the setting, 1 report on it and 3 were left out (--samples)." in told


def test_the_report_has_the_measured_number_and_what_to_doubt(folder):
    document = json.loads((folder / "shown.json").read_text(encoding="utf-8"))
    assert document["speedup"]["from"] == "live runs"
    assert "measured" in document["verdict"]
    assert document["warnings"]
    html = (folder / "report" / "report.html").read_text("utf-8")
    text = (folder / "report" / "report.md").read_text("utf-8")
    assert " ".join(document["verdict"].partition(":")[0].split()[:2]) in text
    assert "only 2 prompts" in document["verdict"]
    for warning in document["warnings"]:
        assert warning.split(":")[0][1:] in text
    assert "Before you trust these numbers" in html


def test_a_kept_trace_gives_the_same_choice_without_a_model(folder, monkeypatch):
    monkeypatch.setattr("specctl.models.loading.assembly.load_pair", None)
    again = calibrate("--from", folder / "trace.jsonl", "--policy", "all", "--grid", "paper", "--no-verify", "--json")
    first = json.loads((folder / "shown.json").read_text(encoding="utf-8"))
    second = json.loads(again.stdout)
    for name in ("chosen", "ranking", "oracle", "curve", "costs", "chosen_on"):
        assert second[name] == first[name]


def test_a_stopped_run_continues_from_its_trace(folder, tmp_path):
    whole = (folder / "trace.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    torn.write_text("".join(whole[:3]) + whole[3][:40], encoding="utf-8")
    options = ["-i", folder / "prompts.jsonl", "-n", 16, "--policy", "all", "--grid", "paper", "--no-verify", "-q"]
    calibrate(*options, "--trace", torn)
    first, second = read_traces(folder / "trace.jsonl"), read_traces(torn)
    assert second.prompts == first.prompts
    assert [trace.tokens for trace in second.traces] == [trace.tokens for trace in first.traces]
    assert len(second.traces) == len(PROMPTS) + 1


def test_plain_output_ends_with_a_table_for_a_profile(folder):
    shown = calibrate("--from", folder / "trace.jsonl", "--policy", "constant", "--no-verify").stdout
    assert "Policies at their best settings" in shown
    _, _, policy = shown.partition("[draft.policy]\n")
    assert tomllib.loads(policy)["name"] in ("constant", "none")


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_is_left_out_with_a_message(tmp_path):
    path = tmp_path / "prompts.jsonl"
    long = {"id": "long", "category": "stories", "prompt": "Once upon a time " * 700}
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in [PROMPTS[0], PROMPTS[1], long]), encoding="utf-8")
    result = calibrate("-i", path, "-n", 8, "--policy", "constant", "--no-verify", code=1)
    assert "warning: prompt long is left out" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "svpi"], "did you mean 'svip'"),
        (["--from", "nowhere.jsonl", "--no-verify"], "cannot read"),
        (["--from", "a", "--trace", "b"], "use either --trace or --from"),
        (
            ["--set", "draft.model=embedded:mid", "--from", "{trace}", "--no-verify"],
            "recorded with embedded:draft",
        ),
        (["-t", "1", "--from", "{trace}", "--no-verify"], "another temperature"),
        (["-n", "17", "-i", "{prompts}", "--trace", "{trace}"], "holds the trace of another calibration"),
        (["--set", "engine=static", "--from", "{trace}", "--no-verify"], "another engine"),
        (["--set", "draft.head=other/head", "--from", "{trace}", "--no-verify"], "embedded:draft-head as the draft's"),
        (["-o", "{trace}"], "exists already"),
        (["--set", "draft.model=embedded:mid", "--policy", "specdec++"], "specdec\\+\\+ needs a head"),
        (["--from", "{headless}", "--policy", "specdec++", "--no-verify"], "needs a head"),
    ],
)
def test_mistakes_are_reported(folder, arguments, message):
    headless = folder / "headless.jsonl"
    kept = (folder / "trace.jsonl").read_text(encoding="utf-8")
    headless.write_text(kept.replace('"accept_prob", ', "", 1).replace('"accept_prob",', "", 1), encoding="utf-8")
    places = {"trace": folder / "trace.jsonl", "prompts": folder / "prompts.jsonl", "headless": headless}
    with pytest.raises(UsageError, match=message):
        calibrate(*(argument.format(**places) for argument in arguments))


@pytest.fixture(scope="module")
def hierarchy(tmp_path_factory):
    """A finished calibration of the three embedded models."""
    folder = tmp_path_factory.mktemp("hierarchy")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:4]), encoding="utf-8"
    )
    named = ["--trace", folder / "trace.jsonl", "-o", folder / "fast.toml", "--report", folder / "report"]
    options = ["-p", "embedded-hsddw", "-i", folder / "prompts.jsonl", "-n", 12, "--grid", "paper"]
    shown = calibrate(*options, "--policy", "constant,self-verify", "--json", *named)
    (folder / "shown.json").write_text(shown.stdout, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_hierarchy_is_calibrated_at_every_level(hierarchy):
    document = json.loads((hierarchy / "shown.json").read_text(encoding="utf-8"))
    ranked = {" < ".join(_names(entry["policy"])) for entry in document["ranking"]}
    # Both ways to pre-verify, the upper draft alone, and the profile's own.
    assert {"none", "constant", "constant < self-verify", "constant(once) < self-verify"} <= ranked
    assert "self-verify < self-verify" in ranked
    assert document["signal_bound"] is None
    assert document["costs"]["below"]["draft_ms"] != document["costs"]["draft_ms"]
    assert all(one["measured_tokens_per_second"] > 0 for one in document["measured"])
    assert len(document["measured"]) >= 2


def _names(policy):
    below = _names(policy["draft"]) if "draft" in policy else []
    return [policy["name"] + "(once)" * (policy.get("pre_verify") == "once"), *below]


@pytest.mark.slow
def test_the_profile_of_a_hierarchy_contains_the_policy_of_every_level(hierarchy):
    found = resolve(str(hierarchy / "fast.toml")).profile
    chosen = json.loads((hierarchy / "shown.json").read_text(encoding="utf-8"))["use"]
    for level in found.draft.levels:
        expected = {key: value for key, value in chosen.items() if key not in ("name", "pre_verify", "draft")}
        assert level.policy.setting.build() == POLICIES[chosen["name"]](**expected)
        chosen = chosen.get("draft", {"name": "none"})
    assert [level.model for level in found.draft.levels] == ["embedded:mid", "embedded:draft"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "svip,svip,svip"], "names 3 policies for 2 drafts"),
        (["--policy", "svip,constant", "--from", "{trace}"], "recorded for drafts of 14 tokens"),
        (["--policy", "svip,specdec++", "--set", "draft.policy.name=svip"], "specdec\\+\\+ needs a head"),
        (["--set", "draft.draft.model=embedded:target", "--from", "{trace}"], "embedded:draft as draft"),
        (
            ["-p", "embedded", "--set", "draft.model=embedded:mid", "--from", "{trace}"],
            "embedded:draft as draft, not None",
        ),
    ],
)
@pytest.mark.slow
def test_mistakes_about_levels_are_reported(hierarchy, arguments, message):
    options = [argument.format(trace=hierarchy / "trace.jsonl") for argument in arguments]
    with pytest.raises(UsageError, match=message):
        calibrate("-p", "embedded-hsddw", *options, "--no-verify")


@pytest.mark.exhaustive
def test_a_setting_that_cannot_be_replayed_is_run_live(hierarchy):
    settings = "name=svip", "keep_trigger=false", "max_draft=8"
    dropping = [text for setting in settings for text in ("--set", f"draft.policy.{setting}")]
    options = ["-i", hierarchy / "prompts.jsonl", "-n", 8, "-t", 1, "--grid", "paper", "--policy", "constant,constant"]
    result = calibrate("-p", "embedded-hsddw", *options, *dropping, "--json")
    assert "it is only measured live" in result.stderr
    assert "predictions are of draft tokens verified one by one" in result.stderr  # block verification is the default
    measured = json.loads(result.stdout)["measured"]
    own = next(one for one in measured if one["policy"]["name"] == "svip")
    assert own["predicted_tokens_per_second"] is None
    assert own["measured_tokens_per_second"] > 0


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A folder with two copies of the shipped head."""
    folder = tmp_path_factory.mktemp("sweep")
    for name in ("d1-w1", "d1-w3"):
        shutil.copytree(predictor_path("draft-head"), folder / name)
    return folder


@pytest.mark.slow
def test_every_head_of_a_folder_gets_its_best_threshold(hierarchy, sweep, tmp_path):
    options = ["-p", "embedded-specdec++", "-i", hierarchy / "prompts.jsonl", "-n", 12, "--grid", "paper"]
    output, report = tmp_path / "fast.toml", tmp_path / "report"
    files = ["--trace", tmp_path / "trace.jsonl", "-o", output, "--report", report]
    document = json.loads(calibrate(*options, "--head", sweep, "--json", *files).stdout)
    ranked = {entry["policy"].get("head"): entry for entry in document["ranking"] if "head" in entry["policy"]}
    assert set(ranked) == {"embedded:draft-head", str(sweep / "d1-w1"), str(sweep / "d1-w3")}
    # Both are the same head, so their replays are equal.
    first, second = (ranked[str(sweep / name)] for name in ("d1-w1", "d1-w3"))
    assert first | {"policy": first["policy"] | {"head": second["policy"]["head"]}} == second
    assert (report / "verification-discard.png").exists()
    found = resolve(str(output)).profile
    assert found.draft.head == document["chosen"].get("head", "embedded:draft-head")
    known = ["--from", tmp_path / "trace.jsonl", "-n", 12, "--grid", "paper", "--no-verify", "--json"]
    again = calibrate("-p", "embedded-specdec++", "--head", sweep, *known)
    assert {one["policy"].get("head") for one in json.loads(again.stdout)["ranking"]} >= set(ranked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head", "{empty}"], "holds no head"),
        (["-p", "embedded-hsddw", "--head", "{sweep}"], "with one draft"),
        (["--head", "{sweep}", "--from", "{trace}"], "recorded without the head"),
    ],
)
@pytest.mark.slow
def test_mistakes_about_heads_are_reported(folder, sweep, tmp_path, arguments, message):
    places = {"empty": tmp_path, "sweep": sweep, "trace": folder / "trace.jsonl"}
    with pytest.raises(UsageError, match=message):
        calibrate(*(argument.format(**places) for argument in arguments), "--no-verify")


@pytest.mark.exhaustive
def test_drafts_of_several_profiles_side_by_side(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:4]), encoding="utf-8")
    rival = tmp_path / "rival.toml"
    rival.write_text('extends = "embedded"\n[draft]\nmodel = "embedded:mid"\n', encoding="utf-8")
    named = ["-i", path, "-n", 12, "--policy", "constant", "--grid", "paper", "--samples", 2]
    files = ["-o", tmp_path / "best.toml", "--report", tmp_path / "report"]
    shown = calibrate("-p", "embedded", "--against", rival, *named, *files, "--json")
    document = json.loads(shown.stdout)
    assert set(document["profiles"]) == {"embedded", str(rival)}
    standings = document["side_by_side"]
    assert {one["profile"] for one in standings} == {"embedded", str(rival)}
    # On a busy machine the target alone may be the fastest for every profile; then there is nothing to run.
    live = any(one["policy"]["name"] != "none" for one in standings)
    measured = [one["measured_tokens_per_second"] for one in standings]
    assert all(speed > 0 for speed in measured) if live else measured == [None, None]
    speedups = [one["speedup"]["value"] for one in standings]
    assert speedups == sorted(speedups, reverse=True)
    best = resolve(str(tmp_path / "best.toml")).profile
    source = resolve(standings[0]["profile"]).profile
    assert best.draft.model == source.draft.model
    chosen = standings[0]["policy"]
    assert best.draft.policy.name == chosen["name"]
    assert "Side by side" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert document["verdict"].startswith("use ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "embedded-hsddw", "--trace", "t.jsonl"], "cannot be combined with"),
        (["--against", "embedded-hsddw", "--from", "t.jsonl"], "cannot be combined with"),
        (["--against", "embedded"], "named twice"),
        (["--against", "qwen14b-svip"], "different models"),
    ],
    ids=" ".join,
)
def test_what_does_not_go_with_several_profiles(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        calibrate("-p", "embedded", *arguments)
    assert message in error.value.message


def stacked(folder, *middles):
    """A profile with an EAGLE-3 head below the middle models named, of which the lowest is the embedded one."""
    shape = LayerShape(hidden_size=32, intermediate_size=48, heads=2, kv_heads=1, head_dim=16)
    head = random_eagle3(layers=(1, 2, 3), states=128, vocabulary=4096, shape=shape)
    write_head(folder / "head", head, Verifier("embedded:mid"))
    tables = [f'[{".".join(["draft"] * (1 + place))}]\nmodel = "{name}"\n' for place, name in enumerate(middles)]
    lowest = ".".join(["draft"] * (1 + len(middles)))
    path = folder / "stacked.toml"
    path.write_text(
        'extends = "embedded"\n' + "".join(tables) + f'[{lowest}]\nmodel = "{folder / "head"}"\n'
        'policy = { name = "constant" }\n',
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize("middles", [1, 2])
def test_a_draft_head_below_a_draft_is_refused_before_a_model_is_loaded(middles, tmp_path, monkeypatch):
    monkeypatch.setattr("specctl.commands.calibrate.load", lambda *_, **__: pytest.fail("a model was loaded"))
    path = stacked(tmp_path, *["embedded:mid"] * middles)
    for arguments in (["-p", path], ["-p", "embedded", "--against", path]):
        with pytest.raises(UsageError, match="what that draft had read when the round began") as error:
            calibrate(*arguments, "--policy", "constant", "-n", 4)
        assert "specctl bench" in error.value.hint


@pytest.mark.slow
def test_a_draft_head_below_a_draft_runs_all_the_same(tmp_path):
    """Alone and among settings compared live: greedily, it writes what the target writes."""
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS[:2]), encoding="utf-8")
    path = stacked(tmp_path, "embedded:mid")
    texts = [
        json.loads(invoke("generate", "-p", profile, "-n", 12, "--json", PROMPTS[0]["prompt"]).stdout)["completion"]
        for profile in ("embedded", path)
    ]
    assert texts[0] == texts[1]
    invoke("bench", "-p", path, "-i", prompts, "-n", 12, "--policy", "constant", "-o", results, "-q")
    drafted = [run for run in read_results(results).runs if run.candidate != "none"]
    assert len(drafted) == 2
    assert all(run.difference is None and run.turns[0].rounds for run in drafted)
    assert any(round_.inner for run in drafted for turn in run.turns for round_ in turn.rounds)
