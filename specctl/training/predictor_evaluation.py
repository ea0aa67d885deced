"""Evaluation of acceptance predictors on held-out examples, against single signals."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.special import expit, xlogy

from specctl.policies import DISTRIBUTION_SIGNALS, Signal
from specctl.statistics import Bin, Floats, auroc, fit_logistic
from specctl.training.material import Split
from specctl.training.predictor_examples import DraftStates, Example, signals
from specctl.training.predictor_learner import PredictorRecipe, Trained

BINS = 10
SEQUENCES_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Score:
    """How well predictions match the true acceptance probability P; lower is better, except for ``auroc``."""

    kl: float  # mean binary KL(P || prediction) in nats, unweighted: the metric of SpecDec++'s Table 3
    loss: float  # mean cross-entropy in nats, with the rejection weight of the predictor's training
    ece: float  # expected calibration error over ten bins of equal width
    # the probability that an accepted token has a higher prediction than a rejected one, if each token is accepted with
    # probability P; None if every P is 0 or every P is 1
    auroc: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A predictor compared with logistic curves of single signals, on the same tokens."""

    recipe: PredictorRecipe  # the predictor's recipe
    # tokens, prompts: number of tokens and prompts in the evaluation
    tokens: int
    prompts: int
    accepted: float  # mean acceptance probability P
    predictor: Score  # the predictor's score
    # the score of the logistic curve of each signal. For ``loss`` the curve is fitted with the predictor's rejection
    # weight, for the other scores with weight 1.
    signals: dict[str, Score]
    reliability: list[Bin]  # mean P by predicted acceptance

    @property
    def metrics(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return {
            "tokens": self.tokens,
            "prompts": self.prompts,
            "accepted": self.accepted,
            "head": asdict(self.predictor),
            "signals": {name: asdict(found) for name, found in self.signals.items()},
        }

    @property
    def document(self) -> dict[str, Any]:
        """`metrics` with the predictor's recipe, reliability and verdict."""
        return {
            "depth": self.recipe.depth,
            "reject_weight": self.recipe.reject_weight,
            **self.metrics,
            "reliability": [asdict(each) for each in self.reliability],
            "beaten_by": self.beaten_by,
        }

    @property
    def beaten_by(self) -> list[str]:
        """Signals at least as good as the predictor: by KL if the rejection weight is 1, else by the weighted loss."""
        by = "kl" if self.recipe.reject_weight == 1 else "loss"
        return [name for name, found in self.signals.items() if getattr(found, by) <= getattr(self.predictor, by)]


def evaluate(
    draft: DraftStates,
    predictors: Sequence[Trained],
    recipes: Sequence[PredictorRecipe],
    split: Split[Example],
    seed: int,
    after_batch: Callable[[], None] = lambda: None,
) -> list[Evaluation]:
    """Evaluate all predictors on the development examples with one pass over them.

    As in training, a draft model reads a mix of the target's tokens X and the draft tokens Y, and a draft head's states
    come from its rounds. The signals compared with predictors are those of the step that sampled Y, in which a draft
    model had read X only.

    Args:
        draft: the source of the predictors' inputs.
        predictors: in the order of the recipes.
        recipes: of their training.
        split: predictors and curves are evaluated on its development examples; curves are fitted to the training ones.
        seed: of the mix.
        after_batch: called after each batch of 32 examples.
    """
    mixed = draft.mix(split.dev, f"evaluation/{seed}")
    logits: list[list[torch.Tensor]] = [[] for _ in predictors]
    for first in range(0, len(mixed), SEQUENCES_AT_ONCE):
        with torch.inference_mode():
            batch = slice(first, first + SEQUENCES_AT_ONCE)
            hidden = draft.of(split.dev[batch], mixed[batch])
            seen = signals(split.dev[batch], mixed[batch]).to(hidden.device)
            for found, predictor in zip(logits, predictors, strict=True):
                found.append(predictor(hidden, seen).cpu())
        after_batch()
    drafted = [item.drafted for item in mixed]
    truth, accepted = _column(split.dev, "acceptance", drafted), _column(split.train, "acceptance")

    @cache
    def of_signal(name: Signal, reject_weight: float) -> Score:
        curve = fit_logistic(_column(split.train, name), accepted, reject_weight)
        weighted = score(curve.logits(_column(split.dev, name, drafted)), truth, reject_weight)
        return weighted if reject_weight == 1 else replace(of_signal(name, 1.0), loss=weighted.loss)

    def evaluation(found: Floats, recipe: PredictorRecipe) -> Evaluation:
        weight = recipe.reject_weight
        return Evaluation(
            recipe,
            tokens=len(truth),
            prompts=len({example.number for example in split.dev}),
            accepted=float(truth.mean()),
            predictor=score(found, truth, weight),
            signals={name: of_signal(name, weight) for name in DISTRIBUTION_SIGNALS},
            reliability=reliability(expit(found), truth),
        )

    predicted = [torch.cat(found).double().numpy() for found in logits]
    return [evaluation(found, recipe) for found, recipe in zip(predicted, recipes, strict=True)]


def score(logits: Floats, accepted: Floats, reject_weight: float) -> Score:
    """Score logits ``(N,)`` of the predicted acceptance against acceptance probabilities P ``(N,)``.

    ``reject_weight`` is the weight of a rejection in ``loss``; an acceptance has weight 1.
    """
    log_accept, log_reject = -np.logaddexp(0, -logits), -np.logaddexp(0, logits)
    rejected = 1 - accepted
    entropy = -(xlogy(accepted, accepted) + xlogy(rejected, rejected))
    heavy = reject_weight * rejected
    weighted = -(accepted * log_accept + heavy * log_reject).sum() / (accepted + heavy).sum()
    predicted = expit(logits)
    return Score(
        kl=float((-(accepted * log_accept + rejected * log_reject) - entropy).mean()),
        loss=float(weighted),
        ece=sum(abs(b.value - b.middle) * b.count for b in reliability(predicted, accepted)) / len(predicted),
        auroc=auroc(logits, accepted),
    )


def reliability(predicted: Floats, accepted: Floats) -> list[Bin]:
    """Mean and quartiles of P ``(N,)`` by predicted acceptance ``(N,)``, in ten bins of equal width over [0, 1].

    Empty bins are left out.
    """
    position = np.minimum((predicted * BINS).astype(int), BINS - 1)
    bins = []
    for number in np.unique(position):
        inside, chosen = predicted[position == number], accepted[position == number]
        lower, upper = map(float, np.quantile(chosen, (0.25, 0.75)))
        edges = float(number / BINS), float((number + 1) / BINS)
        bins.append(Bin(*edges, float(inside.mean()), len(chosen), float(chosen.mean()), lower, upper))
    return bins


def _column(examples: Sequence[Example], name: str, chosen: Sequence[torch.Tensor] | None = None) -> Floats:
    columns = [getattr(example, name) for example in examples]
    if chosen is not None:
        columns = [column[mask] for column, mask in zip(columns, chosen, strict=True)]
    column: Floats = torch.cat(columns).double().numpy()
    return column
