"""A runner with token rules applied to its logits."""

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np

from specctl.errors import RecordError
from specctl.models.passes.forward import Forward, Numbers, joined_numbers
from specctl.models.passes.tree_sight import grown_tree, path_to
from specctl.models.running.grammars.grammar import FAILED
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import Transform


class TokenRule(Protocol):
    """Decides which tokens may follow a text and changes their logits; depends on the text alone."""

    def apply(self, rows: Numbers, text: Sequence[int]) -> Numbers:
        """The logits ``(R, V)`` after each of the last R tokens of a text, with the rule applied; ``rows`` is
        unchanged.
        """

    def forced(self, text: Sequence[int]) -> int | None:
        """The only token that may follow a text; None if there are several, or if the rule does not know."""

    def fresh(self) -> Self:
        """A copy for another runner, which reads other drafts at other times."""


class RuledPasses(Transform):
    """A `Slot` with token rules applied to its logits, for a target, its drafts and draft heads alike.

    A pass for a single token is skipped where only one token may follow; its input is read by the next pass instead. It
    is not skipped for a draft head, which reads every token, for passes of a fixed width, and with further rules
    inside, which may forbid that token.

    A draft that can write none of the allowed tokens gets a distribution over these, so that its tokens are allowed.

    Args:
        inner: the model.
        rules: applied to every row of its logits.
        cached: the tokens in the model's cache.
        decides: whether it is the target. For the target a position without an allowed token is an error.
    """

    def __init__(self, inner: Slot, rules: TokenRule, cached: Sequence[int] = (), *, decides: bool = False) -> None:
        super().__init__(inner)
        self._decides = decides
        inside = any(isinstance(each, RuledPasses) for each in inner.transforms)
        self._skips = not inner.reads_states and self.fixed_width is None and not inside
        # A model that can write every id always has a finite logit for an allowed one, so its passes need no check.
        some = inner.draft_vocabulary is not None or inner.translates is not None
        self._may_be_empty = some or inner.reads_states or inside
        self.draft_vocabulary = None  # rules apply to ids: they read and write all of them
        self.marginals = False  # which tokens may follow depends on a token's path
        self.rules = rules
        self._text: list[int] = list(cached)
        self._unread: list[int] = []  # the last of these, which no pass has read yet
        self._row: Numbers | None = None  # (1, V), from a pass without watched states
        self._tree: Sequence[int] = ()
        self._parents: list[int] = []

    def over_slot(self, inner: Slot) -> Slot:
        return Slot(RuledPasses(inner, self.rules, decides=self._decides))

    @property
    def length(self) -> int:
        return self.inner.length + len(self._unread)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self._text += tokens
        if keep == 1 and not hidden and self._row is not None and (token := self.rules.forced(self._text)) is not None:
            self._unread += tokens
            return Forward(_certain(token, self._row))
        found = self.inner.extend([*self._unread, *tokens], keep, hidden=hidden)
        self._unread.clear()
        ruled = self._ruled(found.rows, self._text) if keep else found.rows
        if keep and found.states is None and self._skips:
            self._row = ruled[-1:]
        return Forward(ruled, found.hidden, found.states)

    def _ruled(self, rows: Numbers, text: Sequence[int]) -> Numbers:
        """The rows with the rules applied; each has a finite logit for some token."""
        found = self.rules.apply(rows, text)
        if not self._may_be_empty:
            return found
        if isinstance(found, np.ndarray):
            empty = np.asarray(np.isneginf(found).all(axis=1)).tolist()
        else:
            empty = found.isneginf().all(dim=1).tolist()
        if not any(empty):
            return found
        if self._decides:
            raise RecordError(FAILED, "no token may follow: the model's rules forbid what the text's allow")
        over = self.rules.apply(_filled(found, 0), text)
        return joined_numbers([(over if none else found)[row : row + 1] for row, none in enumerate(empty)])

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        if self._unread:  # together with this tree's root
            self.inner.extend(self._unread, keep=0)
            self._unread.clear()
        found = super().extend_tree(tokens, parents, before=before, hidden=hidden)
        self._tree = grown_tree(self._tree, self._text, tokens, before)
        self._parents = [*(self._parents if before > 1 else ()), *parents]
        each = found.rows if len(found.rows) == len(tokens) else [found.rows[0]] * len(tokens)  # marginals have one row
        rows = [
            self._ruled(row[None], [*self._text, *(self._tree[place] for place in path_to(self._parents, token)[1:])])
            for token, row in enumerate(each, start=before)
        ]
        return Forward(joined_numbers(rows), found.hidden, found.states)

    def keep(self, path: Sequence[int]) -> None:
        super().keep(path)
        self._text += [self._tree[place] for place in path[1:]]

    def take_back(self, length: int) -> None:
        read = self.inner.length
        self.inner.rollback(length)
        del self._unread[max(0, length - read) if self.inner.length == read else 0 :]
        del self._text[self.length :]


def _filled(like: Numbers, value: float) -> Numbers:
    """Logits with one number everywhere, on the device and in the dtype of others."""
    if isinstance(like, np.ndarray):
        return np.full_like(like, value)
    import torch

    return torch.full_like(like, value)


def _certain(token: int, like: Numbers) -> Numbers:
    """Logits ``(1, V)`` with all probability on one token, on the device and in the dtype of others."""
    row = _filled(like, -np.inf)
    row[0, token : token + 1] = 0  # assigning to a single index would wait for the device
    return row
