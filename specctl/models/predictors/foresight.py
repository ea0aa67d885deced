"""Draft heads that predict whether a token will be accepted before the token is drawn."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Foresee = Callable[["torch.Tensor"], "torch.Tensor"]
"""For a token ``()`` drawn from the last pass's logits, the predicted probability ``()`` float32 that the token drafted
after it is accepted if all before it are; 0 where no token can follow."""
