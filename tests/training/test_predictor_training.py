from math import log
from pathlib import Path

import pytest
import torch
from made import liked_examples as examples

from specctl.models.running.eager import EagerPasses
from specctl.models.running.slot import Slot
from specctl.training.epochs import Schedule, Training
from specctl.training.predictor_examples import ModelStates, acceptance, last_hidden_states, mix, signals
from specctl.training.predictor_learner import (
    PredictorLearner,
    PredictorRecipe,
    new_predictor,
    weighted_loss,
)
from tests.support.toys import FAMILIES, random_model, seeded


def test_the_loss_worked_out_by_hand() -> None:
    logits = torch.tensor([log(3), -log(4)])  # 0.75 and 0.2
    accepted = torch.tensor([1.0, 0.5])
    # Weights: 1 for the first; 0.5 and 6 * 0.5 for the second.
    expected = -(log(0.75) + 0.5 * log(0.2) + 3 * log(0.8)) / 4.5
    assert weighted_loss(logits, accepted, 6.0).item() == pytest.approx(expected, abs=1e-6)


def test_mixing_takes_the_targets_token_at_its_share() -> None:
    data = examples(200)
    mixed = mix(data, 0.25, "seed")
    drafted = torch.cat([one.drafted for one in mixed])
    assert drafted.float().mean().item() == pytest.approx(0.75, abs=0.03)
    for example, one in zip(data, mixed, strict=True):
        assert torch.equal(one.tokens[:3], example.prompt)
        assert torch.equal(one.tokens[3:][one.drafted], example.proposals[one.drafted])
        assert torch.equal(one.tokens[3:][~one.drafted], example.answer[~one.drafted])
    assert torch.equal(drafted, torch.cat([one.drafted for one in mix(data, 0.25, "seed")]))
    assert not torch.equal(drafted, torch.cat([one.drafted for one in mix(data, 0.25, "other")]))


def test_labels_and_signals_are_those_of_the_drafted_tokens() -> None:
    data = examples(3)
    mixed = mix(data, 0.5, "seed")
    drafted = torch.cat([one.drafted for one in mixed])
    assert torch.equal(acceptance(data, mixed), torch.cat([example.acceptance for example in data])[drafted])
    assert torch.equal(signals(data, mixed)[:, 2], torch.cat([example.token_prob for example in data])[drafted])


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_the_drafter_will_see(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specctl.training.predictor_examples.TOKENS_AT_ONCE", 40)
    model = random_model(family)
    sequences = [torch.randint(64, (size,), generator=seeded(size)) for size in (19, 7, 3, 20)]
    with torch.no_grad():
        found = last_hidden_states(model, sequences)
    for sequence, state in zip(sequences, found, strict=True):
        with torch.inference_mode():
            expected = Slot(EagerPasses(model, 64)).extend(sequence.tolist(), keep=len(sequence), hidden=True).hidden
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)


def test_states_stand_where_the_mix_holds_a_proposal() -> None:
    data = examples(2)
    mixed = mix(data, 0.5, "seed")
    with torch.no_grad():
        whole = last_hidden_states(random_model("llama"), [one.tokens for one in mixed])
    expected = [state[3:][one.drafted] for state, one in zip(whole, mixed, strict=True)]
    assert torch.equal(ModelStates(random_model("llama")).of([], mixed), torch.cat(expected))


def test_a_predictor_learns_what_can_be_learned(tmp_path: Path) -> None:
    recipes = [PredictorRecipe(1, 1.0), PredictorRecipe(2, 6.0)]
    learner = PredictorLearner(ModelStates(random_model("llama")), recipes, examples(64), 0)
    Training(learner, Schedule(epochs=12, lr=1e-2), 64, tmp_path / "state").run()
    unseen = examples(20, seed=1)
    mixed = mix(unseen, 0.15, "unseen")
    with torch.inference_mode():
        said = learner.networks[0](ModelStates(random_model("llama")).of([], mixed), signals(unseen, mixed)).sigmoid()
    truth = acceptance(unseen, mixed)
    assert said[truth > 0.5].mean() > 0.75
    assert said[truth < 0.5].mean() < 0.25


def test_another_seed_makes_another_predictor() -> None:
    one, same, other = (new_predictor(8, PredictorRecipe(1), seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(weight, same[name]) for name, weight in one.items())
    assert not all(torch.equal(weight, other[name]) for name, weight in one.items())
