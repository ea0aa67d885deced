"""What rounding does to predictions, compared with computations by hand."""

from math import exp

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from specctl.decoding.draft_tokens import CHUNK
from specctl.models.onnx.blocks import Blocks
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from tests.support.toys import random_model
from tools.quality import WINDOW, Quality, Rounding, Sample, quality, windows_of

VOCABULARY = 64
PROMPTS = [[3, 14, 15, 9], [2, 7, 1]]


def ids(count: int) -> list[int]:
    found: list[int] = torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(2)).tolist()
    return found


def test_losses_are_those_of_one_pass_and_a_model_keeps_its_own_text() -> None:
    model, window = random_model("llama"), ids(CHUNK + 6)
    slot = Slot(EagerPasses(model, VOCABULARY))
    with torch.inference_mode():
        sample = Sample.of(slot, [window], PROMPTS, 12)
        logits = model(torch.tensor([window[:-1]])).logits[0, :, :VOCABULARY]
    found = quality(slot, sample)
    expected = cross_entropy(logits, torch.tensor(window[1:]), reduction="none")
    np.testing.assert_allclose(found.losses, expected, rtol=1e-4)
    assert found.perplexity == pytest.approx(exp(expected.mean()), rel=1e-4)
    assert [len(written) for _, written in sample.texts] == [12, 12]
    assert (found.stays, found.until) == (1.0, 12.0)
    assert found.above(found) == (0.0, 0.0)
    assert slot.length == 0


def test_shares_and_the_place_where_texts_part() -> None:
    kept = [np.array([True, True, False, True]), np.array([True] * 4)]
    one, other = (Quality(np.array(losses), kept) for losses in ([1.0, 2.0], [1.1, 2.3]))
    assert (one.stays, one.until) == (7 / 8, 3.0)
    assert other.above(one) == pytest.approx((exp(0.2) - 1, 0.1 / 2**0.5))


def test_a_rounded_model_predicts_otherwise_and_gets_its_weights_back() -> None:
    model = random_model("llama")
    slot = Slot(EagerPasses(model, VOCABULARY))
    whole = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with torch.inference_mode():
        sample = Sample.of(slot, [ids(40)], PROMPTS, 20)
    first = quality(slot, sample)
    rounded = Rounding.read("4/32/symmetric+8")
    assert str(rounded) == "4/32/symmetric+8"
    with rounded.on(model):
        layer, head = model.model.layers[0].mlp.up_proj, model.get_output_embeddings()
        assert torch.equal(layer.weight, rounding_of(whole["model.layers.0.mlp.up_proj.weight"], 4))
        assert torch.equal(head.weight, rounding_of(whole["lm_head.weight"], 8))
        found = quality(slot, sample)
    assert not np.array_equal(found.losses, first.losses)
    assert found.stays < 1
    assert all(torch.equal(weight, whole[name]) for name, weight in model.named_parameters())
    assert np.array_equal(quality(slot, sample).losses, first.losses), "its inputs are not rounded either"
    with pytest.raises(ValueError, match="other is none of symmetric, zeros, minima"):
        Rounding.read("4/32/other")


def rounding_of(weight: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.from_numpy(Blocks.of(weight.numpy(), bits, form="symmetric").values())


def test_windows_lie_apart_and_begin_alike() -> None:
    text = [*range(10 * WINDOW)]
    windows = windows_of(text, [-1], 4)
    assert [window[:2] for window in windows] == [[-1, place * 10 * WINDOW // 4] for place in range(4)]
    assert {len(window) for window in windows} == {WINDOW + 1}
