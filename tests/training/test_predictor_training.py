from collections.abc import Iterator
from functools import partial
from math import log
from pathlib import Path

import pytest
import torch
from toys import FAMILIES, random_model, seeded

from specctl.errors import UsageError
from specctl.models.passes.last_states import last_hidden_states
from specctl.models.running.eager import EagerRunner
from specctl.training import saved_state
from specctl.training.predictors.draft_states import ModelStates
from specctl.training.predictors.examples import Example
from specctl.training.predictors.mixing import acceptance, mix, signals, states
from specctl.training.predictors.predictor_learner import Recipe, Schedule, Training, weighted_loss

LIKED = 7


class KilledError(Exception):
    pass


RECIPES = [Recipe(1, 1.0), Recipe(2, 6.0)]


def examples(count: int, seed: int = 0) -> list[Example]:
    """Acceptance depends on the proposal alone, so a head can learn it."""
    generator = seeded(seed)
    found = []
    for number in range(count):
        prompt, answer, proposals = (
            torch.randint(64, (size,), generator=generator, dtype=torch.int32) for size in (3, 12, 12)
        )
        proposals = torch.where(proposals < 32, LIKED, 50)
        accepted = torch.where(proposals == LIKED, 0.95, 0.05)
        found.append(Example(number, prompt, answer, proposals, accepted, *torch.rand(3, 12, generator=generator)))
    return found


def train(path: Path, data: list[Example], schedule: Schedule, after_step=lambda: None) -> Training:  # type: ignore[no-untyped-def]
    training = Training(ModelStates(random_model("llama")), RECIPES, schedule, data, path)
    training.run(after_step)
    return training


def weights(training: Training) -> list[torch.Tensor]:
    return [weight for head in training.heads for weight in head.state_dict().values()]


def test_the_loss_worked_out_by_hand() -> None:
    logits = torch.tensor([log(3), -log(4)])  # 0.75 and 0.2
    accepted = torch.tensor([1.0, 0.5])
    # Weights: 1 for the first; 0.5 and 6 * 0.5 for the second.
    expected = -(log(0.75) + 0.5 * log(0.2) + 3 * log(0.8)) / 4.5
    assert weighted_loss(logits, accepted, 6.0).item() == pytest.approx(expected, abs=1e-6)


def test_the_rate_follows_half_a_cosine() -> None:
    schedule = Schedule(lr=2.0)
    assert [schedule.rate(step, 4) for step in range(5)] == pytest.approx([2, 1.7071068, 1, 0.2928932, 0])
    assert Schedule(epochs=3, batch_size=4).steps(9) == 9


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
    monkeypatch.setattr("specctl.models.passes.last_states.TOKENS_AT_ONCE", 40)
    model = random_model(family)
    sequences = [torch.randint(64, (size,), generator=seeded(size)) for size in (19, 7, 3, 20)]
    with torch.no_grad():
        found = last_hidden_states(model, sequences)
    for sequence, state in zip(sequences, found, strict=True):
        with torch.inference_mode():
            expected = EagerRunner(model, 64).extend(sequence.tolist(), keep=len(sequence), hidden=True).hidden
        torch.testing.assert_close(state, expected, atol=1e-4, rtol=1e-4)


def test_states_stand_where_the_mix_holds_a_proposal() -> None:
    data = examples(2)
    mixed = mix(data, 0.5, "seed")
    with torch.no_grad():
        whole = last_hidden_states(random_model("llama"), [one.tokens for one in mixed])
    expected = [state[3:][one.drafted] for state, one in zip(whole, mixed, strict=True)]
    assert torch.equal(states(random_model("llama"), mixed), torch.cat(expected))


def test_a_head_learns_what_can_be_learned(tmp_path: Path) -> None:
    training = train(tmp_path / "state", examples(64), Schedule(epochs=12, batch_size=8, lr=1e-2))
    unseen = examples(20, seed=1)
    mixed = mix(unseen, 0.15, "unseen")
    with torch.inference_mode():
        said = training.heads[0].accept_prob(states(random_model("llama"), mixed))
    truth = acceptance(unseen, mixed)
    assert said[truth > 0.5].mean() > 0.75
    assert said[truth < 0.5].mean() < 0.25


def test_an_interrupted_training_ends_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_state, "SAVE_SECONDS", 0.0)
    schedule = Schedule(epochs=3, batch_size=4, lr=1e-2, signals=True)
    data = examples(18)
    whole = train(tmp_path / "whole", data, schedule)

    def kill(left: Iterator[int]) -> None:
        if next(left, None) is None:
            raise KilledError

    for steps in (3, 5):
        left = iter(range(steps))
        with pytest.raises(KilledError):
            train(tmp_path / "torn", data, schedule, partial(kill, left))
    resumed = Training(ModelStates(random_model("llama")), RECIPES, schedule, data, tmp_path / "torn")
    assert resumed.step == 8
    resumed.run()
    assert resumed.steps == whole.steps == 15
    for one, other in zip(weights(whole), weights(resumed), strict=True):
        assert torch.equal(one, other)


def test_another_seed_makes_another_head(tmp_path: Path) -> None:
    first, second = (train(tmp_path / str(seed), examples(8), Schedule(epochs=1, seed=seed)) for seed in (0, 1))
    assert not torch.equal(weights(first)[-1], weights(second)[-1])


def test_the_state_of_another_training_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "state", examples(8), Schedule(epochs=1))
    with pytest.raises(UsageError, match="another training"):
        train(tmp_path / "state", examples(8), Schedule(epochs=2))
    (tmp_path / "state").write_bytes(b"torn")
    with pytest.raises(UsageError, match="damaged"):
        train(tmp_path / "state", examples(8), Schedule(epochs=1))
