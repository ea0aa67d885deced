"""Predictors of acceptance that learn, several at once on one frozen draft."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch.nn.functional import logsigmoid

from specctl.models.predictors.state_predictor import StatePredictor
from specctl.training.epochs import Learner
from specctl.training.predictors.disco_network import DiscoNetwork, new_network
from specctl.training.predictors.draft_states import DraftStates
from specctl.training.predictors.examples import Example
from specctl.training.predictors.mixing import Mixed, acceptance, signals

Trained = StatePredictor | DiscoNetwork


@dataclass(frozen=True, slots=True)
class PredictorRecipe:
    """One predictor of a training run; the defaults are SpecDec++'s.

    Attributes:
        depth: D, the number of residual blocks; None for a DISCO head, which has none.
        reject_weight: w_rej, the weight of a rejection in the loss; an acceptance has weight 1.
        signals: whether it also reads the draft's signals, which SpecDec++'s heads do not.
    """

    depth: int | None = 3
    reject_weight: float = 6.0
    signals: bool = False

    @property
    def name(self) -> str:
        return f"d{self.depth}-w{self.reject_weight:g}" if self.depth is not None else f"w{self.reject_weight:g}"


def weighted_loss(logits: torch.Tensor, accepted: torch.Tensor, reject_weight: float) -> torch.Tensor:
    """Weighted binary cross-entropy with soft labels: the weighted mean over positions, a scalar.

    Args:
        logits: ``(N,)`` logits of the predicted acceptance.
        accepted: ``(N,)`` acceptance probabilities P.
        reject_weight: w_rej, the weight of a rejection.
    """
    rejected = reject_weight * (1 - accepted)
    return -(accepted * logsigmoid(logits) + rejected * logsigmoid(-logits)).sum() / (accepted + rejected).sum()


class PredictorLearner(Learner):
    """One predictor for each recipe; all use the same hidden states of the draft.

    Args:
        draft: gives the draft's hidden states, which do not change.
        recipes: one for each predictor, all different.
        examples: the training examples, at least one.
        seed: of the initial weights and of the mixing.
    """

    def __init__(
        self, draft: DraftStates, recipes: Sequence[PredictorRecipe], examples: Sequence[Example], seed: int
    ) -> None:
        self._draft, self._recipes, self._examples, self._seed = draft, list(recipes), examples, seed
        width = draft.of(examples[:1], draft.mix(examples[:1], "width")).shape[1]
        self.networks: list[Trained] = [
            (new_network(examples, seed) if each.depth is None else new_predictor(width, each, seed)).to(draft.device)
            for each in recipes
        ]
        # The schedule sets the learning rate of every step.
        self.optimizers = [torch.optim.Adam(network.parameters()) for network in self.networks]
        self.facts = {"recipes": [asdict(each) for each in recipes], "mix": draft.mixed}
        self._epoch, self._mixed = -1, list[Mixed]()

    def gradients(self, batch: Sequence[int], epoch: int, step: int) -> None:  # noqa: ARG002 - the epoch tells it
        if epoch != self._epoch:
            self._epoch, self._mixed = epoch, self._draft.mix(self._examples, f"mix/{self._seed}/{epoch}")
        examples, mixed = [self._examples[index] for index in batch], [self._mixed[index] for index in batch]
        accepted = acceptance(examples, mixed)
        if not len(accepted):
            return
        hidden = self._draft.of(examples, mixed)
        accepted, seen = accepted.to(hidden.device), signals(examples, mixed).to(hidden.device)
        for network, recipe in zip(self.networks, self._recipes, strict=True):
            weighted_loss(network(hidden, seen), accepted, recipe.reject_weight).backward()  # type: ignore[no-untyped-call]


def new_predictor(hidden_size: int, recipe: PredictorRecipe, seed: int) -> StatePredictor:
    """An untrained predictor; the same seed and depth always give the same weights."""
    assert recipe.depth is not None, "a predictor that reads hidden states"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(f"head/{seed}/{recipe.depth}").getrandbits(63))
        return StatePredictor(hidden_size, recipe.depth, reads_signals=recipe.signals)
