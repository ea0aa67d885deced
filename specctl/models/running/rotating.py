"""A model that rotates positions by the length of the text, read in parts as `generate` would have written them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from specctl.models.passes.forward import Forward, joined
from specctl.models.passes.watching import cut_states, kept_states
from specctl.models.running.around import Around
from specctl.models.running.passes import Passes
from specctl.models.running.slot import Slot, judged_after, read_after

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from specctl.models.passes.forward import Numbers, PassReader, Token, TokenReader
    from specctl.models.passes.rotation import Rotation


def rotating(passes: Passes, model: "PreTrainedModel") -> Slot:
    """A slot of a model's passes, with a `RotatingRunner` around it where the model rotates by the text's length."""
    from specctl.models.passes.rotation import rotation_of

    if (rotation := rotation_of(model)) is None:
        return Slot(passes)
    rotation.hook(model)
    return RotatingRunner(Slot(passes), rotation)


class RotatingRunner(Around):
    """A `Slot` whose logits are those of `generate`, for a model that rotates positions by the length of the text.

    It says how the tokens of each pass are rotated, and so what the cached ones may be used for. Where `generate` reads
    a text anew that has grown longer than the border, so does this one; a pass over tokens on both sides is two, the
    second of them over the whole text. A rollback to the other side empties the cache.

    Args:
        runner: the one inside, which can `rotate_as`.
        rotation: of its model.
    """

    def __init__(self, runner: Slot, rotation: "Rotation") -> None:
        super().__init__(runner)
        self.judges = runner.judges
        self.holds_everything = runner.holds_everything
        self._rotation = rotation
        self._prompt = 0
        self._regime = 0  # of what is cached
        self._text: list[int] = []  # what is cached, where it may have to be read anew
        if rotation.rereads:
            self.holds_everything = False
            self.no_trees = self.no_trees or f"it reads the text anew at {rotation.border:,} tokens"

    def same_around(self, bare: Slot) -> Slot:
        return RotatingRunner(super().same_around(bare), self._rotation)

    def begin(self, prompt: int) -> None:
        self._prompt = prompt
        self._rotate_as(prompt)

    def _regime_of(self, length: int) -> int:
        """The regime of tokens that are read in a text of ``length``; the prompt's are read at once."""
        return self._rotation.regime(max(length, self._prompt) if self._rotation.rereads else self._prompt)

    def _rotate_as(self, length: int) -> bool:
        """Let passes be those of a text of ``length`` tokens; returns whether that emptied the cache."""
        if (regime := self._regime_of(length)) == self._regime:
            return False
        self._regime = regime
        self.runner.rollback(0)
        self.runner.rotate_as(regime)
        self._text.clear()
        return True

    def _crosses(self, count: int) -> bool:
        """Whether the text has to be read anew for one of the next ``count`` tokens."""
        return self._rotation.rereads and self._regime_of(self.length + count) != self._regime

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        if not self._rotation.rereads:
            return self.runner.extend(tokens, keep, hidden=hidden)
        if not self._crosses(len(tokens)):
            found = self.runner.extend(tokens, keep, hidden=hidden)
            self._text += tokens
            return found
        before = max(0, self._rotation.border - self.length)  # tokens that end no longer text than the border
        parts = []
        if (low := keep - (len(tokens) - before)) > 0:
            part = self.runner.extend(tokens[:before], low, hidden=hidden)
            parts.append(Forward(part.columns, part.hidden, kept_states(part.states), part.vocabulary))
        text = [*self._text, *tokens]
        self._rotate_as(len(text))
        found = self.runner.extend(text, min(keep, len(tokens) - before), hidden=hidden)
        self._text = text
        behind = len(tokens) - before if parts else len(tokens)
        states = cut_states(found.states, slice(len(text) - behind, len(text)))
        return joined([*parts, Forward(found.columns, found.hidden, states, found.vocabulary)])

    def rollback(self, length: int) -> None:
        length = min(length, self.length)
        if self._rotation.rereads and self._rotate_as(length + 1):  # the next token that is read
            return
        self.runner.rollback(length)
        del self._text[self.runner.length :]

    @property
    def specialises(self) -> bool:
        return self.runner.specialises

    @property
    def widest_read(self) -> int:
        return self.runner.widest_read

    def read(
        self,
        tokens: "Sequence[Token]",
        reader: "TokenReader",
        uniform: float | None,
        previous: "torch.Tensor | None" = None,
    ) -> "tuple[list[float] | torch.Tensor, Numbers | None]":
        ids = cast("Sequence[int]", tokens)  # it does not run ahead
        if self._crosses(len(ids)):
            return read_after(self, ids, reader, uniform, previous)
        found = self.runner.read(ids, reader, uniform, previous)
        if self._rotation.rereads:
            self._text += ids
        return found

    def extend_judged(
        self, tokens: Sequence[int], keep: int, judge: "PassReader", about: Any, *, hidden: bool = False
    ) -> Any:
        if self._crosses(len(tokens)):
            return judged_after(self, tokens, keep, judge, about, hidden=hidden)
        found = self.runner.extend_judged(tokens, keep, judge, about, hidden=hidden)
        if self._rotation.rereads:
            self._text += tokens
        return found

    def masked_pass(
        self, tokens: Sequence[int], positions: "torch.Tensor", seen: "torch.Tensor", *, hidden: bool = False
    ) -> Forward:
        assert self.holds_everything, "it reads a sequence in its order"
        return self.runner.masked_pass(tokens, positions, seen, hidden=hidden)
