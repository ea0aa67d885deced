import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from specctl.commands.doctor import doctor
from specctl.doctor import diagnosis
from specctl.errors import ModelError
from specctl.models.passes.cache import BufferedLayer
from specctl.models.placing.memory import DeviceMemory
from specctl.processes import CoreTime
from tests.support.checkpoints import llama_config, save_model

app = typer.Typer()
app.command()(doctor)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A profile whose draft pads its vocabulary differently from its target."""
    save_model(tmp_path / "target", llama_config(320))
    save_model(tmp_path / "draft", llama_config(272, num_hidden_layers=1))
    profile = tmp_path / "pair.toml"
    profile.write_text(
        f'schema_version = 1\n[target]\nmodel = "{tmp_path / "target"}"\ndevice = "cpu"\n'
        f'[draft]\nmodel = "{tmp_path / "draft"}"\ndevice = "cpu"\n'
    )
    return profile


def examine(profile: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["-p", str(profile), *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout


def document(profile: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out = examine(profile, "--json", *arguments)
    return code, json.loads(out)


def test_what_is_not_known_of_a_missing_model_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(diagnosis, "device_memory", lambda: [DeviceMemory("cpu", "CPU", 2**34, 2**34)])
    result = CliRunner().invoke(app, ["-p", "llama70b-svip", "--devices"], catch_exceptions=False)
    assert result.exit_code == 3
    assert result.stdout.count("not found; the rest is skipped: it needs config.json") == 2
    assert not re.search(r": -$", result.stdout, re.M)
    assert "  weights: about 140 GB in 16 bits, by its name" in result.stdout, "as generate tells it"
    assert "  weights: about 16 GB in 16 bits, by its name" in result.stdout
    assert "Only facts of the GPUs" in result.stdout
    assert "asks for cuda:0, which this machine does not have" in result.stdout
    asked = ["-p", "llama70b-svip", "--memory", "cuda:0=24GB"]
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert result.exit_code == 3
    told = "By its name meta-llama/Meta-Llama-3-70B takes about 140 GB in 16 bits; --memory describes 24 GB."
    assert told in result.stdout
    assert "does not have" not in result.stdout, "cuda:0 is there"


def test_the_embedded_models_have_a_licence() -> None:
    result = CliRunner().invoke(app, ["--json"], catch_exceptions=False)
    assert [model["licence"] for model in json.loads(result.stdout)["models"]] == ["apache-2.0"] * 2


def test_a_good_pair_is_ready(pair: Path) -> None:
    code, report = document(pair)

    assert code == 0
    assert report["ready"]
    assert report["shared_vocabulary"] == 258
    assert report["problems"] == []
    target, draft = report["models"]
    assert (target["key"], draft["key"]) == ("target", "draft")
    assert target["found"] == "local folder"
    assert target["architecture"] == "LlamaForCausalLM"
    assert target["eos_ids"] == [0]
    assert target["weights_by_dtype"]["float32"] == 4 * target["parameters"]
    assert target["cache_per_1k_tokens"] == 2 * 2 * 2 * 4 * 4 * 1000
    assert target["devices"] == {"cpu": 4 * target["parameters"]}
    assert report["versions"].keys() >= {"python", "torch", "transformers", "cuda"}


def test_plain_text_in_a_pipe(pair: Path) -> None:
    code, out = examine(pair)

    assert code == 0
    assert "Tokenizers agree on 258 tokens." in out
    assert out.splitlines()[-1] == "Verdict: ready."
    assert "\x1b" not in out


def test_tables_on_a_terminal(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")

    code, out = examine(pair)

    assert code == 0
    assert "┃" in out
    assert "LlamaForCausalLM" in out
    assert "would hold" in out


def test_no_weights_are_loaded(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))

    assert examine(pair)[0] == 0


def test_one_unusable_model_does_not_hide_the_other(pair: Path, tmp_path: Path) -> None:
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])

    code, report = document(pair)

    assert code == 3
    assert not report["ready"]
    (problem,) = report["problems"]
    assert problem["where"] == "target"
    assert "is damaged" in problem["message"]
    assert report["models"][1]["devices"]


def test_a_missing_draft(pair: Path, tmp_path: Path) -> None:
    code, out = examine(pair, "--set", f"draft.model={tmp_path / 'drafft'}")

    assert code == 3
    assert "no such folder" in out
    assert f"Did you mean '{tmp_path / 'draft'}'?" in out
    assert out.splitlines()[-1] == "Verdict: cannot run, 1 problem."


def test_tokenizers_that_differ(pair: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "stranger", llama_config(300), merges=[("h", "e")])

    code, report = document(pair, "--set", f"draft.model={tmp_path / 'stranger'}")

    assert code == 0
    assert report["shared_vocabulary"] is None
    overlap = report["models"][1]["overlap"]
    assert (overlap["shared"], overlap["whole"]) == (257, 258)
    assert 0.9 < overlap["used"] < 1
    assert 0.9 < overlap["agreed"] < 1
    told = f"drafts the 257 of 258 tokens that both have; {overlap['used']:.1%} of the tokens"
    assert told in report["advice"][0]
    assert f"({overlap['agreed']:.1%} are reproduced from text" in report["advice"][0]

    code, report = document(pair, "--set", f"draft.model={tmp_path / 'stranger'}", "--set", "draft.vocabulary=shared")

    assert code == 3
    assert "id 257 is 'th' in the target and 'he' in the draft" in report["problems"][0]["message"]


def test_models_that_fit_alone_but_not_together(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, report = document(pair)
    sizes = [model["devices"]["cpu"] for model in report["models"]]
    small = DeviceMemory("cpu", "small", 2**20, sum(sizes) - 1)
    monkeypatch.setattr(diagnosis, "device_memory", lambda: [small])

    code, report = document(pair)

    assert code == 3
    (problem,) = report["problems"]
    assert problem["where"] == "target"
    assert "needs" in problem["message"]


def test_a_model_that_does_not_generate(pair: Path, tmp_path: Path) -> None:
    from transformers import CLIPConfig

    CLIPConfig().save_pretrained(tmp_path / "target")

    code, report = document(pair)

    assert code == 3
    assert "does not write text" in report["problems"][0]["message"]


def test_the_licence_of_the_model_card(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "target" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Model\n")

    _, report = document(pair)

    assert [model["licence"] for model in report["models"]] == ["apache-2.0", None]


def test_a_large_draft_is_pointed_out(pair: Path) -> None:
    _, report = document(pair)

    assert any("of the parameters of the target model" in advice for advice in report["advice"])


def test_where_a_draft_stops_drafting_is_told_in_a_line(pair: Path, tmp_path: Path) -> None:
    for name, tokens in (("target", 4096), ("draft", 2048)):
        config = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))
    code, report = document(pair)
    assert code == 0
    (told,) = [advice for advice in report["advice"] if "drafts until" in advice]
    assert told == "draft drafts until token 2,048 of 4,096: its context ends there, and the text goes on without it."
    code, shown = examine(pair, "--devices")
    assert code == 0
    assert "caches of 4,096 tokens" in shown
    path = tmp_path / "draft" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": 3}))
    _, report = document(pair)
    assert "draft drafts until token 2,041 of 4,096" in " ".join(report["advice"]), "seven masks need places too"


def test_a_hierarchy_lists_every_model(pair: Path, tmp_path: Path) -> None:
    with pair.open("a") as file:
        file.write(f'[draft.draft]\nmodel = "{tmp_path / "draft"}"\ndevice = "cpu"\n')

    _, report = document(pair)

    assert [model["key"] for model in report["models"]] == ["target", "draft", "draft.draft"]


def test_a_run_tries_the_pair_out(pair: Path) -> None:
    code, report = document(pair, "--run")

    assert code == 0
    assert report["run"]["same"] is True
    assert report["run"]["difference"] < 1e-4
    assert report["run"]["alone_per_second"] > 0
    _, out = examine(pair, "--run")
    assert "after a rejection the target differs from a fresh read by 0.00%" in out


def test_a_run_of_a_target_alone(pair: Path) -> None:
    code, report = document(pair, "--run", "--set", "draft.policy.name=none")

    assert code == 0
    assert (report["run"]["same"], report["run"]["drafted_per_second"]) == (None, None)
    assert report["run"]["difference"] < 1e-4


def test_a_run_finds_a_target_that_does_not_forget(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crop = BufferedLayer.crop

    def spoiling(layer: BufferedLayer, tokens: int) -> None:
        crop(layer, tokens)
        if tokens:
            layer.values[:, :, : layer.get_seq_length()] *= 0.9

    monkeypatch.setattr(BufferedLayer, "crop", spoiling)
    with pytest.raises(ModelError, match="does not forget"):
        examine(pair, "--run")


@pytest.mark.parametrize("arguments", [(), ("--threads", "3"), ("--set", "threads=3")], ids=" ".join)
def test_the_threads_of_passes_are_told(pair: Path, arguments: tuple[str, ...]) -> None:
    found = r"Threads: 3 of \d+ cores? \(as set\)" if arguments else r"Threads: 1 of \d+ cores? \(by OMP_NUM_THREADS\)"
    assert re.search(found, examine(pair, *arguments)[1])
    assert document(pair, *arguments)[1]["threads"]["number"] == (3 if arguments else 1)


def test_a_crowded_machine_is_told_once(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(CoreTime, "others_until", lambda *_: 64.0)
    result = CliRunner().invoke(app, ["-p", str(pair), "--run", "--threads", "2"], catch_exceptions=False)
    assert told == [2]
    assert result.stderr.count("warning: other processes keep 64.0 of") == 1
    assert "; other processes keep 64.0 cores busy." in result.stdout
