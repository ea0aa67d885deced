from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from specctl.statistics import fit_logistic
from specctl.training.epochs import Schedule, Training
from specctl.training.material import Split
from specctl.training.predictor_evaluation import Evaluation, Score, evaluate, reliability, score
from specctl.training.predictor_examples import Example, ModelStates, Stored, stored_states
from specctl.training.predictor_learner import PredictorLearner, PredictorRecipe
from specctl.training.predictors import predictor_tables, sweep_recipes, sweep_tables
from tests.support.toys import random_model, random_predictor, seeded


def test_scores_worked_out_by_hand() -> None:
    logits = np.array([log(3), -log(4)])  # 0.75 and 0.2
    accepted = np.array([1.0, 0.5])
    found = score(logits, accepted, 6.0)
    assert found.kl == pytest.approx((-log(0.75) + 0.5 * log(0.5 / 0.2) + 0.5 * log(0.5 / 0.8)) / 2)
    assert found.loss == pytest.approx(-(log(0.75) + 0.5 * log(0.2) + 3 * log(0.8)) / 4.5)
    assert found.ece == pytest.approx((0.25 + 0.3) / 2)
    # Accepted: the first with 1, the second with a half; refused: only the second, which is below the first.
    assert found.auroc == pytest.approx((1 * 0.5 + 0.5 * 0.5 / 2) / (1.5 * 0.5))


def test_a_perfect_prediction_has_no_divergence() -> None:
    accepted = np.array([0.1, 0.5, 0.9])
    found = score(np.log(accepted / (1 - accepted)), accepted, 1.0)
    assert found.kl == pytest.approx(0, abs=1e-12)
    assert found.ece == pytest.approx(0, abs=1e-12)


def test_reliability_puts_each_token_in_its_tenth() -> None:
    bins = reliability(np.array([0.05, 0.0, 1.0, 0.95, 0.3]), np.array([0.0, 1.0, 1.0, 0.5, 0.2]))
    assert [(one.low, one.count, one.value) for one in bins] == [(0.0, 2, 0.5), (0.3, 1, 0.2), (0.9, 2, 0.75)]


@pytest.mark.parametrize("weight", [1.0, 6.0])
def test_the_curve_is_the_best_there_is(weight: float) -> None:
    rng = np.random.default_rng(0)
    signal = rng.exponential(2.0, 400)
    accepted = np.clip(1 / (1 + np.exp(signal - 2)) + rng.normal(0, 0.1, 400), 0, 1)
    curve = fit_logistic(signal, accepted, weight)

    def loss(found: np.ndarray) -> float:
        return score(found[0] + found[1] * signal, accepted, weight).loss

    best = minimize(loss, np.zeros(2), method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-12})
    assert (curve.intercept, curve.slope) == pytest.approx(best.x, abs=1e-3)


def test_a_signal_that_says_nothing_is_fitted_by_the_mean() -> None:
    curve = fit_logistic(np.ones(10), np.full(10, 0.25))
    assert 1 / (1 + np.exp(-curve.logits(np.ones(1))[0])) == pytest.approx(0.25, abs=1e-4)


def split() -> Split:
    generator = seeded(0)
    found = []
    for number in range(30):
        ids = (torch.randint(64, (size,), generator=generator, dtype=torch.int32) for size in (3, 10, 10))
        entropy, noise = 3 * torch.rand(10, generator=generator), torch.rand(2, 10, generator=generator)
        found.append(Example(number, *ids, torch.sigmoid(1 - entropy), entropy, *noise))
    return Split(found[:20], found[20:])


def test_a_signal_that_tells_all_beats_a_head_that_knows_nothing() -> None:
    recipes = [PredictorRecipe(1, 1.0), PredictorRecipe(1, 3.0)]
    heads = [random_predictor(32, reads_signals=False, seed=seed) for seed in (0, 1)]
    plain, weighted = evaluate(ModelStates(random_model("llama")), heads, recipes, split(), 0)
    assert plain.prompts == 10
    assert 60 <= plain.tokens < 100
    assert plain.signals["entropy"].kl == pytest.approx(0, abs=1e-6)
    assert plain.signals["entropy"].kl < plain.signals["top_prob"].kl < plain.predictor.kl
    assert "entropy" in plain.beaten_by
    assert weighted.signals["entropy"].kl == plain.signals["entropy"].kl
    assert weighted.signals["entropy"].loss != plain.signals["entropy"].loss
    assert any(table.alarm and "draft entropy" in table.title for table in predictor_tables(plain))


def of_a_draft_head(numbers: range, width: int = 8) -> list[Example]:
    """Acceptance is told by one direction of the states, and by no signal."""
    direction, examples = 4 * torch.randn(width, generator=seeded(99)) / width**0.5, []
    for number in numbers:
        generator = seeded(number)
        count = number % 5 + 3
        hidden = torch.randn(count, width, generator=generator)
        ids = torch.randint(64, (count,), generator=generator, dtype=torch.int32)
        noise = torch.rand(3, count, generator=generator)
        examples.append(Example(number, ids[:2], ids, ids, (hidden @ direction).sigmoid(), *noise, hidden.bfloat16()))
    return examples


def test_a_head_on_a_draft_head_learns_from_stored_states(tmp_path: Path) -> None:
    recipe, states = PredictorRecipe(0, 1.0), Stored(torch.device("cpu"), stored_states)
    data = Split(of_a_draft_head(range(200)), of_a_draft_head(range(200, 240)))
    learner = PredictorLearner(states, [recipe], data.train, 0)
    Training(learner, Schedule(epochs=30, batch_size=16, lr=0.05), len(data.train), tmp_path / "state").run()
    (found,) = evaluate(states, learner.networks, [recipe], data, 0)
    assert found.tokens == sum(len(example.proposals) for example in data.dev)
    assert found.predictor.kl < 0.05
    assert found.beaten_by == []
    assert found.predictor.kl < found.signals["entropy"].kl / 4
    assert found.predictor.auroc is not None
    assert found.predictor.auroc > 0.8


def evaluation(recipe: PredictorRecipe, head: Score) -> Evaluation:
    signals = {name: Score(0.3, 0.5, 0.1, 0.7) for name in ("entropy", "top_prob", "token_prob")}
    return Evaluation(recipe, 100, 10, 0.6, head, signals, [])


def test_who_is_better_goes_by_what_the_head_was_trained_on() -> None:
    assert evaluation(PredictorRecipe(1, 1), Score(0.2, 0.9, 0.1, 0.7)).beaten_by == []
    assert evaluation(PredictorRecipe(1, 6), Score(0.9, 0.4, 0.1, 0.7)).beaten_by == []
    assert len(evaluation(PredictorRecipe(1, 6), Score(0.2, 0.9, 0.1, 0.7)).beaten_by) == 3


def test_a_sweep_fills_the_papers_table() -> None:
    table, every = sweep_tables(
        [evaluation(r, Score(r.depth + r.reject_weight / 100, 0.4, 0.1, None)) for r in sweep_recipes()]
    )
    assert table.columns == ("depth", "1", "3", "6", "12")
    assert table.rows[2] == ("2", "2.0100", "2.0300", "2.0600", "2.1200")
    assert len(every.rows) == 20
