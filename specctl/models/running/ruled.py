"""Runners whose logits follow token rules."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from specctl.models.passes.tree_paths import grown_tree, path_to
from specctl.models.passes.watching import States
from specctl.models.running.runner import Forward, Runner, StateReader
from specctl.models.running.tree_runner import tree_obstacle, tree_runner

if TYPE_CHECKING:
    from specctl.models.running.token_rules import TokenRules


class RuledRunner:
    """A `Runner` whose logits follow token rules, for a target and its drafts alike.

    Args:
        runner: the model.
        rules: applied to every row of its logits.
    """

    def __init__(self, runner: Runner, rules: "TokenRules") -> None:
        self.runner = runner
        self.device = runner.device
        self.context = runner.context
        self.rules = rules
        self._text: list[int] = []
        self._tree: Sequence[int] = ()
        self._parents: list[int] = []

    @property
    def length(self) -> int:
        return self.runner.length

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        self._text += tokens
        found = self.runner.extend(tokens, keep, hidden=hidden)
        return Forward(self.rules.apply(found.logits, self._text), found.hidden, found.states)

    @property
    def no_trees(self) -> str | None:
        return tree_obstacle(self.runner)

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        found = tree_runner(self.runner).extend_tree(tokens, parents, before=before, hidden=hidden)
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
        tree_runner(self.runner).keep_path(path)
        self._text += [self._tree[place] for place in path[1:]]

    def watch(self, layers: Iterable[int]) -> None:
        self.runner.watch(layers)

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)
        del self._text[self.runner.length :]


class RuledReader(RuledRunner):
    """A `RuledRunner` around a draft head.

    Args:
        runner: the draft head.
        rules: applied to every row of its logits.
    """

    runner: StateReader

    def __init__(self, runner: StateReader, rules: "TokenRules") -> None:
        super().__init__(runner, rules)

    @property
    def layers(self) -> tuple[int, ...]:
        return self.runner.layers

    @property
    def state_size(self) -> int:
        return self.runner.state_size

    @property
    def witnessed(self) -> int:
        return self.runner.witnessed

    @property
    def longest(self) -> int | None:
        return self.runner.longest

    def witness(self, start: int, states: States) -> None:
        self.runner.witness(start, states)


def ruled(runner: Runner, rules: "TokenRules") -> RuledRunner:
    """A runner or draft head whose logits follow the rules."""
    return RuledReader(runner, rules) if isinstance(runner, StateReader) else RuledRunner(runner, rules)
