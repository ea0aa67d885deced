"""The loop is the same for all that is trained, and goes on where an earlier run ended."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from made import answer, disco_examples, draft_learner, liked_examples, recipe

from specctl.errors import UsageError
from specctl.models.draft_heads.kinds import RECIPES
from specctl.training import epochs
from specctl.training.epochs import Learner, Schedule, Training, batches
from specctl.training.predictor_examples import ModelStates, Stored
from specctl.training.predictor_learner import PredictorLearner, PredictorRecipe, features_of
from tests.support.toys import random_model

ITEMS = 7


def drafting(kind: str, optimizer: str) -> Learner:
    # Anchors, rounds and noise are drawn anew in each step.
    of = recipe(kind, anchors=3 if recipe(kind).anchors else 0, rounds=0.5, optimizer=optimizer)
    return draft_learner(of, [answer(number) for number in range(ITEMS)])


def predicting() -> Learner:
    recipes = [PredictorRecipe(1, 1.0, signals=True), PredictorRecipe(2, 6.0, signals=True)]
    return PredictorLearner(ModelStates(random_model("llama")), recipes, liked_examples(ITEMS), 0)


def judging() -> Learner:
    laws = Stored(torch.device("cpu"), features_of)
    return PredictorLearner(laws, [PredictorRecipe(None, 1.0)], disco_examples(ITEMS), 0)


LEARNERS: dict[str, Callable[[], Learner]] = {
    f"{kind}-{optimizer}": lambda kind=kind, optimizer=optimizer: drafting(kind, optimizer)
    for kind in RECIPES
    for optimizer in ("adamw", "muon")
} | {
    "specdec++": predicting,
    "disco": judging,
}


def training(name: str, path: Path, epochs: int = 2) -> tuple[Learner, Training]:
    learner = LEARNERS[name]()
    return learner, Training(learner, Schedule(epochs, batch_size=3, lr=1e-2), ITEMS, path)


def after(steps: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[], None]:
    """Raises an error after so many steps."""
    left: Iterator[int] = iter(range(steps - 1))

    def count() -> None:
        if next(left, None) is None:
            raise error

    return count


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.representatives("dflash-adamw", "specdec++", "disco", slow=("mtp-muon", "eagle3-adamw", "dspark-muon"))
def test_an_interrupted_training_ends_as_if_nothing_had_happened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, whole = training(name, tmp_path / "whole")
    whole.run()
    _, torn = training(name, tmp_path / "torn")
    with pytest.raises(KeyboardInterrupt):
        torn.run(after(2))
    _, resumed = training(name, tmp_path / "torn")
    assert resumed.step == 2
    monkeypatch.setattr(epochs, "SAVE_SECONDS", 0.0)
    with pytest.raises(RuntimeError):
        resumed.run(after(3, RuntimeError))
    learner, again = training(name, tmp_path / "torn")
    assert again.step == 4  # the last step before the error was not saved
    again.run()
    assert again.step == whole.step == whole.steps == 6
    for one, other in zip(expected.networks, learner.networks, strict=True):
        weights = other.state_dict()
        assert weights.keys() == one.state_dict().keys()
        for key, weight in one.state_dict().items():
            assert torch.equal(weight, weights[key]), key


def test_the_state_of_another_training_is_refused(tmp_path: Path) -> None:
    training("specdec++", tmp_path / "state", 1)[1].run()
    with pytest.raises(UsageError, match="another training"):
        training("specdec++", tmp_path / "state", 2)
    with pytest.raises(UsageError, match="another training"):
        training("disco", tmp_path / "state", 1)
    (tmp_path / "state").write_bytes(b"torn")
    with pytest.raises(UsageError, match="damaged"):
        training("specdec++", tmp_path / "state", 1)


def test_a_write_that_fails_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "SAVE_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        training("eagle3-adamw", tmp_path / "state")[1].run(after(1))
    kept = (tmp_path / "state").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(Exception, match="No space left"):
        training("eagle3-adamw", tmp_path / "state")[1].run()
    assert (tmp_path / "state").read_bytes() == kept


def test_the_rate_rises_and_falls() -> None:
    schedule = Schedule(lr=1.0)
    found = [schedule.rate(step, 100, 0.04) for step in range(101)]
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=1e-2)
    assert found[50] == pytest.approx(0.5)
    assert found[100] == 0
    whole = [Schedule(lr=2.0).rate(step, 4, 0.0) for step in range(5)]
    assert whole == pytest.approx([2, 1.7071068, 1, 0.2928932, 0])


def test_every_epoch_has_its_own_order() -> None:
    schedule = Schedule(batch_size=3)
    first, again, second = (batches(7, schedule, epoch) for epoch in (0, 0, 1))
    assert first == again != second
    assert sorted(number for batch in first for number in batch) == list(range(7))
    assert list(map(len, first)) == [3, 3, 1]
