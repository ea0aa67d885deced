"""An autoregressive draft head: it reads its verifier's states, then its own output."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from transformers import Cache

from specctl.models.draft_heads.head import Borrowed, DraftHead
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.trimmed_output import TrimmedOutput


class ChainPass(NamedTuple):
    """A chain head's outputs for the last tokens of a pass."""

    logits: torch.Tensor  # ``(keep, D)``, over the draft vocabulary
    hidden: torch.Tensor  # ``(keep, H)``, the output layer's input, for predictors
    features: torch.Tensor  # ``(keep, F)``, the features for the next token if the verifier's state is unknown


class ChainHead(DraftHead, ABC):
    """A network that reads token x_p with the features of position p - 1 and predicts token x_(p+1).

    Features come from `fuse` applied to the verifier's states, or from the network's own output if there are no states
    yet.

    Attributes:
        sees_first: whether later tokens attend to a sequence's first one, which has no previous position.
        window: W, the number of last tokens that a token attends to, including itself; 0 for all.
    """

    sees_first = False
    window = 0
    # the mask token's id, for a head that drafts `longest` tokens in one pass; None for others
    mask_token: int | None = None

    @property
    def no_graphs(self) -> str | None:
        return "its layers have windows, or it reads masks" if self.window or self.mask_token is not None else None

    def draft_only(self, vocabulary: DraftVocabulary) -> None:
        """Limit a head that drafts all V tokens to these; `trims` must accept its output layer."""
        layer = TrimmedOutput(self.output_layer, vocabulary)
        if self._output:
            self._output = Borrowed(layer)
        else:
            self.lm_head = layer
        self.tokens, self.draft_vocabulary = vocabulary.ids_on(layer.weight.device), len(vocabulary)

    @property
    def feature_size(self) -> int:
        """F, the size of one position's features."""
        return self.width

    def causal(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Causal mask: which of S tokens at positions ``slots`` each of T tokens at ``positions`` attends to, ``(T,
        S)`` bool.
        """
        return self.attended(slots <= positions[:, None], slots, positions)

    def attended(self, seen: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Apply the window and `sees_first` to a mask ``(T, S)`` bool; ``slots`` and ``positions`` as in `causal`."""
        if self.window:
            seen = seen & self.near(slots, positions)
        return seen if self.sees_first else seen & ((slots > 0) | (positions[:, None] == 0))

    def near(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Which positions are within the window, ``(T, S)`` bool; ``slots`` and ``positions`` as in `causal`."""
        return slots > positions[:, None] - self.window

    def mask_features(self) -> torch.Tensor | None:
        """The features ``(1, F)`` of a mask token; None for heads that continue from their own output."""
        return None

    @abstractmethod
    def fuse(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The features ``(T, F)`` of T positions from their states, ``(T, D)`` for each of `layers`."""

    @abstractmethod
    def forward(
        self,
        ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: Cache,
        keep: int | torch.Tensor = 0,
    ) -> ChainPass:
        """Read T tokens in one pass.

        Args:
            ids: ``(1, T)`` int64, tokens x_p.
            features: ``(1, T, F)``, of the positions p - 1.
            positions: ``(T,)`` int64, p.
            mask: ``(1, 1, T, S)`` bool, which of the S cached tokens each token attends to.
            cache: its layers store the T keys and values at the caller's slots and return all S of them.
            keep: the number of last tokens that need logits, 0 for all; or their indices, ``(R,)`` int64.
        """


def last_of(states: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
    """Select from states ``(1, T, H)`` those of the tokens to ``keep``, ``(R, H)``; see `ChainHead.forward`."""
    return states[:, keep][0] if isinstance(keep, torch.Tensor) else states[0, -keep:]
