"""A runner whose logits follow token rules."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specctl.models.passes.forward import Numbers, joined_numbers
from specctl.models.passes.tree_paths import grown_tree, path_to
from specctl.models.running.around import Around
from specctl.models.running.runner import Forward, Runner


class TokenRule(Protocol):
    """Says which tokens may follow a text, and how their logits change; it depends on the text alone."""

    def apply(self, rows: Numbers, text: Sequence[int]) -> Numbers:
        """The logits ``(R, V)`` that follow the last R tokens of a text, with the rule applied; ``rows`` stays."""

    def forced(self, text: Sequence[int]) -> int | None:
        """The one token that may follow a text; None where several may, or the rule does not know."""


class RuledRunner(Around):
    """A `Runner` whose logits follow token rules, for a target, its drafts and draft heads alike.

    Where only one token may follow, no pass is made for it: the tokens that were to be read go into the next pass.

    Args:
        runner: the model.
        rules: applied to every row of its logits.
        cached: the tokens that the model has cached.
    """

    def __init__(self, runner: Runner, rules: TokenRule, cached: Sequence[int] = ()) -> None:
        super().__init__(runner)
        self.draft_vocabulary = None  # rules are about ids: they read and write all of them
        self.marginals = False  # what may follow a token depends on its path
        self.rules = rules
        self._text: list[int] = list(cached)
        self._unread: list[int] = []  # of these the last, which no pass has read yet
        self._row: Numbers | None = None  # (1, V) of a pass whose states nobody watched
        self._tree: Sequence[int] = ()
        self._parents: list[int] = []

    def same_around(self, bare: Runner) -> Runner:
        return RuledRunner(super().same_around(bare), self.rules)

    @property
    def length(self) -> int:
        return self.runner.length + len(self._unread)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self._text += tokens
        if keep == 1 and not hidden and self._row is not None and (token := self.rules.forced(self._text)) is not None:
            self._unread += tokens
            return Forward(_certain(token, self._row))
        found = self.runner.extend([*self._unread, *tokens], keep, hidden=hidden)
        self._unread.clear()
        ruled = self.rules.apply(found.rows, self._text) if keep else found.rows
        if keep and found.states is None and not self.reads_states:
            self._row = ruled[-1:]
        return Forward(ruled, found.hidden, found.states)

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        if self._unread:  # with this tree's root
            self.runner.extend(self._unread, keep=0)
            self._unread.clear()
        found = super().extend_tree(tokens, parents, before=before, hidden=hidden)
        self._tree = grown_tree(self._tree, self._text, tokens, before)
        self._parents = [*(self._parents if before > 1 else ()), *parents]
        each = found.rows if len(found.rows) == len(tokens) else [found.rows[0]] * len(tokens)  # of marginals one
        rows = [
            self.rules.apply(
                row[None], [*self._text, *(self._tree[place] for place in path_to(self._parents, token)[1:])]
            )
            for token, row in enumerate(each, start=before)
        ]
        return Forward(joined_numbers(rows), found.hidden, found.states)

    def keep_path(self, path: Sequence[int]) -> None:
        super().keep_path(path)
        self._text += [self._tree[place] for place in path[1:]]

    def rollback(self, length: int) -> None:
        read = self.runner.length
        self.runner.rollback(length)
        del self._unread[max(0, length - read) if self.runner.length == read else 0 :]
        del self._text[self.length :]


def _certain(token: int, like: Numbers) -> Numbers:
    """Logits ``(1, V)`` of which only one token has a probability, where and as others are."""
    row: Numbers
    if isinstance(like, np.ndarray):
        row = np.full_like(like, -np.inf)
    else:
        import torch

        row = torch.full_like(like, -torch.inf)
    row[0, token] = 0
    return row
