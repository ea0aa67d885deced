from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from made import DRAWN, MASK, answer, chain_target, greedy_answers, recipe
from toys import random_model
from transformers import PreTrainedModel

from specctl.decoding.sampling import Sampling
from specctl.draft_training.answers import Answer
from specctl.draft_training.courses import COURSES, new_head
from specctl.draft_training.evaluation import drafts_of_head, evaluate
from specctl.draft_training.lessons import Teacher
from specctl.draft_training.recipes import Recipe, Schedule
from specctl.draft_training.training import Training, rate
from specctl.errors import UsageError
from specctl.learning import saved_state
from specctl.models.draft_heads.block import BlockHead
from specctl.models.draft_heads.chain import ChainHead
from specctl.models.draft_heads.eagle3 import Eagle3Head


def training(
    of: Recipe, schedule: Schedule, answers: list[Answer], path: Path, target: PreTrainedModel | None = None
) -> Training:
    target = target or random_model("llama")
    tokens = torch.tensor(DRAWN) if of.kind == "eagle3" and of.draft_vocabulary < 64 else None
    head = new_head(of, target, tokens, MASK, schedule.seed)
    return Training(head, of, schedule, Teacher(target, head.layers), answers, path)


def weights(of: Training) -> dict[str, torch.Tensor]:
    return of.head.state_dict()


@pytest.mark.parametrize("kind", COURSES)
@pytest.mark.representatives("eagle3", "dflash")
def test_a_trained_head_is_accepted_more_than_an_untrained_one(kind: str, tmp_path: Path) -> None:
    target = chain_target()
    answers = greedy_answers(target, 28)
    found = training(recipe(kind), Schedule(8, 4, 5e-3), answers[:24], tmp_path / "state", target)
    teacher = Teacher(target, found.head.layers)

    def accepted(head: ChainHead | BlockHead) -> float:
        return evaluate(teacher, [drafts_of_head(head.eval(), 3)], answers[24:], Sampling(), 3)[0].lengths[-1]

    untrained = deepcopy(found.head)
    losses: list[float] = []
    found.run(lambda: losses.append(found.loss or 0.0))
    assert len(losses) == found.steps == 48
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert accepted(found.head) > accepted(untrained) + 0.6


@pytest.mark.parametrize("kind", COURSES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.representatives("muon-eagle3", "adamw-dflash")
def test_an_interrupted_training_ends_as_if_nothing_had_happened(
    kind: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = Schedule(epochs=2, batch_size=3, lr=1e-2, optimizer=optimizer)
    answers = [answer(number) for number in range(7)]
    # Anchors, rounds and noise are drawn anew in each step.
    of = recipe(kind, anchors=3 if recipe(kind).anchors else 0, rounds=0.5)
    whole = training(of, schedule, answers, tmp_path / "whole")
    whole.run()
    torn = training(of, schedule, answers, tmp_path / "torn")
    with pytest.raises(KeyboardInterrupt):
        torn.run(after(2))
    resumed = training(of, schedule, answers, tmp_path / "torn")
    assert resumed.step == 2
    monkeypatch.setattr(saved_state, "SAVE_SECONDS", 0.0)
    with pytest.raises(RuntimeError):
        resumed.run(after(2, RuntimeError))
    again = training(of, schedule, answers, tmp_path / "torn")
    assert again.step == 3  # the last step before the error was not saved
    again.run()
    assert again.step == whole.step == whole.steps == 6
    assert weights(again).keys() == weights(whole).keys()
    for name, weight in weights(whole).items():
        assert torch.equal(weight, weights(again)[name]), name


def after(steps: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[], None]:
    """Raises an error after so many steps."""
    left: Iterator[int] = iter(range(steps - 1))

    def count() -> None:
        if next(left, None) is None:
            raise error

    return count


def test_what_is_shared_with_the_target_is_not_trained(tmp_path: Path) -> None:
    target = random_model("llama")
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    training(recipe("dspark"), Schedule(1, 4, 1e-2), [answer(number) for number in range(4)], tmp_path / "state").run()
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_a_new_eagle3_head_begins_with_the_targets_output_rows() -> None:
    target, tokens = random_model("llama"), torch.tensor(DRAWN)
    before = target.get_input_embeddings().weight.clone()
    head, again = (new_head(recipe("eagle3", depth=2), target, tokens, MASK, 1) for _ in range(2))
    assert isinstance(head, Eagle3Head)
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight[tokens])
    assert torch.equal(target.get_input_embeddings().weight, before)
    assert 0.01 < float(head.fc.weight.detach().std()) < 0.03
    assert all(torch.equal(one, two) for one, two in zip(head.parameters(), again.parameters(), strict=True))


def test_another_seed_makes_another_head(tmp_path: Path) -> None:
    answers = [answer(number) for number in range(4)]
    found = [training(recipe("eagle3"), Schedule(1, 4, seed=seed), answers, tmp_path / str(seed)) for seed in (0, 1)]
    assert not torch.equal(*(weights(each)["fc.weight"] for each in found))


def test_the_state_of_another_training_is_refused(tmp_path: Path) -> None:
    answers = [answer(number) for number in range(4)]
    training(recipe("eagle3"), Schedule(1), answers, tmp_path / "state").run()
    with pytest.raises(UsageError, match="another training"):
        training(recipe("eagle3"), Schedule(2), answers, tmp_path / "state")
    (tmp_path / "state").write_bytes(b"torn")
    with pytest.raises(UsageError, match="damaged"):
        training(recipe("eagle3"), Schedule(1), answers, tmp_path / "state")


def test_a_write_that_fails_leaves_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, answers = Schedule(2, 4), [answer(number) for number in range(4)]
    monkeypatch.setattr(saved_state, "SAVE_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        training(recipe("eagle3"), schedule, answers, tmp_path / "state").run(after(1))
    kept = (tmp_path / "state").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(Exception, match="No space left"):
        training(recipe("eagle3"), schedule, answers, tmp_path / "state").run()
    assert (tmp_path / "state").read_bytes() == kept


def test_the_rate_rises_and_falls() -> None:
    found = [rate(1.0, step, 100) for step in range(101)]
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=1e-2)
    assert found[50] == pytest.approx(0.5)
    assert found[100] == 0
