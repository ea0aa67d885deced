"""A runner whose logits follow token rules."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specctl.models.passes.tree_paths import grown_tree, path_to
from specctl.models.running.around import Around
from specctl.models.running.runner import Forward, Runner

if TYPE_CHECKING:
    from specctl.models.running.token_rules import TokenRules


class RuledRunner(Around):
    """A `Runner` whose logits follow token rules, for a target, its drafts and draft heads alike.

    Args:
        runner: the model.
        rules: applied to every row of its logits.
    """

    def __init__(self, runner: Runner, rules: "TokenRules") -> None:
        super().__init__(runner)
        self.draft_vocabulary = None  # rules are about ids: they read and write all of them
        self.rules = rules
        self._text: list[int] = []
        self._tree: Sequence[int] = ()
        self._parents: list[int] = []

    def same_around(self, bare: Runner) -> Runner:
        return RuledRunner(super().same_around(bare), self.rules)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self._text += tokens
        found = self.runner.extend(tokens, keep, hidden=hidden)
        return Forward(self.rules.apply(found.logits, self._text), found.hidden, found.states)

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        found = super().extend_tree(tokens, parents, before=before, hidden=hidden)
        self._tree = grown_tree(self._tree, self._text, tokens, before)
        self._parents = [*(self._parents if before > 1 else ()), *parents]
        rows = [
            self.rules.apply(
                row[None], [*self._text, *(self._tree[place] for place in path_to(self._parents, token)[1:])]
            )
            for token, row in enumerate(found.logits, start=before)
        ]
        import torch

        return Forward(torch.cat(rows), found.hidden, found.states)

    def keep_path(self, path: Sequence[int]) -> None:
        super().keep_path(path)
        self._text += [self._tree[place] for place in path[1:]]

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)
        del self._text[self.runner.length :]
