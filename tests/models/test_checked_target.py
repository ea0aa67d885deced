"""A target that keeps something of what was rejected is found out, without knowing what it keeps."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.errors import ModelError
from specctl.models.passes.forward import Forward
from specctl.models.passes.recurrent_state import RecurrentState
from specctl.models.running.eager import EagerPasses
from specctl.models.running.passes import Request
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import CheckedPasses
from specctl.policies.published import Constant
from tests.support.recurrent_models import noisy_recurrent, recurrent_model
from tests.support.toys import noisy_copy, random_model

PROMPT = (7, 3, 12, 5)


def run(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    engine: type[EagerPasses] = EagerPasses,
    fresh: type[EagerPasses] = EagerPasses,
) -> Slot:
    target = Slot(CheckedPasses(Slot(engine(model, 64)), lambda: Slot(fresh(model, 64)), "org/model"))
    drafter = ModelDrafter(Slot(EagerPasses(draft, 64)), Constant(4))
    with torch.inference_mode():
        prefill(target, drafter, PROMPT)
        list(decode(target, drafter, PROMPT, 24, Sampling()))
    return target


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_models_that_forget_pass(family: str) -> None:
    difference = run(random_model(family), noisy_copy(family, 0.05)).passes.difference
    assert difference is not None
    assert difference < 1e-4


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "jamba", "zaya, sliding", "lfm2"])
@pytest.mark.representatives("nemotron_h", "lfm2")
def test_so_do_models_with_a_state(family: str) -> None:
    difference = run(recurrent_model(family), noisy_recurrent(family, 0.05)).passes.difference
    assert difference is not None
    assert difference < 1e-4


def test_a_state_that_is_not_restored_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecurrentState, "restore", lambda *_: None)
    with pytest.raises(ModelError, match="'org/model' does not forget rejected tokens") as found:
        run(recurrent_model("qwen3_next"), noisy_recurrent("qwen3_next", 0.05))
    assert found.value.exit_code == 3


class Damages(EagerPasses):
    """Spoils the last entry that it keeps."""

    def rollback(self, slot: int, length: int) -> int:
        went_back = 0 < length < self.length
        found = super().rollback(slot, length)
        if went_back:
            self._cache.layers[0].keys[:, :, length - 1] *= 0.5  # type: ignore[index]
        return found


def test_a_cache_that_is_damaged_by_a_rollback_is_an_error() -> None:
    with pytest.raises(ModelError, match="does not forget"):
        run(random_model("llama"), noisy_copy("llama", 0.05), Damages)


def test_half_precision_is_not_mistaken_for_a_fault() -> None:
    for family in ("llama", "mistral"):
        model = deepcopy(random_model(family)).to(torch.bfloat16)  # type: ignore[no-untyped-call]
        difference = run(model, noisy_copy(family, 0.05)).passes.difference
        assert difference is not None
        assert difference < 0.1


def test_it_looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    compare = CheckedPasses._compare
    monkeypatch.setattr(CheckedPasses, "_compare", lambda *given: (seen.append(1), compare(*given))[1])
    target = run(random_model("llama"), noisy_copy("llama", 0.05))
    assert len(seen) == 1
    assert target.length > len(PROMPT)


def test_what_it_compares_with_is_read_as_without_a_draft() -> None:
    """The prompt but its last token in one pass, then one token at a time: widths of passes may round differently."""
    reads: list[int] = []

    class Notes(EagerPasses):
        def forward(self, requests: Sequence[Request]) -> list[Forward]:
            reads.append(len(requests[0].tokens))
            return super().forward(requests)

    run(random_model("llama"), noisy_copy("llama", 0.05), fresh=Notes)
    assert reads[0] == len(PROMPT) - 1
    assert len(reads) > 2
    assert set(reads[1:]) == {1}


def test_without_a_rejection_there_is_nothing_to_compare() -> None:
    assert run(random_model("llama"), random_model("llama")).passes.difference is None
