"""The settings of a draft head that is trained."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """A draft head to train.

    Attributes:
        kind: what it is.
        depth: its decoder layers.
        steps: tokens drafted from each place in training; of a block, all that it has; of GliDe, the tokens of a
            stretch of text that see the target's keys of the text before the stretch alone.
        rounds: share of the places from which a chain goes on behind its first token in training, drawn anew for each
            answer and epoch; less than 1 saves most of the time.
        draft_vocabulary: the most tokens that it can draft; the answers' most frequent ones.
        markov_rank: of DSpark's sequential head.
        anchors: blocks drafted of each answer and epoch, at random places.
        gamma: how slowly the weights of a block's later tokens fall.
        optimizer: ``adamw`` for all weights, or ``muon`` for the matrices between embeddings and output layer.
    """

    kind: str
    depth: int = 1
    steps: int = 1
    rounds: float = 1.0
    draft_vocabulary: int = 32_000
    markov_rank: int = 0
    anchors: int = 0
    gamma: float = 0.0
    optimizer: str = "adamw"
