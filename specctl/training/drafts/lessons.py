"""Lessons: what a target says about one of its answers, from which a draft head learns."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.passes.watching import LayerWatch, States
from specctl.models.passes.weights import device_of


@dataclass(frozen=True, slots=True)
class Lesson:
    """A prompt with the target's answer, read by the target in one pass.

    Attributes:
        ids: ``(N,)`` int64, the prompt and the answer x.
        first: the place of the answer's first token, at least 1.
        states: the target's, ``(N, D)`` float32 for each of the head's layers.
        logits: ``(A, V)`` float32, the target's at the A = N - first places before the answer's tokens: row i predicts
            x_(first + i).
    """

    ids: torch.Tensor
    first: int
    states: States
    logits: torch.Tensor

    @property
    def length(self) -> int:
        """A, how many tokens the answer has."""
        return len(self.ids) - self.first


class Teacher:
    """A target that reads answers. Hooks catch the states of its layers.

    Args:
        target: a causal language model in eval mode.
        layers: whose states are wanted, in specctl's numbers.

    Raises:
        ModelError: the target has no list of decoder layers to watch.
    """

    def __init__(self, target: PreTrainedModel, layers: Iterable[int]) -> None:
        self._target = target
        self._watch = LayerWatch(target)
        try:
            self._watch.watch(layers)
        except IndexError as error:
            raise ModelError(f"The target's layers cannot be read: {error}.") from error
        self.device = device_of(target)

    def lesson(self, prompt: torch.Tensor, answer: torch.Tensor) -> Lesson:
        """Read an answer ``(A,)`` to a prompt ``(P,)``, int32 or int64, both with at least one token."""
        ids = torch.cat([prompt, answer]).long().to(self.device)
        with torch.no_grad():
            # The row of the last token predicts what follows the answer, which nothing is compared with.
            output = self._target(input_ids=ids[None], use_cache=False, logits_to_keep=len(answer) + 1)
        caught = self._watch.take()
        states = {layer: found.float().to(self.device) for layer, found in (caught or {}).items()}
        logits = output.logits[0, :-1].float().to(self.device)
        return Lesson(ids, len(prompt), states, logits)
