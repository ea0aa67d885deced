"""What attention is given on a device: masks that no layer has to make again, and buffers of few strides."""

from typing import Any

import pytest
import torch

from specctl.models.loading import model as loading
from specctl.models.placing.placement import Placement
from specctl.profile import resolve
from tests.support.pretend_cuda import Devices
from tests.support.pretend_cuda.pairs import TEXT, on, runner_of, tiny_model

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.mark.parametrize("engine", ["static", "graph"])
def test_few_tokens_attend_in_groups_and_prompts_as_usual(engine: str) -> None:
    with Devices() as cuda:
        runner = runner_of(engine, on(cuda, tiny_model(), "cuda:0"))
        runner.extend(TEXT[:100], keep=1)
        assert cuda.attended
        cuda.attended.clear()
        for width in (1, 2, 5):
            runner.extend(TEXT[:width], keep=width)
        runner.extend_tree(TEXT[:3], [0, 0])
        assert not cuda.attended


def test_masks_are_numbers_in_aligned_rows() -> None:
    with Devices() as cuda:
        runner = runner_of("eager", on(cuda, tiny_model(), "cuda:0"))
        runner.extend(TEXT[:21], keep=1)
        for width in (1, 2, 5):
            runner.extend(TEXT[:width], keep=width)
        runner.extend_tree(TEXT[:3], [0, 0])
        masks = [mask for *_, mask in cuda.attended if mask is not None]
        assert len(masks) >= 3
        for mask in masks:
            assert mask.dtype == torch.float32
            assert not any(step % 8 for step in mask.stride()[:-1])


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_rows_of_keys_have_few_strides(engine: str) -> None:
    """Kernels and plans that were chosen for a prompt of one length serve others."""
    with Devices() as cuda:
        model = on(cuda, tiny_model(), "cuda:0")
        strides = set()
        for length in (3, 17, 95, 130, 240):
            runner: Any = runner_of(engine, model)
            runner.extend(TEXT[:length], keep=1)
            strides.add(runner.passes._cache.layers[0].keys.stride())
        assert len(strides) == 1


@pytest.mark.parametrize(("device", "allowed"), [("cuda:0", False), ("cpu", True)])
def test_cudnns_attention_is_off_where_a_model_goes_to_a_card(
    device: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = resolve("embedded").profile.target
    placement = Placement(device, None, "float32", {device: 1})
    monkeypatch.setattr(loading, "placed_here", lambda *_: placement)
    monkeypatch.setattr(loading, "_read", lambda *_: tiny_model())
    with Devices() as cuda:
        loading.load_model(table, role="target")
        assert cuda.cudnn is allowed
