"""The budget of a round: how long its passes take, and how many tokens they bring."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Card:
    """An accelerator and its links.

    Attributes:
        bandwidth: bytes of weights read in a second.
        all_reduce: seconds of one all-reduce of a small tensor among the shards of a model.
        hop: seconds in which a small tensor gets from one stage of a pipeline to the next.
    """

    bandwidth: float = 3.35e12
    all_reduce: float = 15e-6
    hop: float = 20e-6


@dataclass(frozen=True, slots=True)
class Network:
    """A model.

    Attributes:
        weight_bytes: as loaded.
        layers: decoder layers, each with two all-reduces in tensor parallelism.
    """

    weight_bytes: float
    layers: int


LLAMA_70B, LLAMA_8B, LLAMA_1B = Network(141e9, 80), Network(16.1e9, 32), Network(2.5e9, 16)
"""In bfloat16."""

Kind = Literal["one card", "tensor", "pipeline"]


def pass_seconds(network: Network, kind: Kind, shards: int, card: Card, host: float = 0.0) -> float:
    """Seconds of a pass of a few tokens, which is bound by reading the weights once.

    Args:
        network: the model.
        kind: how it is split.
        shards: over how many cards.
        card: each of them.
        host: seconds in which Python prepares a layer. Cards do not wait for it while it is the shorter time.
    """
    reading = network.weight_bytes / card.bandwidth
    if kind == "tensor":
        device = reading / shards + 2 * network.layers * card.all_reduce
    elif kind == "pipeline":
        device = reading + shards * card.hop  # the last hop brings the logits back
    else:
        device = reading
    return max(device, network.layers * host)


@dataclass(frozen=True, slots=True)
class Round:
    """A round of constant length.

    Attributes:
        drafted: K tokens.
        tokens: mean of those that it brings.
        seconds: of the round.
    """

    drafted: int
    tokens: float
    seconds: float

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


def best_round(target: float, draft: float, acceptance: float, rest: float = 0.0, longest: int = 40) -> Round:
    """The round that brings most tokens a second (Leviathan et al. 2023, arXiv 2211.17192, eq. 1 and theorem 3.8).

    Args:
        target: seconds of the verifying pass.
        draft: seconds of a draft token.
        acceptance: the probability that a draft token is accepted if those before it are, the same for all; below 1.
        rest: seconds of a round outside of passes.
        longest: the most tokens to draft.
    """
    rounds = (
        Round(k, (1 - acceptance ** (k + 1)) / (1 - acceptance), k * draft + target + rest) for k in range(longest + 1)
    )
    return max(rounds, key=lambda one: one.per_second)
