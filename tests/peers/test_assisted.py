"""transformers' own assisted generation: whether its confidence threshold moved is recorded."""

import sys
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
from transformers.generation import candidate_generator

from specctl.models.running.eager import EagerPasses
from specctl.models.running.pair import Pair
from specctl.models.running.slot import Slot
from specctl.observing import results as facts
from specctl.peers.assisted import AssistedPeer
from specctl.profile.schema import SamplingTable
from tests.support.checkpoints import tiny_tokenizer
from tests.support.toys import noisy_copy, random_model

PROMPTS = ([5, 9, 2, 7], [3, 1, 4, 1, 5])
SETTINGS = SamplingTable(max_new_tokens=40)


def roc_curve(matches: Sequence[int], probs: Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What scikit-learn's function of that name gives, but for thresholds on a straight line."""
    right, said = np.array(matches), np.array(probs)
    thresholds = np.concatenate([[np.inf], np.unique(said)[::-1]])
    rates = [[(said[right == kind] >= least).mean() for least in thresholds] for kind in (0, 1)]
    return np.array(rates[0]), np.array(rates[1]), thresholds


@pytest.fixture
def pair() -> Pair:
    models = random_model("llama"), noisy_copy("llama")
    runners = [Slot(EagerPasses(model, 64)) for model in models]
    return Pair(runners[0], (runners[1],), tiny_tokenizer(), frozenset(), 1 << 10, models, ({},))


def installed(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Whether transformers finds scikit-learn, which it asks at every step."""
    monkeypatch.setattr(candidate_generator, "is_sklearn_available", lambda: there)
    if there:
        metrics = ModuleType("sklearn.metrics")
        metrics.roc_curve = roc_curve  # type: ignore[attr-defined]
        package = ModuleType("sklearn")
        package.metrics = metrics  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "sklearn", package)
        monkeypatch.setitem(sys.modules, "sklearn.metrics", metrics)
        # Earlier versions import it with the module.
        monkeypatch.setattr(candidate_generator, "roc_curve", roc_curve, raising=False)


@pytest.mark.slow
def test_with_scikit_learn_the_threshold_moves_within_an_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, there=True)
    peer = AssistedPeer(pair, "hf-confidence")
    texts = [peer.generate(prompt, SETTINGS).tokens for prompt in PROMPTS]
    assert len(peer.thresholds) == len(peer.passes) == 2
    for first, last in filter(None, peer.thresholds):
        assert first == 0.4, "every answer begins anew"
        assert last != 0.4
        assert 0 < last <= 1
    alone = AssistedPeer(pair, "hf-constant")
    assert texts == [alone.generate(prompt, SETTINGS).tokens for prompt in PROMPTS]


def test_without_it_the_threshold_stays(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, there=False)
    peer = AssistedPeer(pair, "hf-confidence")
    for prompt in PROMPTS:
        peer.generate(prompt, SETTINGS)
    assert peer.thresholds == [(0.4, 0.4)] * 2


@pytest.mark.parametrize("name", ["hf-constant", "hf-heuristic"])
def test_a_peer_without_a_threshold_has_none(pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, there=True)
    peer = AssistedPeer(pair, name)
    peer.generate(PROMPTS[0], SETTINGS)
    assert peer.thresholds == [None]


def test_what_is_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise facts.PackageNotFoundError(name)

    monkeypatch.setattr(facts, "version", missing)
    assert facts.scikit_learn() == "none"
    monkeypatch.setattr(facts, "version", lambda name: f"1.2 of {name}")
    assert facts.scikit_learn() == "1.2 of scikit-learn"
