"""`specctl calibrate --export` from the command line, on the embedded models."""

import json
from unittest.mock import patch

import pytest

from specctl.errors import UsageError
from specctl.replay.recording import metering as costs
from specctl.replay.trace_files import read_traces
from tests.support.invoked import invoke

pytestmark = pytest.mark.slow

PROMPTS = [
    {"id": "kite", "prompt": "Tom had a red kite. One windy day"},
    {"id": "talk", "turns": ["Who are you?", "And then?"]},
]


@pytest.fixture(scope="module", autouse=True)
def rough_costs():
    with patch.multiple(costs, LENGTHS=(0, 1, 4, 40), IN_A_ROW=2, PASSES=costs.WARM_UPS + 1):
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS), encoding="utf-8")
    return path


def calibrate(*arguments):
    options = ["--policy", "constant", "--grid", "paper", "--no-verify", "--engine", "eager", "-n", "12"]
    return invoke("calibrate", *options, *arguments)


def test_greedy_settings_are_shown_with_their_curves(prompts, tmp_path):
    trace = tmp_path / "trace.jsonl"
    short = ["--set", "policy.max_draft=5"]
    files = ["-i", prompts, "--trace", trace, "--report", tmp_path / "report"]
    shown = calibrate(*short, *files, "--export", "transformers")
    assert "Best settings in other engines" in shown.stdout
    assert "transformers: tokens/s by K" in shown.stdout
    assert "give --costs" in shown.stderr
    _, _, text = shown.stdout.partition("# transformers 5")
    keys = json.loads("\n".join(line for line in text.splitlines()[1:] if not line.startswith("#")))
    assert set(keys) == {
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
    }
    assert "transformers: tokens/s by K" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert read_traces(trace).header.depth == 20, "so long as the longest draft that is tried elsewhere"

    engines = ["--export", "vllm", "--export", "llama.cpp", "--costs", "1,10,0.1"]
    again = calibrate(*short, "--from", trace, "--json", *engines)
    vllm, llama = json.loads(again.stdout)["exports"]
    assert vllm["costs"] == {"draft": 1.0, "target": 10.0, "per_token": 0.1, "alone": 10.0}
    assert [point["draft_length"] for point in vllm["curve"]] == list(range(1, 21))
    # The draft passes that llama.cpp adds to each round cost it what nothing else could.
    for one, other in zip(vllm["curve"], llama["curve"], strict=True):
        assert one["tokens_per_second"] > other["tokens_per_second"]
        assert other["with_threshold"]["tokens_per_second"] > 0
    assert vllm["specctl"]["policy"]["name"] in ("constant", "none")
    assert "give --costs" not in again.stderr


@pytest.mark.exhaustive
def test_sampled_texts_are_read_as_each_engine_keeps_tokens(prompts):
    names = ("transformers", "vllm", "sglang", "mlx-lm", "llama.cpp")
    asked = [word for name in names for word in ("--export", name)]
    options = ["-n", 24, "-t", 1, "--json", "--costs", "1,10"]
    found = json.loads(calibrate("-i", prompts, *options, *asked).stdout)["exports"]
    curves = {one["engine"]: [point["tokens_per_second"] for point in one["curve"]] for one in found}
    assert len({tuple(curve) for curve in curves.values()}) == len(names)
    assert '"rejection_sample_method": "block"' in found[1]["text"]
    assert found[0]["curve"][3]["with_threshold"]["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--export", "vlm"], "did you mean 'vllm'"),
        (["--export", "ollama"], "cannot run a target with a draft"),
        (["--export", "openvino", "-t", "1"], "cannot be replayed"),
        (["--export", "vllm", "-p", "embedded-eagle3"], "a model of its own"),
        (["--export", "vllm", "-p", "embedded-eagle3"], "--export sglang"),
        (["--export", "sglang", "-p", "embedded-dspark"], "no settings for sglang are written for dspark heads"),
        (["--export", "sglang", "-p", "embedded-eagle3", "-t", "1"], "greedy decoding"),
        (["--export", "vllm", "-p", "embedded-hsddw"], "works with one draft"),
        (["--export", "vllm", "--costs", "1"], "DRAFT_MS,TARGET_MS"),
        (["--export", "vllm", "--costs", "1,0"], "DRAFT_MS,TARGET_MS"),
        (["--export", "vllm", "--costs", "1,2,3,4,5"], "DRAFT_MS,TARGET_MS"),
        (["--export", "vllm", "--costs", "1,9", "--costs", "1:1,10"], "1:1,10: costs for one text are already given"),
        (["--costs", "1,10"], "name it with --export"),
        (["--against", "embedded-eagle3", "--export", "vllm"], "--against cannot be combined with"),
    ],
)
def test_what_cannot_be_exported_is_said_before_a_model_is_loaded(arguments, message, monkeypatch):
    monkeypatch.setattr("specctl.models.loading.assembly.load_pair", None)
    with pytest.raises(UsageError) as caught:
        invoke("calibrate", *arguments)
    assert message in f"{caught.value} {caught.value.hint}"
