"""The signal of a head, live: which token it is about, and when it is there."""

import pytest
import torch

from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.sampling import Sampling
from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.policies.published import Constant, SpecDecPlusPlus
from tests.support.toys import (
    FAMILIES,
    TableRunner,
    random_model,
    random_predictor,
    related_table,
    seeded,
    table,
    toy_head,
)

PROMPT = [5, 9, 2]


@pytest.mark.parametrize("reads_signals", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_heads_word_on_the_token_before(family: str, reads_signals: bool) -> None:
    head = random_predictor(32, depth=2, reads_signals=reads_signals, spread=0.2)
    record = frozenset({"accept_prob", "entropy", "top_prob", "token_prob"})
    drafter = ModelDrafter(Slot(EagerPasses(random_model(family), 64)), Constant(6), record, head)
    drafter.begin(Sampling(temperature=1.0, top_k=8), frozenset(), seeded(3))
    with torch.inference_mode():
        draft = drafter.draft(PROMPT, 6)
        whole = Slot(EagerPasses(random_model(family), 64)).extend([*PROMPT, *draft.tokens], keep=6, hidden=True)
        signals = torch.tensor([[step.entropy, step.top_prob, step.token_prob] for step in draft.steps])
        assert whole.hidden is not None
        expected = head.accept_prob(whole.hidden, signals).tolist()
    found = [step.accept_prob for step in draft.steps]
    assert found[0] == 1.0
    assert found[1:] == pytest.approx(expected[:-1], abs=1e-4)
    assert len(set(found)) == 6


def test_without_being_asked_for_it_costs_nothing() -> None:
    class Plain(TableRunner):
        def extend(self, tokens, keep, *, hidden=False):  # type: ignore[no-untyped-def]
            assert not hidden
            return super().extend(tokens, keep)

    logits = related_table(table(1), 2)
    drafter = ModelDrafter(Plain(logits), Constant(3), predictor=toy_head(logits, 3))
    drafter.begin(Sampling(), frozenset(), None)
    assert [step.accept_prob for step in drafter.draft([1, 2], 3).steps] == [None] * 3


def test_a_policy_that_reads_it_needs_a_head() -> None:
    with pytest.raises(ValueError, match="head"):
        ModelDrafter(TableRunner(table(1)), SpecDecPlusPlus())
