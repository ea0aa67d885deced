"""A draft head that writes token after token: one layer over its verifier's states, then over its own output."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
from transformers import Cache

from specctl.models.draft_heads.head import Borrowed, DraftHead
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.trimmed_output import TrimmedOutput


class ChainPass(NamedTuple):
    """What a chain head computes for the last tokens that it read."""

    logits: torch.Tensor  # ``(keep, D)``, over the draft vocabulary
    hidden: torch.Tensor  # ``(keep, H)`` what the output layer read, for predictors
    features: torch.Tensor  # ``(keep, F)`` what the next token is read with where the verifier's state is not known


class ChainHead(DraftHead, ABC):
    """A network that reads token x_p together with the features of place p - 1, and predicts token x_(p+1).

    Features are what `fuse` computes from the verifier's states, or the network's own output where there are none yet.

    Attributes:
        sees_first: whether later tokens attend to the first one of a sequence, which has no place before it.
        window: W, a token attends to the last W tokens, itself included; 0 for all.
    """

    sees_first = False
    window = 0
    # the id of a token to come, of a head that reads `longest` of them in a pass; None for all others
    mask_token: int | None = None

    @property
    def no_graphs(self) -> str | None:
        return "its layers have windows, or it reads masks" if self.window or self.mask_token is not None else None

    def draft_only(self, vocabulary: DraftVocabulary) -> None:
        """Let a head that drafts all V tokens, whose output layer `trims`, draft these only."""
        layer = TrimmedOutput(self.output_layer, vocabulary)
        if self._output:
            self._output = Borrowed(layer)
        else:
            self.lm_head = layer
        self.tokens, self.draft_vocabulary = vocabulary.ids_on(layer.weight.device), len(vocabulary)

    @property
    def feature_size(self) -> int:
        """F, numbers of a place's features."""
        return self.width

    def causal(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Which of S tokens at places ``slots`` each of T tokens at ``positions`` attends to: ``(T, S)`` bool."""
        return self.attended(slots <= positions[:, None], slots, positions)

    def attended(self, seen: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What is left of tokens that could be seen, ``(T, S)`` bool; ``slots`` and ``positions`` as in `causal`."""
        if self.window:
            seen = seen & self.near(slots, positions)
        return seen if self.sees_first else seen & ((slots > 0) | (positions[:, None] == 0))

    def near(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Which places are within the window, ``(T, S)`` bool; ``slots`` and ``positions`` as in `causal`."""
        return slots > positions[:, None] - self.window

    def mask_features(self) -> torch.Tensor | None:
        """The features ``(1, F)`` that a mask is read with; None for heads that continue from their own output."""
        return None

    @abstractmethod
    def fuse(self, states: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The features ``(T, F)`` of T places whose states are given, ``(T, D)`` for each of `layers`."""

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
            features: ``(1, T, F)``, of the places p - 1.
            positions: ``(T,)`` int64, p.
            mask: ``(1, 1, T, S)`` bool, which of the S cached tokens each token attends to.
            cache: its layers write the T keys and values where the caller wants them and return all S of them.
            keep: the number of last tokens that need logits, 0 for all; or which of them, ``(R,)`` int64.
        """


def last_of(states: torch.Tensor, keep: int | torch.Tensor) -> torch.Tensor:
    """Of states ``(1, T, H)`` those ``(R, H)`` of the tokens to ``keep``, see `ChainHead.forward`."""
    return states[:, keep][0] if isinstance(keep, torch.Tensor) else states[0, -keep:]
