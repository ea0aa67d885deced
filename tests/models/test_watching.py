"""Watching a model's layers leaves the model as it was."""

from copy import deepcopy

import torch

from specctl.models.passes.watching import LAST, LayerWatch
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from tests.support.toys import random_model


def test_what_is_kept_takes_no_part_in_gradients():
    model = deepcopy(random_model("llama"))
    watch = LayerWatch(model)
    watch.watch([0, LAST])
    with torch.enable_grad():
        model(torch.tensor([[1, 2, 3]]))

    kept = watch.take()
    assert kept is not None
    assert all(not states.requires_grad for states in kept.values())
    deepcopy(model)  # torch copies no tensor that a gradient could flow through


def test_nor_does_what_a_runner_over_fixed_buffers_keeps():
    model = deepcopy(random_model("llama"))
    runner = Slot(StaticPasses(model, 64))
    runner.extend([1, 2, 3], keep=1, hidden=True)
    with torch.enable_grad():
        model(torch.tensor([[1, 2, 3]]))
    deepcopy(model)
