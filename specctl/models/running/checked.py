"""A target that is compared once with a fresh read of the same text, after its first rejected token."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specctl.errors import ModelError
from specctl.models.passes.forward import Forward
from specctl.models.passes.tree_sight import grown_tree
from specctl.models.running.around import Around
from specctl.models.running.slot import Slot

if TYPE_CHECKING:
    import torch

LIMITS = {"torch.float32": 0.01, "torch.float64": 0.01}
LIMIT = 0.25
"""The largest difference that rounding explains, as a share of the logits' standard deviation; by dtype, else this."""


class CheckedRunner(Around):
    """A `Slot` that makes sure, once, that a rollback leaves no trace in its model.

    After the first rollback the next logits are compared with those of target-only decoding: a fresh cache reads what
    came first in one pass, and the rest token by token. No knowledge of the model is needed.

    Args:
        runner: the target.
        fresh: makes another runner of the same model with an empty cache.
        name: the model's, in the error.
    """

    def __init__(self, runner: Slot, fresh: Callable[[], Slot], name: str) -> None:
        super().__init__(runner)
        self.difference: float | None = None
        """What was found, as a share of the logits' standard deviation; None before the check."""
        self._fresh, self._name = fresh, name
        self._text: list[int] = []
        self._first = 0  # tokens of the text's first pass, the prompt
        self._prompt = 0
        self._went_back = False
        self._tree: Sequence[int] = ()

    def begin(self, prompt: int) -> None:
        self._prompt = prompt
        self.runner.begin(prompt)
        del self._text[self.runner.length :]

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        """As in `Slot`.

        Raises:
            ModelError: the logits are not those of a fresh read.
        """
        if not self._text:
            self._first = len(tokens) - max(keep - 1, 0)
        self._text += tokens
        found = self.runner.extend(tokens, keep, hidden=hidden)
        if self._went_back and self.difference is None and keep:
            self._compare(found.logits)
        return found

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        """As in `Slot`; the logits of a root that is read with its tree are compared.

        Raises:
            ModelError: the logits are not those of a fresh read.
        """
        self._tree = grown_tree(self._tree, self._text, tokens, before)
        found = super().extend_tree(tokens, parents, before=before, hidden=hidden)
        if self._went_back and self.difference is None and not before:
            self._compare(found.logits[:1])
        return found

    def keep_path(self, path: Sequence[int]) -> None:
        self._went_back |= len(path) < len(self._tree)
        super().keep_path(path)
        self._text += [self._tree[place] for place in path[1:]]

    def rollback(self, length: int) -> None:
        self._went_back |= 0 < length < self.runner.length
        self.runner.rollback(length)
        if length:
            del self._text[self.runner.length :]  # a model that went back further reads the rest again
        else:
            self._text, self._went_back = [], False

    def _compare(self, logits: "torch.Tensor") -> None:
        """Compare ``(R, V)`` logits of the last R tokens."""
        import torch

        fresh = self._fresh()
        fresh.begin(self._prompt)
        first = min(self._first, len(self._text) - len(logits))
        if first:
            fresh.extend(self._text[:first], keep=0)
        rows = [fresh.extend([token], keep=1).logits for token in self._text[first:]]
        expected = torch.cat(rows)[-len(logits) :].float()
        error = (logits.float() - expected).square().mean(-1).sqrt() / expected.std(-1)  # (R,)
        self.difference = float(error.max())
        if not self.difference <= LIMITS.get(str(logits.dtype), LIMIT):
            raise ModelError(
                f"The target model {self._name!r} does not forget rejected tokens: after the first of them its logits "
                f"are off by {self.difference:.1%} of their spread. Drafting would change what it writes.",
                'Use it without a draft (--policy none), or with engine = "eager" if another engine is set.',
            )
