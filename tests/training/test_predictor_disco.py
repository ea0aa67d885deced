"""A DISCO head learns what can be learned, and what it learns from is what it reads in live rounds."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from made import disco_examples as examples

from specctl.decoding.composition import build_drafter
from specctl.decoding.loop import decode
from specctl.decoding.round import prefill
from specctl.decoding.sampling import Sampling
from specctl.models.predictors.disco_predictor import disco_predictor_from
from specctl.models.running.pair import Pair
from specctl.policies import NONE, Setting
from specctl.records import Round
from specctl.training import predictor_rounds as module
from specctl.training.epochs import Schedule, Training
from specctl.training.material import Split
from specctl.training.predictor_evaluation import evaluate
from specctl.training.predictor_examples import Example, Stored
from specctl.training.predictor_learner import (
    DiscoNetwork,
    PredictorLearner,
    PredictorRecipe,
    Trained,
    features_of,
    new_network,
)
from specctl.training.predictor_rounds import read_model_rounds, read_rounds
from tests.support.toys import StateTable, TableRunner, ToyDraftHead, related_table, seeded, table
from tests.support.traced import pair_of

GREEDY, PLAIN = Sampling(), Sampling(temperature=1.0)
PROMPT = (3, 1, 4, 1, 5)
LENGTH, LONGEST = 150, 3
SCHEDULE = Schedule(epochs=30, batch_size=8, lr=1e-2)
LAWS = Stored(torch.device("cpu"), features_of)
RECIPES = [PredictorRecipe(None, 1.0)]


def trained(path: Path, data: list[Example]) -> list[Trained]:
    learner = PredictorLearner(LAWS, RECIPES, data, 0)
    Training(learner, SCHEDULE, len(data), path).run()
    return learner.networks


def test_it_learns_what_can_be_learned(tmp_path: Path) -> None:
    data = examples(80)
    networks = trained(tmp_path / "state", data)
    (found,) = evaluate(LAWS, networks, RECIPES, Split(data, examples(20, seed=1)), 0)
    assert found.predictor.auroc is not None
    assert found.predictor.auroc > 0.9
    assert found.beaten_by == []
    assert all(found.predictor.kl < 0.8 * single.kl for single in found.signals.values())


def test_what_is_saved_computes_what_was_trained(tmp_path: Path) -> None:
    data = examples(10)
    (network,) = trained(tmp_path / "state", data)
    assert isinstance(network, DiscoNetwork)
    head = disco_predictor_from(network.weights())
    with torch.inference_mode():
        expected = network(features_of(data)).sigmoid()
    for row, probability in zip(features_of(data).tolist()[:50], expected.tolist(), strict=False):
        assert head.own_accept_prob(row[:10], row[10], int(row[11])) == pytest.approx(probability, abs=1e-5)


def test_a_feature_that_never_changes_is_no_division_by_zero() -> None:
    (one,) = examples(1)
    same = torch.ones_like(one.index)  # type: ignore[arg-type]
    flat = replace(one, index=same)
    assert new_network([flat], 0)(features_of([flat])).isfinite().all()


def model_pair() -> Pair:
    target = table(8, spread=2.0, vocabulary=12)
    draft = TableRunner(related_table(target, 9, noise=0.5))
    return pair_of(TableRunner(target), draft, heads=[None])


def head_pair() -> Pair:
    target = table(8, spread=2.0, vocabulary=12)
    draft = ToyDraftHead(related_table(target, 9, noise=0.5), 10, noise=0.6)
    pair = pair_of(StateTable(target), draft, heads=[None])
    pair.target.watch(draft.layers)  # type: ignore[attr-defined]
    return pair


def live(pair: Pair, setting: Setting, sampling: Sampling, seed: int = 0) -> list[Round]:
    drafter = build_drafter(pair, setting, frozenset({"entropy", "top_prob", "token_prob"}))
    with torch.inference_mode():
        for runner in (pair.target, *pair.drafts):
            runner.rollback(0)
        prefill(pair.target, drafter, PROMPT)
        return list(decode(pair.target, drafter, PROMPT, LENGTH, sampling, frozenset(), seeded(seed)))


@pytest.fixture(autouse=True)
def _short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", LONGEST)


@pytest.mark.parametrize("make", [model_pair, head_pair])
def test_tokens_and_their_places_are_those_of_live_rounds(make) -> None:  # type: ignore[no-untyped-def]
    pair = make()
    played = live(pair, Setting.of({"name": "constant", "draft_length": LONGEST}), GREEDY)
    answer = [token for one in played for token in one.emitted]
    if make is model_pair:
        found = read_model_rounds(pair.target, pair.drafts[0], PROMPT, answer, GREEDY, seeded(0))
    else:
        texts = pair.target, pair.drafts[0], PROMPT, answer
        found = read_rounds(*texts, GREEDY, seeded(0), frozenset(), distributions=True)  # type: ignore[arg-type]
    # The last round may draft beyond the answer's end.
    judged = [(step, number < one.accepted) for one in played[:-1] for number, step in enumerate(one.steps)
              if number <= one.accepted]  # fmt: skip
    count = len(judged)
    assert found.hidden is None
    assert found.top_probs is not None
    assert found.drawn.tokens.tolist()[:count] == [step.token for step, _ in judged]
    assert found.index.tolist()[:count] == [step.index for step, _ in judged]
    assert found.drawn.acceptance.tolist()[:count] == [float(fine) for _, fine in judged]
    assert found.drawn.signals[:count, 0].tolist() == pytest.approx([step.entropy for step, _ in judged], abs=1e-5)
    assert found.top_probs[:count, 0].tolist() == pytest.approx([step.top_prob for step, _ in judged], abs=1e-5)
    assert max(found.index.tolist()) == LONGEST, "whole rounds were accepted, and keep their last token"
    assert any(fine and step.index == LONGEST for step, fine in judged)


def test_sampled_rounds_begin_where_tokens_are_rejected() -> None:
    """Which tokens are accepted is drawn with the answer: the rounds' lengths have the law of live ones."""
    pair = model_pair()
    lengths: list[int] = []
    for seed in range(40):
        answer = [token for one in live(pair, NONE, PLAIN, seed) for token in one.emitted]
        found = read_model_rounds(pair.target, pair.drafts[0], PROMPT, answer, PLAIN, seeded(seed + 999))
        index = found.index.tolist()
        lengths += [one for one, after in pairwise(index) if after == 1]
    setting = Setting.of({"name": "constant", "draft_length": LONGEST})
    rounds = [one for seed in range(40) for one in live(pair, setting, PLAIN, seed + 77)[:-1]]
    expected = [min(one.accepted + 1, LONGEST) for one in rounds]
    assert sum(lengths) / len(lengths) == pytest.approx(sum(expected) / len(expected), rel=0.05)
