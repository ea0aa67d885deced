"""Which runner a model gets, and what is said when it is not the one asked for."""

import inspect
from typing import Any

import pytest
import torch

from specctl.errors import ModelError
from specctl.models.passes import compilation
from specctl.models.passes.compilation import Compiler, missing_compiler
from specctl.models.placing.engine_table import build_runner
from specctl.models.running.eager import EagerPasses
from specctl.models.running.engines import (
    LONG_RUN,
    EngineSettings,
    fixed_width,
)
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.profile.schema import Profile
from tests.support.toys import noisy_copy, random_model

TOKENS: list[int] = torch.randint(0, 60, (200,), generator=torch.Generator().manual_seed(3)).tolist()


def built(family: str = "llama", **settings: Any) -> tuple[str, list[str]]:
    """The engine a model gets, and what is said about it."""
    heard: list[str] = []
    runner = build_runner(random_model(family), 60, "it", EngineSettings(notice=heard.append, **settings))
    return runner.engine, heard


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({}, "eager"),
        ({"engine": "eager"}, "eager"),
        ({"engine": "eager", "expected_tokens": LONG_RUN}, "eager"),
        ({"engine": "static"}, "static"),
        ({"expected_tokens": LONG_RUN - 1}, "eager"),
        ({"expected_tokens": LONG_RUN}, "static, compiled"),
        ({"expected_tokens": LONG_RUN, "compile": False}, "eager"),
        ({"compile": True}, "static, compiled"),
        ({"engine": "static", "compile": False, "expected_tokens": LONG_RUN}, "static"),
    ],
)
def test_what_can_be_had_is_given_without_a_word(
    settings: dict[str, Any], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert built(**settings) == (engine, [])


def test_graphs_need_a_cuda_device() -> None:
    engine, (heard,) = built(engine="graph")
    assert engine == "static"
    assert heard == "it runs on the static engine: graphs need a CUDA device, and it is on cpu"


@pytest.mark.parametrize("engine", ["static", "graph"])
@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_windows_need_the_eager_engine(family: str, engine: str) -> None:
    found, (heard,) = built(family, engine=engine)
    assert found == "eager"
    assert heard == "it runs eagerly: it has layers with a sliding window or with a state of their own"


def test_what_nobody_asked_for_is_not_missed() -> None:
    assert built("mistral", expected_tokens=LONG_RUN) == ("eager", [])
    assert built("mistral", compile=True)[1]


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda _: None)
    monkeypatch.delenv("CXX", raising=False)
    assert built(engine="static", compile=True) == (
        "static",
        ["it runs uncompiled: there is no C++ compiler (g++, clang++, c++)"],
    )
    assert built(compile=True)[0] == "eager"
    monkeypatch.setenv("CXX", "icpx")
    assert missing_compiler(torch.device("cpu")) == "there is no C++ compiler (icpx)"


def test_deterministic_verification_needs_layers_that_can_go_back() -> None:
    runner = Slot(EagerPasses(random_model("llama"), 60))
    assert fixed_width(runner, random_model("llama")).engine == "eager, blocks of 16"
    with pytest.raises(ModelError, match="sliding window"):
        fixed_width(Slot(EagerPasses(random_model("mistral"), 60)), random_model("mistral"))


def test_a_pass_that_does_not_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such luck\nand more")

    monkeypatch.setattr(torch, "compile", refuse)
    heard: list[str] = []
    runner = Slot(StaticPasses(random_model("llama"), 60, compiler=Compiler("it", heard.append)))
    expected = Slot(EagerPasses(random_model("llama"), 60))
    for tokens in (TOKENS[:9], TOKENS[9:10], TOKENS[10:14]):
        found, wanted = (each.extend(tokens, keep=1).logits for each in (runner, expected))
        torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-4)
    assert heard == ["it runs uncompiled: torch.compile failed (RuntimeError: no such luck)"]


@pytest.mark.exhaustive
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="there is no C++ compiler")
def test_compiled_passes_of_two_models_at_every_length_and_capacity() -> None:
    """One after the other in one process: neither may run the other's code, nor that of a shorter cache.

    Each kind of pass is compiled once: at the start of a text, over a full cache, after it has grown. A torch that does
    not keep the passes of several models apart compiles them again for each.
    """
    apart = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    heard: list[str] = []
    said: list[str] = []
    models = random_model("gpt-neox"), noisy_copy("gpt-neox", noise=0.3)
    compiled = [
        Slot(StaticPasses(model, 60, capacity=24, compiler=Compiler(str(at), heard.append, said.append)))
        for at, model in enumerate(models)
    ]
    plain = [Slot(EagerPasses(model, 60)) for model in models]
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=apart):
        for width in (3, 1, 2, 7, 1, 12, 3, 1, -1, 6, 18, -1, 40, 1, 5, 64, 1, 12, 1):
            if width < 0:  # a text anew
                for each in (*compiled, *plain):
                    each.rollback(0)
                continue
            for runner, expected in zip(compiled, plain, strict=True):
                block = TOKENS[runner.length : runner.length + width]
                found, wanted = (each.extend(block, keep=width).logits for each in (runner, expected))
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
                for each in (runner, expected):
                    each.rollback(each.length - width // 3)
    assert heard == []
    assert len(said) == 2 * len(models)
    assert all(runner.widest_sample and runner.preparing_seconds for runner in compiled)


@pytest.mark.parametrize(("shape", "trees"), [({}, False), ({"tree": 16}, True)])
def test_the_profile_says_whether_there_are_trees(shape: dict[str, Any], trees: bool) -> None:
    profile = Profile.model_validate({"target": {"model": "a"}, "draft": {"model": "b", **shape}})
    assert EngineSettings.of(profile).trees == trees


def test_without_a_draft_there_are_no_trees() -> None:
    assert not EngineSettings.of(Profile.model_validate({"target": {"model": "a"}})).trees
