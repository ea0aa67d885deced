from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.profile.schema import model_path
from tests.support.slower_target import write_slower_target


def test_idle_layers_cost_time_and_change_nothing(tmp_path: Path) -> None:
    write_slower_target(tmp_path, 5)
    original, slower = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (model_path("target"), tmp_path)
    )
    assert len(slower.model.layers) == len(original.model.layers) + 5
    runners = [Slot(EagerPasses(model, 4096)) for model in (original, slower)]
    with torch.inference_mode():
        for tokens in ([1, 17, 300, 5, 64], [9], [40, 41]):
            first, second = (runner.extend(tokens, keep=len(tokens)).logits for runner in runners)
            assert torch.equal(first, second)
