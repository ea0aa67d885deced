"""What a block draft head is made of."""

from dataclasses import dataclass
from typing import Literal

import torch

from specctl.models.draft_heads.head_layers import LayerShape
from specctl.models.draft_heads.markov import MarkovKind


@dataclass(frozen=True, slots=True)
class BlockSight:
    """What the rows of a block see in one layer.

    Attributes:
        window: W, how far they see; 0 for any distance.
        causal: whether a row sees no place behind its own.
        from_anchor: whether the window is the W places before the block for all of its rows, as speculators counts;
            else a row sees the W - 1 places before its own and, unless it is causal, as many behind, as z-lab counts.
    """

    window: int = 0
    causal: bool = False
    from_anchor: bool = False

    def seen(self, places: torch.Tensor, anchors: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which of S places each of T rows sees, ``(T, S)`` bool.

        Args:
            places: ``(T,)`` int64, of the rows.
            anchors: ``(T,)`` int64, the first place of each row's block.
            keys: ``(S,)`` int64.
        """
        ahead = keys - places[:, None]
        found = torch.ones_like(ahead, dtype=torch.bool)
        if self.window and self.from_anchor:
            found = keys >= anchors[:, None] - self.window
        elif self.window:
            found = ahead.abs() < self.window
        return found & (ahead <= 0) if self.causal else found


SequentialKind = MarkovKind | Literal["selector"]
"""DSpark's sequential heads, and DFlash2's."""


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """A block draft head.

    Attributes:
        shape: of its decoder layers; H is the verifier's hidden size too.
        layers: the verifier's layers whose states it reads, in the order in which they are concatenated.
        vocabulary: V, the verifier's.
        draft_vocabulary: D, how many of the V tokens it can draft.
        num_layers: its decoder layers.
        block_size: B, places in a pass, the newest token's own included.
        mask_token: the id that stands for the tokens to be drafted.
        from_anchor: whether the newest token's own row predicts the token after it, so that all B rows do (DSpark);
            else the row of each masked place predicts that place (DFlash).
        markov: the sequential head; None for rows that are independent of each other.
        markov_rank: R.
        candidates: K, tokens that a ``selector`` leaves in each row.
        taps: rows that the layers' convolutions read (DFlash2); 0 without these.
        group: numbers of a row that share weights of a convolution.
        sights: by layer, what its rows see; empty where all see the whole text and the block.
        raw_embeddings: what the verifier's embedding weights are multiplied by; None to embed as the verifier does.
        logit_scale: what logits are multiplied by.
        logit_cap: the largest that a logit can then be, ``cap * tanh(x / cap)``; 0 for no limit.
        confidence: whether it predicts acceptance.
        confidence_reads_token: whether that prediction reads the sequential head's embedding of the last token too.
        context: the most tokens it can read.
    """

    shape: LayerShape
    layers: tuple[int, ...]
    vocabulary: int
    draft_vocabulary: int
    num_layers: int
    block_size: int
    mask_token: int
    from_anchor: bool = False
    markov: SequentialKind | None = None
    markov_rank: int = 0
    candidates: int = 0
    taps: int = 0
    group: int = 1
    sights: tuple[BlockSight, ...] = ()
    raw_embeddings: float | None = None
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    confidence: bool = False
    confidence_reads_token: bool = False
    context: int = 2048

    @property
    def first_row(self) -> int:
        """The row that predicts the token after the newest one."""
        return 0 if self.from_anchor else 1
