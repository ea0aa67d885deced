"""Models with a rotation that depends on the text's length, with the results of `generate` for any passes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from specctl.models.passes.forward import Forward, joined
from specctl.models.passes.watching import cut_states, kept_states
from specctl.models.running.passes import Passes, Request
from specctl.models.running.slot import Slot, judged_after, sampled_after
from specctl.models.running.transforms import Transform

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specctl.models.passes.forward import TokenReader
    from specctl.models.passes.rotation import Rotation


def rotating(passes: Passes, model: "PreTrainedModel") -> Slot:
    """A slot, wrapped in `RotatingPasses` if the model's rotation depends on the text's length."""
    from specctl.models.passes.rotation import rotation_of

    if (rotation := rotation_of(model)) is None:
        return Slot(passes)
    rotation.hook(model)
    return Slot(RotatingPasses(Slot(passes), rotation))


class RotatingPasses(Transform):
    """Passes with the logits of `generate`, for a model with a rotation that depends on the text's length.

    It sets the rotation of each pass's tokens, and so decides whether cached tokens can be used. Where `generate` reads
    a text again that has grown beyond the border, so does this class. A pass over tokens on both sides becomes two, the
    second one over the whole text. A rollback across the border empties the cache.

    Args:
        inner: the slot inside.
        rotation: of its model.
    """

    def __init__(self, inner: Slot, rotation: "Rotation") -> None:
        super().__init__(inner)
        self.holds_everything = inner.holds_everything
        self._rotation = rotation
        self._prompt = 0
        self._regime = 0  # the regime of the cached tokens
        self._text: list[int] = []  # the cached tokens, where they may have to be read again
        if rotation.rereads:
            self.holds_everything = False
            self.no_trees = self.no_trees or f"it reads the text again at {rotation.border:,} tokens"

    def over_slot(self, inner: Slot) -> Slot:
        return Slot(RotatingPasses(inner, self._rotation))

    def begin(self, prompt: int) -> None:
        self._prompt = prompt
        self._rotate_as(prompt)

    def _regime_of(self, length: int) -> int:
        """The regime of tokens read in a text of ``length`` tokens; the prompt's are read at once."""
        return self._rotation.regime(max(length, self._prompt) if self._rotation.rereads else self._prompt)

    def _rotate_as(self, length: int) -> bool:
        """Rotate later passes as in a text of ``length`` tokens; returns whether that emptied the cache."""
        if (regime := self._regime_of(length)) == self._regime:
            return False
        self._regime = regime
        self.inner.rollback(0)
        self.inner.rotate_as(regime)
        self._text.clear()
        return True

    def _crosses(self, count: int) -> bool:
        """Whether one of the next ``count`` tokens requires reading the text again."""
        return self._rotation.rereads and self._regime_of(self.length + count) != self._regime

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        if not self._rotation.rereads:
            return self.inner.extend(tokens, keep, hidden=hidden)
        if not self._crosses(len(tokens)):
            found = self.inner.extend(tokens, keep, hidden=hidden)
            self._text += tokens
            return found
        before = max(0, self._rotation.border - self.length)  # tokens that fit below the border
        parts = []
        if (low := keep - (len(tokens) - before)) > 0:
            part = self.inner.extend(tokens[:before], low, hidden=hidden)
            parts.append(Forward(part.columns, part.hidden, kept_states(part.states), part.vocabulary))
        text = [*self._text, *tokens]
        self._rotate_as(len(text))
        found = self.inner.extend(text, min(keep, len(tokens) - before), hidden=hidden)
        self._text = text
        behind = len(tokens) - before if parts else len(tokens)
        states = cut_states(found.states, slice(len(text) - behind, len(text)))
        return joined([*parts, Forward(found.columns, found.hidden, states, found.vocabulary)])

    def take_back(self, length: int) -> None:
        length = min(length, self.length)
        if self._rotation.rereads and self._rotate_as(length + 1):  # the next token to read
            return
        self.inner.rollback(length)
        del self._text[self.inner.length :]

    @property
    def judges(self) -> bool:
        return self.inner.judges

    @property
    def specialises(self) -> bool:
        return self.inner.specialises

    @property
    def widest_sample(self) -> int:
        return self.inner.widest_sample

    def answer(self, request: Request) -> Any:
        reader, tokens = request.reader, request.tokens
        if reader is None:
            return super().answer(request)
        if callable(reader):  # a sampler, not a judge
            sampler = cast("TokenReader", reader)
            if self._crosses(len(tokens)):
                found = self.extend(tokens, 1, hidden=sampler.hidden)
                return sampled_after(found, sampler, request.about, request.previous)
            answer: Any = self.inner.sample(tokens, sampler, request.about, request.previous)
        elif self._crosses(len(tokens)):
            return judged_after(self.extend(tokens, request.keep, hidden=request.hidden), reader, request.about)
        else:
            answer = self.inner.extend_judged(tokens, request.keep, reader, request.about, hidden=request.hidden)
        if self._rotation.rereads:
            self._text += tokens
        return answer

    def masked_pass(
        self, tokens: Sequence[int], positions: "torch.Tensor", seen: "torch.Tensor", *, hidden: bool = False
    ) -> Forward:
        assert self.holds_everything, "it reads a sequence in its order"
        return self.inner.masked_pass(tokens, positions, seen, hidden=hidden)
