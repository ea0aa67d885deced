import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from specctl.commands.analyze import analyze
from specctl.errors import UsageError
from tests.support.checkpoints import llama_config, save_model

pytestmark = pytest.mark.usefixtures("undrawn")

app = typer.Typer()
app.command()(analyze)

PROMPTS = [
    {"id": "one", "category": "stories", "prompt": "the moon"},
    {"id": "two", "category": "talks", "turns": ["the thin", "then?"]},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    # Wide weights, or an untrained model predicts nothing but noise.
    save_model(folder / "target", llama_config(initializer_range=0.3))
    save_model(folder / "draft", llama_config(initializer_range=0.3, num_hidden_layers=1))
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECCTL_PROFILE", raising=False)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return tmp_path


def profile(models: Path, here: Path, draft: str | None = "draft") -> str:
    tables = {"target": "target", **({"draft": draft} if draft else {})}
    path = here / "pair.toml"
    path.write_text(
        "schema_version = 1\n"
        + "".join(f'[{role}]\nmodel = "{models / name}"\ndevice = "cpu"\n' for role, name in tables.items())
    )
    return str(path)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*arguments: str) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", "-q"))


def test_prompts_are_run_and_read(models: Path, here: Path) -> None:
    found = document("-p", profile(models, here), "-i", "prompts.jsonl", "-n", "12")
    assert found["source"] == "models"
    assert "Greedy" in found["distributions"]
    assert found["prompts"] == 2
    assert {mean["category"] for mean in found["theory"]["means"]} == {"all", "stories", "talks"}
    # The second prompt has two turns.
    assert [mean["tokens"] for mean in found["theory"]["means"] if mean["category"] == "talks"] <= [24]
    for bound in found["theory"]["bounds"][:2]:
        assert bound["violated"] == 0
        assert bound["gap"] >= 0
    assert found["provenance"]["suite"]["count"] == 2
    assert found["provenance"]["sampling"]["max_new_tokens"] == 12


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_model_that_drafts_for_itself_is_always_accepted(models: Path, here: Path, temperature: str) -> None:
    own = profile(models, here, draft="target")
    found = document("-p", own, "-i", "prompts.jsonl", "-n", "8", "-t", temperature, "--category", "stories")
    (means,) = found["theory"]["means"]
    assert means["acceptance"] == pytest.approx(1, abs=1e-5)
    assert means["divergence"] == pytest.approx(0, abs=1e-5)
    assert means["agreement"] == 1
    assert means["entropy"] == pytest.approx(means["cross_entropy"], abs=1e-5)
    assert found["acceptance"]["value"] == pytest.approx(1, abs=1e-5)
    assert found["theory"]["ratio"]["deciles"] == pytest.approx([1.0] * 9, abs=1e-4)


def test_tables_in_a_pipe_and_a_report(models: Path, here: Path) -> None:
    shown = run("-p", profile(models, here), "-i", "prompts.jsonl", "-n", "6", "-t", "1", "--report", "report", "-q")
    assert "Bretagnolle-Huber" in shown
    assert "Sampled output" in shown
    assert "\x1b" not in shown
    page = (here / "report" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(list((here / "report").glob("*.svg"))) == 6
    assert 'src="http' not in page
    markdown = (here / "report" / "report.md").read_text()
    for png in (here / "report").glob("*.png"):
        assert f"({png.name})" in markdown


def test_a_prompt_that_does_not_fit_is_left_out(models: Path, here: Path) -> None:
    long = {"id": "long", "prompt": "the " * 5000}
    (here / "prompts.jsonl").write_text(json.dumps(long) + "\n" + json.dumps(PROMPTS[0]) + "\n")
    result = CliRunner().invoke(
        app, ["-p", profile(models, here), "-i", "prompts.jsonl", "-n", "4", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 1
    assert "warning: prompt long is left out" in result.stderr
    assert json.loads(result.stdout)["prompts"] == 1


def trace(path: Path) -> str:
    steps = [
        {"token": 5, "accepted": True, "entropy": 0.2, "top_prob": 0.9, "token_prob": 0.9},
        {"token": 6, "accepted": False, "entropy": 2.0, "top_prob": 0.3, "token_prob": 0.1},
        {"token": 7, "accepted": False, "entropy": 1.0, "top_prob": 0.6, "token_prob": 0.6},
    ]
    line = {"kind": "round", "id": 1, "turn": 0, "round": 0, "drafted": 3, "accepted": 1, "stop": "policy"}
    line |= {"threshold": 0.5, "draft_ms": 1.0, "verify_ms": 2.0, "extra": 8, "extra_kind": "correction"}
    path.write_text(json.dumps(line | {"steps": steps}) + "\n")
    return str(path)


def test_traces_need_no_model(here: Path) -> None:
    found = document("--from", trace(here / "trace.jsonl"))
    assert found["source"] == "traces"
    assert found["theory"] is None
    assert found["verdicts"]["discarded"]["mean"] == 1.0
    assert found["predictors"]["entropy"]["auroc"] == 1
    run("--from", str(here / "trace.jsonl"), "--report", "report", "-q")
    assert {path.name for path in (here / "report").glob("*.png")} == {
        "acceptance-by-signal.png",
        "entropy-by-verdict.png",
        "entropy-run-length.png",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["--from", "trace.jsonl", "-n", "4"],
        ["--from", "trace.jsonl", "--category", "x"],
        ["-i", "prompts.jsonl", "--suite", "gsm8k"],
        ["--from", "nowhere.jsonl"],
    ],
)
def test_options_that_do_not_go_together(here: Path, arguments: list[str]) -> None:
    trace(here / "trace.jsonl")
    with pytest.raises(UsageError):
        run(*arguments)


def test_a_pair_needs_a_draft(models: Path, here: Path) -> None:
    with pytest.raises(UsageError, match="no draft"):
        run("-p", profile(models, here, draft=None), "-i", "prompts.jsonl")


@pytest.mark.parametrize(("head", "temperature"), [("eagle3", "0"), ("eagle3", "1"), ("dspark", "0")])
@pytest.mark.representatives("eagle3-0")
def test_a_draft_head_drafts_from_every_place(head: str, temperature: str, here: Path) -> None:
    found = document("-p", f"embedded-{head}", "-i", "prompts.jsonl", "-n", "8", "-t", temperature)
    assert (found["source"], found["prompts"], found["theory"]) == ("models", 2, None)
    # A draft may begin at all but the last place of three answers, and is judged to its first error.
    assert found["tokens"] > 3 * 7
    assert 0 < found["acceptance"]["value"] < 1
    signals = {"entropy", "top_prob", "token_prob"}
    assert found["predictors"].keys() == {*signals, "accept_prob" if head == "eagle3" else "next_accept_prob"}
    report = ["--report", "report"] if temperature == "1" else []
    shown = run("-p", f"embedded-{head}", "-i", "prompts.jsonl", "-n", "4", "-t", temperature, *report)
    assert "Acceptance by draft entropy" in shown
    assert "A trace of generate" not in shown
    assert (here / "report" / "report.md").exists() == bool(report)
