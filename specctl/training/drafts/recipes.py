"""How each kind of draft head is built and trained: the published settings."""

from dataclasses import dataclass

from specctl.models.head_files.draft_head import HeadKind


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

    kind: HeadKind
    depth: int = 1
    steps: int = 1
    rounds: float = 1.0
    draft_vocabulary: int = 32_000
    markov_rank: int = 0
    anchors: int = 0
    gamma: float = 0.0
    optimizer: str = "adamw"


RECIPES: dict[HeadKind, Recipe] = {
    recipe.kind: recipe
    for recipe in (
        Recipe(HeadKind.EAGLE1),
        Recipe(HeadKind.EAGLE3, steps=7),
        Recipe(HeadKind.GLIDE, steps=5),
        Recipe(HeadKind.MTP, steps=3),
        Recipe(HeadKind.DFLASH, depth=5, steps=15, anchors=512, gamma=7.0),
        Recipe(HeadKind.DSPARK, depth=5, steps=7, anchors=512, gamma=4.0, markov_rank=256),
    )
}
"""EAGLE-1 and EAGLE-3 as in SafeAILab's code; GliDe and DFlash as in their papers; MTP as in FastMTP; DSpark as in
DeepSpec's code."""
