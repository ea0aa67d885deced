"""Training of acceptance predictors, several at once on one frozen draft."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn.functional import logsigmoid, relu

from specctl.models.predictors.disco_predictor import FEATURES
from specctl.models.predictors.state_predictor import StatePredictor
from specctl.training.epochs import Learner
from specctl.training.predictor_examples import DraftStates, Example, Mixed, acceptance, signals

WIDTH = 16  # Hidden units: the paper asks for two layers and names no width


class DiscoNetwork(nn.Module):
    """The two layers of a `DiscoPredictor`, over features normalised to mean 0 and variance 1.

    Mean and variance are those of the training examples' ``features`` ``(N, 12)``.
    """

    mean: torch.Tensor  # (12,)
    spread: torch.Tensor  # (12,)

    def __init__(self, features: torch.Tensor) -> None:
        super().__init__()
        spread = features.std(dim=0, correction=0)
        self.register_buffer("mean", features.mean(dim=0))
        self.register_buffer("spread", torch.where(spread > 0, spread, 1.0))
        self.hidden = nn.Linear(FEATURES, WIDTH)
        self.output = nn.Linear(WIDTH, 1)

    def forward(self, features: torch.Tensor, signals: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        """Logits of the acceptance probability, ``(N,)``, from features ``(N, 12)``, which include the signals."""
        logits: torch.Tensor = self.output(relu(self.hidden((features - self.mean) / self.spread))).squeeze(-1)
        return logits

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of an equivalent `DiscoPredictor` over raw features."""
        weight = self.hidden.weight.detach() / self.spread  # (16, 12)
        return {
            "hidden.weight": weight,
            "hidden.bias": self.hidden.bias.detach() - weight @ self.mean,
            "output.weight": self.output.weight.detach(),
            "output.bias": self.output.bias.detach(),
        }


def features_of(examples: Sequence[Example]) -> torch.Tensor:
    """``(N, 12)`` float32: a DISCO predictor's features of all examples' draft tokens, in order."""
    rows = []
    for example in examples:
        assert example.top_probs is not None, "an example of DISCO"
        assert example.index is not None, "an example of DISCO"
        rows.append(torch.cat([example.top_probs, example.entropy[:, None], example.index[:, None].float()], dim=1))
    return torch.cat(rows)


def new_network(examples: Sequence[Example], seed: int) -> DiscoNetwork:
    """An untrained network; the same seed and examples always give the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.Random(f"disco/{seed}").getrandbits(63))
        return DiscoNetwork(features_of(examples))


Trained = StatePredictor | DiscoNetwork


@dataclass(frozen=True, slots=True)
class PredictorRecipe:
    """One predictor of a training run; the defaults are SpecDec++'s."""

    depth: int | None = 3  # D, the number of residual blocks; None for DISCO, which has none
    reject_weight: float = 6.0  # w_rej, the weight of a rejection in the loss; an acceptance has weight 1
    signals: bool = False  # whether it also reads the draft's signals, unlike SpecDec++'s

    @property
    def name(self) -> str:
        return f"d{self.depth}-w{self.reject_weight:g}" if self.depth is not None else f"w{self.reject_weight:g}"


def weighted_loss(logits: torch.Tensor, accepted: torch.Tensor, reject_weight: float) -> torch.Tensor:
    """Binary cross-entropy with soft labels: the weighted mean over positions, a scalar; ``reject_weight`` is w_rej.

    ``logits`` ``(N,)`` are of the predicted acceptance, ``accepted`` ``(N,)`` acceptance probabilities P.
    """
    rejected = reject_weight * (1 - accepted)
    return -(accepted * logsigmoid(logits) + rejected * logsigmoid(-logits)).sum() / (accepted + rejected).sum()


class PredictorLearner(Learner):
    """One predictor for each recipe; all use the same hidden states of the draft, which do not change.

    The recipes must differ; there must be an example. ``seed`` is for initial weights and mixing.
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

    def gradients(self, batch: Sequence[int], epoch: int, step: int) -> None:  # noqa: ARG002 - the epoch is enough
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
