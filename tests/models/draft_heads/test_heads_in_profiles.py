"""Draft heads named in profiles: loaded beside their verifier, placed, checked, and run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from specctl.commands.app import app
from specctl.decoding.composition import build_drafter
from specctl.decoding.session import Session
from specctl.doctor.diagnosis import diagnose
from specctl.errors import ModelError, ProfileError
from specctl.models.draft_heads.chain_runner import ChainPasses
from specctl.models.draft_heads.file_layout import Verifier, write_head
from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.loading.assembly import load_pair
from specctl.models.running.pair import Pair
from specctl.policies import Setting, nested
from specctl.profile.schema import Profile
from tests.support.toy_heads import random_eagle3

SHAPE = LayerShape(hidden_size=32, intermediate_size=48, heads=2, kv_heads=1, head_dim=16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random heads for the embedded target (12 layers, 192 wide) and for the middle model (4 layers, 128 wide)."""
    made = {}
    for name, layers, width in (("target", (2, 6, 9), 192), ("mid", (1, 2, 3), 128)):
        head = random_eagle3(layers=layers, states=width, vocabulary=4096, shape=SHAPE, spread=0.2)
        made[name] = tmp_path_factory.mktemp(f"head-of-{name}")
        write_head(made[name], head, Verifier(f"embedded:{name}"))
    return made


def profile(draft: dict[str, Any], **more: Any) -> Profile:
    return Profile.model_validate({"target": {"model": "embedded:target"}, "draft": draft, **more})


def constant(length: int = 3) -> dict[str, Any]:
    return {"name": "constant", "draft_length": length}


def written(pair: Pair, settings: Profile, setting: Setting | None) -> tuple[int, ...]:
    prompt = pair.tokenizer.encode("Once upon a time")
    drafter = None if setting is None else build_drafter(pair, setting)
    table = settings.sampling.model_copy(update={"max_new_tokens": 24})
    return Session(pair, drafter).generate(prompt, table).tokens


@pytest.mark.parametrize("more", [{}, {"deterministic": True}, {"check": True}, {"engine": "static"}], ids=str)
@pytest.mark.representatives("'static'", "'check'")
def test_a_head_drafts_for_the_target_that_it_reads(folders: dict[str, Path], more: dict[str, Any]) -> None:
    settings = profile({"model": str(folders["target"]), "policy": constant()}, **more)
    pair = load_pair(settings)
    assert isinstance(pair.drafts[0].passes, ChainPasses)
    assert pair.drafts[0].layers == (2, 6, 9)
    assert settings.draft is not None
    tokens = written(pair, settings, settings.draft.setting)
    assert pair.drafts[0].observed > 20
    assert tokens == written(pair, settings, None)


def test_a_head_below_a_middle_model_reads_the_middle_model(folders: dict[str, Path]) -> None:
    lower = {"model": str(folders["mid"]), "policy": constant(2)}
    settings = profile({"model": "embedded:mid", "policy": {"name": "self-verify"}, "draft": lower})
    pair = load_pair(settings)
    assert settings.draft is not None
    assert pair.above == (None, 0)
    assert isinstance(pair.drafts[1].passes, ChainPasses)
    tokens = written(pair, settings, settings.draft.setting)
    assert pair.drafts[1].observed > 20
    assert tokens == written(pair, settings, None)


def test_a_head_drafts_for_no_other_model_than_its_own(folders: dict[str, Path]) -> None:
    settings = profile({"model": "embedded:mid"})
    tables = [profile({"model": name}).draft for name in ("embedded:mid", str(folders["target"]))]
    pair = load_pair(settings, drafts=[table for table in tables if table is not None], above=[None, None])
    two = nested([Setting("constant"), Setting("constant")])
    with pytest.raises(ProfileError, match="states it was not made to read"):
        build_drafter(pair, two, drafts=(0, 1))
    assert build_drafter(pair, Setting("constant"), drafts=(1,)) is not None


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"quantize": "int8"}, "cannot be quantised"),
        ({"device": {"": "cpu"}}, "goes to a single device"),
        ({"device": "balanced"}, "goes to a single device"),
        ({"device": "xpu:7"}, "'xpu:7' is not on this machine"),
        ({"draft": {"model": "embedded:draft"}}, "cannot verify the tokens of a faster draft"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_for_a_head(folders: dict[str, Path], draft: dict[str, Any], message: str) -> None:
    settings = profile({"model": str(folders["target"]), **draft})
    with pytest.raises(ModelError, match=message) as loaded:
        load_pair(settings)
    (problem,) = diagnose(settings).problems
    assert problem.message == loaded.value.message


def test_a_head_of_another_model(folders: dict[str, Path]) -> None:
    settings = profile({"model": str(folders["mid"])})
    with pytest.raises(ModelError, match=r"128.*192") as loaded:
        load_pair(settings)
    assert diagnose(settings).problems[0].message == loaded.value.message


def test_doctor_tells_what_a_head_is(folders: dict[str, Path]) -> None:
    settings = profile({"model": str(folders["target"])})
    report = diagnose(settings)
    assert report.ready
    facts = report.models[1]
    assert (facts.draft_head, facts.reads_layers, facts.draft_tokens) == ("eagle3", [2, 6, 9], 4096)
    assert facts.trained_on == "embedded:target"
    assert facts.parameters == sum(
        weight.numel()
        for weight in random_eagle3(layers=(2, 6, 9), states=192, vocabulary=4096, shape=SHAPE).parameters()
    )
    assert not report.advice
    shown = CliRunner().invoke(app, ["doctor", "--target", "embedded:target", "--draft", str(folders["target"])])
    assert "eagle3; reads layer 2, layer 6, layer 9; drafts 4,096 tokens; trained on embedded:target" in shown.output


def test_doctor_notes_a_head_that_was_trained_on_another_model(tmp_path: Path) -> None:
    head = random_eagle3(layers=(2, 6, 9), states=192, vocabulary=4096, shape=SHAPE)
    write_head(tmp_path, head, Verifier("someone/another-model"))
    (advice,) = diagnose(profile({"model": str(tmp_path)})).advice
    assert "trained on someone/another-model" in advice


def test_the_head_in_the_targets_files() -> None:
    settings = profile({"model": "target:mtp"})
    with pytest.raises(ModelError, match="MTP") as loaded:
        load_pair(settings)
    assert diagnose(settings).problems[0].message == loaded.value.message
    with pytest.raises(ValueError, match="names a draft head"):
        Profile.model_validate({"target": {"model": "target:mtp"}})


@pytest.mark.slow
def test_a_head_takes_the_targets_dtype_unless_told_otherwise(folders: dict[str, Path]) -> None:
    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        settings = profile(
            {"model": str(folders["target"]), "dtype": dtype, "policy": constant()},
            target={"model": "embedded:target", "dtype": "bfloat16"},
        )
        assert diagnose(settings).models[1].dtype == str(expected).removeprefix("torch.")
        pair = load_pair(settings)
        runner = pair.drafts[0]
        assert isinstance(runner.passes, ChainPasses)
        found = runner.extend([5, 6, 7], keep=1).logits
        assert found.dtype == expected
        assert settings.draft is not None
        assert len(written(pair, settings, settings.draft.setting)) == 24
