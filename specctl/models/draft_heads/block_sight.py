"""Which places a layer of a block head attends to, where that is not the whole text and the whole block."""

from dataclasses import dataclass

import torch


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
