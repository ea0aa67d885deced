"""The signal of a DISCO head, live: what it is computed from, and when."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specctl.decoding.composition import build_drafter, readable
from specctl.decoding.drafters import ModelDrafter
from specctl.decoding.draws import uniforms
from specctl.decoding.hierarchy import PreVerifiedDrafter
from specctl.decoding.logits.device import DeviceLogits, read_top_probs
from specctl.decoding.logits.host import HostLogits, Softmax
from specctl.decoding.logits.token_sampler import TOP_FIELDS, TokenSampler
from specctl.decoding.sampling import Sampling
from specctl.errors import ProfileError
from specctl.models.running.eager import EagerPasses
from specctl.models.running.graph import GraphPasses
from specctl.models.running.passes import Passes
from specctl.models.running.slot import Slot
from specctl.models.running.static import StaticPasses
from specctl.policies import Setting
from specctl.policies.published import Constant, Disco, SpecDecPlusPlus
from specctl.records import DraftStep
from tests.support.toys import (
    FAMILIES,
    Replays,
    TableRunner,
    noisy_copy,
    random_model,
    random_predictor,
    related_table,
    seeded,
    table,
    toy_disco,
)
from tests.support.traced import pair_of

PROMPT = [5, 9, 2]
OWN = frozenset({"own_accept_prob"})
HEAD = toy_disco()


def assert_own(steps: Sequence[DraftStep], logits: torch.Tensor) -> None:
    """Each step's signal is the head's word on the raw distribution ``(n, V)`` behind it and its index."""
    raw = logits.double().softmax(-1)
    tops = raw.sort(descending=True).values[:, :10]
    tops = torch.nn.functional.pad(tops, (0, 10 - tops.shape[1]))
    entropy = torch.special.entr(raw).sum(-1)
    read = zip(tops.tolist(), entropy.tolist(), (step.index for step in steps), strict=True)
    expected = [HEAD.own_accept_prob(*numbers) for numbers in read]
    assert [step.own_accept_prob for step in steps] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=8)], ids=["greedy", "filtered"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_heads_word_on_the_law_behind_the_token(family: str, sampling: Sampling) -> None:
    drafter = ModelDrafter(Slot(EagerPasses(random_model(family), 64)), Constant(6), OWN, HEAD)
    drafter.begin(sampling, frozenset(), None if sampling.greedy else seeded(3))
    with torch.inference_mode():
        steps = drafter.draft(PROMPT, 6).steps
        text = [*PROMPT, *(step.token for step in steps)]
        whole = Slot(EagerPasses(random_model(family), 64)).extend(text[:-1], keep=6)
    assert [step.index for step in steps] == [1, 2, 3, 4, 5, 6]
    assert_own(steps, whole.logits)
    assert {step.entropy for step in steps} == {None}, "it was read for the head alone"


def test_a_middle_model_numbers_the_tokens_of_its_block() -> None:
    middle = related_table(table(1), 2)
    inner = ModelDrafter(TableRunner(related_table(middle, 3)), Constant(2))
    drafter = PreVerifiedDrafter(inner, TableRunner(middle), Constant(8), record=OWN, predictor=HEAD)
    drafter.begin(Sampling(), frozenset(), None)
    with torch.inference_mode():
        steps = drafter.draft([1, 2], 8).steps
        text = [1, 2, *(step.token for step in steps)]
        whole = TableRunner(middle).extend(text[:-1], keep=len(steps))
    assert [step.index for step in steps] == list(range(1, 9))
    assert_own(steps, whole.logits)


@pytest.mark.parametrize("make", [StaticPasses, lambda model, length: GraphPasses(model, length, Replays())])
def test_passes_read_within_them_give_the_same(make: Callable[[PreTrainedModel, int], Passes]) -> None:
    """A captured or compiled pass carries the largest probabilities along; the head itself stays outside."""
    model = noisy_copy("llama")
    drafts = []
    for runner in (Slot(EagerPasses(model, 64)), Slot(make(model, 64))):
        drafter = ModelDrafter(runner, Disco(threshold=0.0, max_draft=6), predictor=HEAD)
        drafter.begin(Sampling(), frozenset(), None)
        with torch.inference_mode():
            drafts.append(drafter.draft(PROMPT, 6).steps)
    assert [step.token for step in drafts[0]] == [step.token for step in drafts[1]]
    expected, found = ([step.own_accept_prob for step in steps] for steps in drafts)
    assert len(set(found)) == 6
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("vocabulary", [4, 10, 200])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=3)], ids=["greedy", "filtered"])
def test_a_row_on_the_host_is_read_as_on_a_device(sampling: Sampling, vocabulary: int) -> None:
    reader = TokenSampler(sampling, frozenset({"entropy"}), tops=True)
    for seed in range(10):
        logits = 3 * torch.randn(vocabulary, generator=seeded(seed))
        uniform = None if sampling.greedy else uniforms((), torch.device("cpu"), seeded(seed))
        number = None if uniform is None else float(uniform)
        (here,), _ = HostLogits(logits[None].numpy()).sample(reader, [number])
        (there,), _ = DeviceLogits(logits[None]).sample(reader, [number])
        several = read_top_probs(torch.stack([logits, logits + 1]))
        assert reader.fields == ("token", "entropy", *TOP_FIELDS)
        torch.testing.assert_close(torch.tensor(here, dtype=torch.float64), there, atol=1e-6, rtol=1e-5)
        assert here[2:] == sorted(here[2:], reverse=True)
        assert sum(here[2:]) <= 1 + 1e-6
        torch.testing.assert_close(several, there[2:].float().expand(2, 10), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            torch.from_numpy(HostLogits(logits[None].numpy()).top_probs())[0], there[2:].float(), atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("form", [HostLogits, DeviceLogits])
def test_suppressed_and_infinite_logits(form: Any) -> None:
    def tops(*logits: float) -> torch.Tensor:
        row = torch.tensor([logits])
        return torch.as_tensor(form(row.numpy() if form is HostLogits else row).top_probs()[0])

    assert tops(0.0, -torch.inf, 1.0, -torch.inf)[2:].tolist() == [0.0] * 8
    assert tops(0.0, torch.inf)[0].isnan()


def test_without_being_asked_for_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> list[float]:
        raise AssertionError("the largest probabilities were read")

    monkeypatch.setattr(Softmax, "tops", never)
    drafter = ModelDrafter(TableRunner(table(1)), Constant(3), predictor=HEAD)
    drafter.begin(Sampling(), frozenset(), None)
    assert [step.own_accept_prob for step in drafter.draft([1, 2], 3).steps] == [None] * 3
    drafter = ModelDrafter(TableRunner(table(1)), Disco(), predictor=HEAD)
    drafter.begin(Sampling(), frozenset(), None)
    with pytest.raises(AssertionError, match="were read"):
        drafter.draft([1, 2], 3)


def runner() -> Slot:
    return TableRunner(table(1))


def test_a_policy_needs_a_head_of_its_kind() -> None:
    states = random_predictor(5)
    with pytest.raises(ValueError, match="needs a DISCO head"):
        ModelDrafter(runner(), Disco(), predictor=states)
    with pytest.raises(ValueError, match="needs a head on hidden states"):
        ModelDrafter(runner(), SpecDecPlusPlus(), predictor=HEAD)
    both = pair_of(runner(), runner(), heads=[states])
    assert {"accept_prob", "own_accept_prob"} <= readable(both)
    for name in ("disco", "specdec++"):
        assert build_drafter(both, Setting(name)) is not None, "each finds its own"
    for name, head in (("disco", "head"), ("specdec++", "disco")):
        with pytest.raises(ProfileError, match="names a") as found:
            build_drafter(both, Setting(name, head=head))
        assert f"--kind {name}" in found.value.hint
    with pytest.raises(ProfileError, match="has no head"):
        build_drafter(pair_of(runner(), runner()), Setting("disco"))
