from math import exp, log

import pytest
import torch

from specctl.models.draft_heads import eagle1, eagle3, mtp
from specctl.models.draft_heads.dflash import dflash_loss, dspark_loss
from specctl.models.draft_heads.training import Blocks, Lesson, Step, law_loss

LAW = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
DRAFT = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]])


def lesson(logits: torch.Tensor, states: torch.Tensor | None = None) -> Lesson:
    ids = torch.tensor([2, 0, 1, 1])  # a prompt of two tokens, an answer of two
    return Lesson(ids, 2, {} if states is None else {-1: states}, logits)


def test_cross_entropy_with_the_law_by_hand() -> None:
    found = law_loss(DRAFT.log(), LAW.log())
    assert found[0].item() == pytest.approx(-(0.5 * log(0.25) + 0.25 * log(0.5) + 0.25 * log(0.25)), abs=1e-6)


def test_the_law_is_restricted_to_the_draft_vocabulary() -> None:
    kept = torch.tensor([0, 2])
    counted = torch.isin(LAW.argmax(-1), kept)
    found = law_loss(DRAFT.log()[:, kept], LAW.log()[:, kept], counted)
    # Of tokens 0 and 2 the target's law is 2/3 and 1/3, the draft's a half each.
    assert found[0].item() == pytest.approx(log(2), abs=1e-6)
    assert found[1].item() == 0  # its likeliest token cannot be drafted


def test_later_steps_of_eagle3_weigh_less() -> None:
    first, later = (Step(index, torch.tensor([0, 1]), DRAFT.log(), DRAFT) for index in (0, 2))
    whole = float(law_loss(DRAFT.log(), LAW.log()).sum())
    assert eagle3.step_loss(first, lesson(LAW.log()), 0.5).item() == pytest.approx(whole, abs=1e-6)
    # Half of the rounds go on, so each stands for two.
    assert eagle3.step_loss(later, lesson(LAW.log()), 0.5).item() == pytest.approx(2 * 0.64 * whole, abs=1e-6)


def test_eagle1_predicts_the_targets_next_state_and_law() -> None:
    states = torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, -1.0], [9.0, 9.0]])
    # The rows of tokens x_1 and x_2, which predict x_2 and x_3.
    rows = torch.tensor([[1.5, 2.0], [3.0, 2.0]])
    step = Step(0, torch.tensor([0, 1]), DRAFT.log(), rows)
    feature = (0.5 * 0.5**2 + 0) / 2 + (0 + (3 - 0.5)) / 2
    law = float(law_loss(DRAFT.log(), LAW.log()).sum())
    assert eagle1.step_loss(step, lesson(LAW.log(), states)).item() == pytest.approx(feature + 0.1 * law, abs=1e-5)


def blocks(confidence: torch.Tensor | None) -> Blocks:
    """A block from each of two places; the second reaches one token beyond the answer."""
    logits = torch.stack([DRAFT, DRAFT.flip(0)]).log()
    rows = torch.tensor([[0, 1], [1, 2]])
    return Blocks(logits, confidence, rows, rows < 2)


def test_dflash_weighs_earlier_tokens_more_and_none_beyond_the_answer() -> None:
    each = [float(law_loss(q.log(), p.log())) for q, p in ((DRAFT[0], LAW[0]), (DRAFT[1], LAW[1]))]
    other = float(law_loss(DRAFT[1].log(), LAW[1].log()))
    later = exp(-1 / 4)
    expected = (each[0] + later * each[1] + other) / (2 + later)
    assert dflash_loss(blocks(None), lesson(LAW.log()), 4.0).item() == pytest.approx(expected, abs=1e-6)


def test_dspark_adds_the_distance_of_the_laws_and_the_predicted_acceptance() -> None:
    confidence = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    found = dspark_loss(blocks(confidence), lesson(LAW.log()), 4.0).item()
    later, labels = exp(-1 / 4), [1, 1]

    def term(q: torch.Tensor, p: torch.Tensor, label: int, said: float) -> float:
        distance = 0.5 * float((p - q).abs().sum())
        chance = 1 / (1 + exp(-said))
        surprise = -((1 - distance) * log(chance) + distance * log(1 - chance))
        return 0.1 * -log(q[label]) + 0.9 * 2 * distance + surprise

    expected = (
        term(DRAFT[0], LAW[0], labels[0], 0.0)
        + later * term(DRAFT[1], LAW[1], labels[1], 1.0)
        + term(DRAFT[1], LAW[1], labels[1], 2.0)
    ) / (2 + later)
    assert found == pytest.approx(expected, abs=1e-5)


def test_mtp_learns_the_text_with_falling_weights() -> None:
    rows = torch.tensor([0, 1])  # the answer is 1, 1
    surprise = -log(0.5) - log(0.6)
    total = 1 + 0.6 + 0.36
    for index in range(3):
        found = mtp.step_loss(Step(index, rows, DRAFT.log(), DRAFT), lesson(LAW.log()), 3).item()
        assert found == pytest.approx(0.6**index / total * surprise, abs=1e-6)
