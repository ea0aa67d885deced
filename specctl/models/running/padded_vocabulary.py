"""A draft whose output layer has fewer rows than its target's."""

from collections.abc import Sequence

from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.running.around import Around
from specctl.models.running.runner import Forward, Runner


class NarrowRunner(Around):
    """A `Runner` of a draft that neither reads nor writes the last ids of its target.

    Models of one family pad their output rows to different numbers. Where the tokenizer's size is not known the target
    keeps all its rows, and a token that the model cannot read is replaced by its last one: that makes drafts worse
    after such a token, and changes nothing else.

    Args:
        runner: of the model, with all its rows.
        rows: how many they are.
        vocabulary: V, the target's.
    """

    def __init__(self, runner: Runner, rows: int, vocabulary: int) -> None:
        super().__init__(runner)
        self.no_trees = "its draft has fewer output rows than the target"
        self.draft_vocabulary = runner.draft_vocabulary or DraftVocabulary(range(rows), vocabulary)
        self._rows, self._vocabulary = rows, vocabulary

    def same_around(self, bare: Runner) -> Runner:
        return NarrowRunner(super().same_around(bare), self._rows, self._vocabulary)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        found = self.runner.extend([min(token, self._rows - 1) for token in tokens], keep, hidden=hidden)
        return Forward(found.columns, found.hidden, found.states, self.draft_vocabulary)
