"""Norms that torch knows by name are computed by that name, and no others."""

import pytest
import torch

from specctl.models.passes.cuda_kernels import fuse_norms
from tests.support.toys import FAMILIES, random_model

FUSED = {"llama", "mistral", "qwen3"}


def fused_in(model: torch.nn.Module) -> int:
    return sum("forward" in vars(layer) for layer in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_says_the_same(family: str) -> None:
    model = random_model.__wrapped__(family)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight += torch.linspace(-0.5, 0.5, weight.numel()).view_as(weight)
        ids = torch.arange(7)[None]
        before = model(ids).logits
        fuse_norms(model)
        after = model(ids).logits
        for _ in range(2):  # of a second runner
            fuse_norms(model)
        assert torch.equal(model(ids).logits, after)
    assert bool(fused_in(model)) == (family in FUSED)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


class Shifted(torch.nn.Module):
    """Not quite one, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.variance_epsilon = 1e-6

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(states, (8,), self.weight + 1e-3, self.variance_epsilon)


def test_what_is_only_alike_stays() -> None:
    fuse_norms(layer := Shifted())  # type: ignore[arg-type]
    assert not fused_in(layer)
    layer.weight.data -= 1e-3
    fuse_norms(other := torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.RMSNorm(8)))  # type: ignore[arg-type]
    assert not fused_in(other)


def test_weights_that_move_are_those_that_are_read() -> None:
    model = random_model.__wrapped__("llama")
    fuse_norms(model)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        before = model(ids).logits
        for layer in model.modules():
            if "forward" in vars(layer):
                layer.weight = torch.nn.Parameter(2 * layer.weight)
        assert not torch.allclose(model(ids).logits, before)
