"""Attention in groups, compared with torch's own."""

import pytest
import torch
from transformers import AttentionInterface

from specctl.models.passes.cuda_kernels import grouped
from tests.support.pretend_cuda import Devices
from tests.support.toys import seeded

USUAL = AttentionInterface()["sdpa"]


class Layer(torch.nn.Module):
    """What transformers' attention functions want to know of a layer."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.num_key_value_groups = group
        self.is_causal = True


def given(batch: int, group: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as views of larger buffers, as runners have them, and a mask."""
    draws = seeded(batch + width)
    query = torch.randn(batch, width, 2 * group, 8, generator=draws).to(dtype).transpose(1, 2)
    cache = torch.randn(2, batch, 2, 41, 8, generator=draws).to(dtype)
    at = 40 - width - torch.arange(batch)[:, None, None] + torch.arange(width)[:, None]  # (B, T, 1)
    seen = torch.arange(40) <= at  # (B, T, S)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)[:, None]
    return query, cache[0][:, :, :40], cache[1][:, :, :40], mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "group", "width"), [(1, 1, 1), (1, 4, 6), (3, 2, 1), (3, 4, 5), (1, 2, 80)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_it_gives_what_torch_gives(
    batch: int, group: int, width: int, dtype: torch.dtype, scaling: float | None
) -> None:
    numbers = given(batch, group, min(width, 30), dtype)
    wanted, _ = USUAL(Layer(group), *(x.double() for x in numbers), scaling=scaling)
    with Devices() as cuda:
        found, weights = grouped(Layer(group), *(cuda.put(x, "cuda:0") for x in numbers), scaling=scaling)
        assert cuda.attended == []
        there = found.cpu()
    assert weights is None
    assert there.dtype == dtype
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(there.double(), wanted, atol=close, rtol=close)


def test_scores_are_not_rounded_to_the_models_numbers() -> None:
    """Two scores that are one number in bfloat16 have weights of 0.44 and 0.56."""
    query = torch.full((1, 1, 1, 2), 16.0, dtype=torch.bfloat16)
    key = torch.tensor([[[[16.0, 0.0], [16.0, 0.015]]]], dtype=torch.bfloat16)
    value = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.bfloat16)
    with Devices() as cuda:
        numbers = [cuda.put(x, "cuda:0") for x in (query, key, value, torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16))]
        found, _ = grouped(Layer(1), *numbers, scaling=1.0)
        assert found.item() == pytest.approx(0.56, abs=0.01)


@pytest.mark.parametrize("case", ["no mask", "a long pass", "a bias", "the CPU"])
def test_all_else_goes_to_the_usual_attention(case: str) -> None:
    query, key, value, mask = given(1, 2, 30, torch.float32)
    if case == "a long pass":
        query, mask = query.repeat(1, 1, 3, 1), mask.repeat(1, 1, 3, 1)
    more = {"position_bias": torch.ones(1, 4, 30, 40)} if case == "a bias" else {}
    wanted, _ = USUAL(Layer(2), query, key, value, None if case == "no mask" else mask, **more)
    if case == "the CPU":
        assert torch.equal(grouped(Layer(2), query, key, value, mask)[0], wanted)
        return
    with Devices() as cuda:
        query, key, value, mask = (cuda.put(x, "cuda:0") for x in (query, key, value, mask))
        more = {name: cuda.put(x, "cuda:0") for name, x in more.items()}
        found, _ = grouped(Layer(2), query, key, value, None if case == "no mask" else mask, **more)
        assert len(cuda.attended) == 1
        torch.testing.assert_close(found.cpu(), wanted)
