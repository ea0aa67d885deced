"""What the eager engine asks of a pass."""

from typing import Any

import pytest
import torch

from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from tests.support.toys import random_model


@pytest.mark.parametrize(("keep", "rows"), [(0, 1), (1, 1), (2, 2)])
def test_logits_are_computed_of_what_is_kept(keep: int, rows: int) -> None:
    """One row where none is kept: to none at all, models say that all are meant."""
    widths: list[int] = []

    def note(_module: torch.nn.Module, _given: Any, logits: torch.Tensor) -> None:
        widths.append(logits.shape[1])

    model = random_model("llama")
    handle = model.lm_head.register_forward_hook(note)
    try:
        with torch.inference_mode():
            found = Slot(EagerPasses(model, 64)).extend([3, 4, 5], keep=keep).logits
    finally:
        handle.remove()
    assert (len(found), widths) == (keep, [rows])
