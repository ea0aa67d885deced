"""A model reads tokens that follow a part of a text without being in it, and comes back to the text."""

from collections.abc import Sequence

import torch

from specctl.models.running.slot import Slot


class Detours:
    """Reads behind parts of one text.

    Args:
        runner: its cache may hold a prefix of the text.
        text: all ids, those of the prompt too.
    """

    def __init__(self, runner: Slot, text: Sequence[int]) -> None:
        self._runner, self._text = runner, text
        self._shared: int | None = None  # of the cached tokens, how many are of the text; None for all

    def behind(self, length: int, tokens: Sequence[int], keep: int) -> torch.Tensor:
        """The logits ``(keep, V)`` behind the last of some tokens that follow the first ``length`` of the text."""
        self._go_back(length)
        forward = self._runner.extend([*self._text[self._runner.length : length], *tokens], keep=keep)
        self._shared = length
        return forward.logits

    def come_back(self, length: int) -> None:
        """Have the cache hold the first ``length`` tokens of the text and no other, if it has been on a detour."""
        if self._shared is None:
            return
        self._go_back(length)
        if missing := self._text[self._runner.length : length]:
            self._runner.extend(missing, keep=0)
        self._shared = None

    def _go_back(self, length: int) -> None:
        own = self._runner.length if self._shared is None else self._shared
        self._runner.rollback(min(own, length))
