"""The engines: one table that profiles, flags, loading and the doctor agree on."""

from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from specctl.models.passes.weights import Where
from specctl.models.placing import engine_table
from specctl.models.placing.engine_table import ENGINES, chosen, chosen_for_head
from specctl.models.running.eager import EagerPasses
from specctl.models.running.engines import Engine, EngineSettings
from specctl.models.running.slot import Slot
from specctl.profile.schema import Engine as EngineName
from specctl.profile.schema import Profile
from tests.support.toys import random_model

CPU, CUDA = Where(("cpu",), 1 << 30), Where(("cuda:0",), 1 << 30)


def test_profiles_name_the_engines_of_the_table() -> None:
    assert set(get_args(EngineName)) == {"auto", *ENGINES}
    assert {name: engine.name for name, engine in ENGINES.items()} == {name: name for name in ENGINES}


@pytest.mark.parametrize("name", ENGINES)
def test_a_profile_may_compile_what_is_compiled(name: str) -> None:
    profile = {"target": {"model": "it"}, "engine": name, "compile": True}
    if ENGINES[name].compiles(EngineSettings(compile=True)):
        assert Profile.model_validate(profile).compile is True
    else:
        with pytest.raises(ValidationError, match="passes are not compiled"):
            Profile.model_validate(profile)


@pytest.mark.parametrize("name", ENGINES)
def test_whatever_is_asked_for_ends_with_an_engine_that_can(name: EngineName) -> None:
    for family in ("llama", "mistral"):
        for where in (CPU, CUDA, Where(("cuda:0", "cuda:1"), 1), Where(("cpu",), 1, "bitsandbytes")):
            choice = chosen(name, random_model(family), where, EngineSettings(name))
            while choice.otherwise is not None:
                assert choice.engine.tried
                choice = choice.otherwise
            assert not choice.engine.tried
            assert choice.engine.why_not(random_model(family), where) is None


def test_shards_are_neither_captured_nor_run_by_onnxruntime_and_pipelines_not_compiled() -> None:
    model, settings = random_model("llama"), EngineSettings(compile=True)
    small = Where(("cpu",), 1000, sharded="pipeline")
    choice = chosen("graph", model, Where(("cuda:0",), 1000, sharded="pipeline"), settings)
    assert choice.name == "static"
    assert choice.said == (
        "runs on the static engine: passes of shards are not captured",
        "runs uncompiled: the stages of a pipeline wait for one another within a pass",
    )
    assert chosen("auto", model, small, EngineSettings()).name == "eager"


@pytest.mark.parametrize(
    ("asked", "device", "engine"),
    [
        ("eager", "cuda:0", "static"),
        ("static", "cuda:0", "static"),
        ("onnx", "cpu", "static"),
        ("graph", "cuda:0", "graph"),
        ("graph", "cpu", "static"),
        ("auto", "cuda:0", "graph"),
        ("auto", "cpu", "static"),
    ],
)
def test_draft_heads_run_over_fixed_buffers(asked: EngineName, device: str, engine: str) -> None:
    assert chosen_for_head(asked, Where((device,), 1), EngineSettings(asked)).name == engine


@pytest.mark.parametrize(
    ("asked", "device", "trees", "name", "said"),
    [
        ("onnx", "cpu", False, "onnx", ()),
        ("auto", "cpu", False, "onnx or static", ()),
        ("onnx", "cpu", True, "static", ("runs on torch: the onnx graph of a draft head reads no trees",)),
        ("auto", "cpu", True, "static", ()),
        ("onnx", "cuda:0", False, "static", ()),
    ],
)
def test_draft_heads_run_as_their_verifier_on_onnxruntime(
    asked: EngineName, device: str, trees: bool, name: str, said: tuple[str, ...]
) -> None:
    settings = EngineSettings(asked, trees=trees)
    choice = chosen_for_head(asked, Where((device,), 1), settings, ENGINES["onnx"])
    assert (choice.name, choice.said) == (name, said)
    block = chosen_for_head(asked, Where((device,), 1), settings, ENGINES["onnx"], blocks=True)
    assert block == chosen_for_head(asked, Where((device,), 1), EngineSettings(asked), ENGINES["onnx"])


class Toy(Engine):
    """An engine that finds out late whether it can."""

    name = "toy"  # type: ignore[assignment]
    does = "runs on a toy"
    tried = True

    def __init__(self, able: bool) -> None:
        self.able = able

    def why_not(self, model: PreTrainedModel, where: Where) -> str | None:  # noqa: ARG002
        return None if where.device.type == "cpu" else "toys stay at home"

    def unasked(self, model: PreTrainedModel, where: Where, settings: EngineSettings) -> str | None:  # noqa: ARG002
        return "auto; the toy"

    def build(
        self,
        model: PreTrainedModel,
        vocabulary: int,
        name: str,  # noqa: ARG002
        settings: EngineSettings,  # noqa: ARG002
    ) -> Slot | None:
        return Slot(EagerPasses(model, vocabulary)) if self.able else None


@pytest.mark.parametrize("able", [True, False])
def test_a_further_engine_is_a_row(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(able)
    monkeypatch.setattr("specctl.models.onnx.engine.packages_there", lambda: False)
    monkeypatch.setattr(engine_table, "ENGINES", {"toy": toy, **ENGINES})
    model = random_model("llama")
    choice = chosen("auto", model, CPU, EngineSettings())
    assert (choice.engine, choice.name, choice.why) == (toy, "toy or eager", "auto; the toy")
    asked: EngineName = "toy"  # type: ignore[assignment]
    assert chosen(asked, model, CPU, EngineSettings()).name == "toy"
    moved = chosen(asked, model, CUDA, EngineSettings())
    assert (moved.name, moved.said) == ("eager", ("runs eagerly: toys stay at home",))
    found = choice.build(model, 60, "it", EngineSettings())
    assert (found is not None) is able
    if found is None:
        assert choice.otherwise is not None
        found = choice.otherwise.build(model, 60, "it", EngineSettings())
    assert found is not None
    assert found.extend([1, 2], keep=1).logits.shape == torch.Size([1, 60])
