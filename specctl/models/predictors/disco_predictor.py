"""DISCO's predictor of a token's acceptance, from its distribution and its index in the round. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from operator import mul
from typing import TYPE_CHECKING

from specctl.errors import ModelError
from specctl.policies import TOP_PROBS

if TYPE_CHECKING:
    import torch

FEATURES = TOP_PROBS + 2
"""The number of inputs: the largest probabilities, the entropy, and the token's index in its round."""
_STEEPEST = 60.0  # Clamp for logits, beyond which the sigmoid is 1 or 0 anyway


@dataclass(frozen=True, slots=True)
class DiscoPredictor:
    """A network of two layers, sigmoid(w . relu(W x + b) + c) (DISCO: Mamou and others 2024, arXiv 2405.04304).

    It runs on the host, on numbers that arrive with the token: a few hundred multiplications take less time than
    launching one GPU operation, and replay computes exactly the same.
    """

    # W, H rows of `FEATURES` numbers: for the largest probabilities in descending order, for the entropy in nats, and
    # for the index from 1
    hidden_weight: tuple[tuple[float, ...], ...]
    hidden_bias: tuple[float, ...]  # b, H numbers
    output_weight: tuple[float, ...]  # w, H numbers
    output_bias: float  # c

    def own_accept_prob(self, top_probs: Sequence[float], entropy: float, index: int) -> float:
        """The acceptance probability of a token.

        Args:
            top_probs: the `TOP_PROBS` largest probabilities of the draft's softmax at temperature 1, descending; padded
                with 0 for a small vocabulary.
            entropy: of this softmax, in nats.
            index: the number of the token in its round, from 1.
        """
        features = (*top_probs, entropy, float(index))
        logit = self.output_bias
        for weights, bias, weight in zip(self.hidden_weight, self.hidden_bias, self.output_weight, strict=True):
            logit += weight * max(0.0, sum(map(mul, weights, features), bias))
        return 1 / (1 + exp(-max(-_STEEPEST, min(_STEEPEST, logit))))


def disco_predictor_from(weights: Mapping[str, "torch.Tensor"]) -> DiscoPredictor:
    """A predictor from stored weights: ``hidden.weight`` ``(H, 12)``, ``output.weight`` ``(1, H)`` and their biases.

    Raises:
        ModelError: names or shapes do not match.
    """
    width = len(weights.get("hidden.bias", ()))
    wanted = {
        "hidden.weight": (width, FEATURES),
        "hidden.bias": (width,),
        "output.weight": (1, width),
        "output.bias": (1,),
    }
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if shapes != wanted or not width:
        first = next((name for name in [*wanted, *sorted(shapes)] if shapes.get(name) != wanted.get(name)), "none")
        raise ModelError(f"the weights are not those of a DISCO head (first: {first} {list(shapes.get(first, ()))})")
    return DiscoPredictor(
        tuple(map(tuple, weights["hidden.weight"].double().tolist())),
        tuple(weights["hidden.bias"].double().tolist()),
        tuple(weights["output.weight"][0].double().tolist()),
        float(weights["output.bias"]),
    )
