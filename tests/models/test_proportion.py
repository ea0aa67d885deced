"""A draft that is too large to pay is told of, by doctor and wherever a pair is loaded, in the same words."""

from dataclasses import replace
from pathlib import Path

import pytest

from specctl.doctor.diagnosis import diagnose
from specctl.models.loading.assembly import large_draft, load_pair
from specctl.models.running.engines import EngineSettings
from specctl.profile.schema import Profile
from tests.support.checkpoints import llama_config, save_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("sizes")
    return {
        layers: save_model(folder / f"{layers}", llama_config(num_hidden_layers=layers, intermediate_size=512))
        for layers in (1, 8)
    }


@pytest.mark.parametrize(("target", "draft"), [(1, 8), (8, 8), (8, 1)])
def test_the_words_are_those_of_doctor(folders: dict[int, Path], target: int, draft: int) -> None:
    table = {"target": {"model": str(folders[target])}, "draft": {"model": str(folders[draft])}}
    profile = Profile.model_validate({**table, "engine": "eager"})
    told: list[str] = []
    load_pair(profile, engines=replace(EngineSettings.of(profile), notice=told.append))
    found = [line for line in told if "of the parameters" in line]
    assert found == [line for line in diagnose(profile).advice if "of the parameters" in line]
    assert len(found) == (draft == 8)


def test_half_is_not_too_large() -> None:
    assert large_draft(("target", 100), ("draft", 50)) is None
    assert large_draft(("draft", 100), ("draft.draft", 841)) == (
        "The draft.draft model has 841% of the parameters of the draft model; drafting pays off when the draft is many "
        "times smaller."
    )
