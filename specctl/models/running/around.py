"""A runner around another one."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.models.running.passes import Passes
from specctl.models.running.runner import Runner
from specctl.models.running.slot import Slot

if TYPE_CHECKING:
    from specctl.models.passes.watching import States


class Around(Runner):
    """A `Slot` around another one, which does what that one does but for the methods it overrides.

    It hides `read`, `foresee` and `index`, by which a caller would get past it to the runner inside.

    Args:
        runner: the one inside.
    """

    def __init__(self, runner: Slot) -> None:
        self.runner = runner
        self.context, self.device = runner.context, runner.device
        self.runs_model, self.verifies, self.captures = runner.runs_model, runner.verifies, runner.captures
        self.no_trees, self.no_rows, self.marginals = runner.no_trees, runner.no_rows, runner.marginals
        self.layers, self.state_size, self.longest = runner.layers, runner.state_size, runner.longest
        self.token_bytes, self.rows_bytes = runner.token_bytes, runner.rows_bytes
        self.threads, self.tried, self.fixed_width = runner.threads, runner.tried, runner.fixed_width
        self.draft_vocabulary = runner.draft_vocabulary
        self.translates, self.writes_text = runner.translates, runner.writes_text
        self.whole_prompts = runner.whole_prompts

    @property
    def length(self) -> int:
        return self.runner.length

    @property
    def engine(self) -> str:
        return self.runner.engine

    @property
    def preparing_seconds(self) -> float | None:
        return self.runner.preparing_seconds

    @property
    def bare(self) -> Slot:
        return self.runner.bare

    def same_around(self, bare: Slot) -> Slot:
        """As in `Slot`; without this one, unless it says otherwise."""
        return self.runner.same_around(bare)

    def over(self, slots: int, width: int | None = None) -> Passes:
        return self.runner.over(slots, width)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        return self.runner.extend(tokens, keep, hidden=hidden)

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)

    def begin(self, prompt: int) -> None:
        self.runner.begin(prompt)

    def watch(self, layers: Iterable[int]) -> None:
        self.runner.watch(layers)

    @property
    def observed(self) -> int:
        return self.runner.observed

    def observe_states(self, start: int, states: "States") -> None:
        self.runner.observe_states(start, states)

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        assert self.no_trees is None, self.no_trees
        return self.runner.extend_tree(tokens, parents, before=before, hidden=hidden)

    def keep_path(self, path: Sequence[int]) -> None:
        assert self.no_trees is None, self.no_trees
        self.runner.keep_path(path)


class NarrowRunner(Around):
    """A `Slot` of a draft that neither reads nor writes the last ids of its target.

    Models of one family pad their output rows to different numbers. Where the tokenizer's size is not known the target
    keeps all its rows, and a token that the model cannot read is replaced by its last one: that makes drafts worse
    after such a token, and changes nothing else.

    Args:
        runner: of the model, with all its rows.
        rows: how many they are.
        vocabulary: V, the target's.
    """

    def __init__(self, runner: Slot, rows: int, vocabulary: int) -> None:
        super().__init__(runner)
        self.no_trees = "its draft has fewer output rows than the target"
        self.draft_vocabulary = runner.draft_vocabulary or DraftVocabulary(range(rows), vocabulary)
        self._rows, self._vocabulary = rows, vocabulary

    def same_around(self, bare: Slot) -> Slot:
        return NarrowRunner(super().same_around(bare), self._rows, self._vocabulary)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        found = self.runner.extend([min(token, self._rows - 1) for token in tokens], keep, hidden=hidden)
        return Forward(found.columns, found.hidden, found.states, self.draft_vocabulary)
