"""A draft without weights: what followed where the text's end occurred before."""

from collections.abc import Sequence

import numpy as np

from specctl.models.passes.forward import Forward
from specctl.models.passes.host_device import HOST
from specctl.models.running.context import ENDLESS
from specctl.models.running.runner import Runner
from specctl.models.running.suffix_index import SuffixIndex

LONGEST_MATCH = 6
"""The most tokens of the text's end that are looked up; longer matches were no better (docs/lookup.md)."""


class LookupRunner(Runner):
    """A `Slot` that predicts the token which followed the latest occurrence of the text's end.

    Its logits are one-hot, or all 0 where the last token is new. Drafting does not read them: `index` tells the match
    without a row for the whole vocabulary.

    Args:
        vocabulary: V, the length of a row of logits.
    """

    engine = "lookup"
    runs_model = False
    verifies = False
    multiplies = True
    index: SuffixIndex

    def __init__(self, vocabulary: int) -> None:
        self.index = SuffixIndex(LONGEST_MATCH)
        self.context = ENDLESS
        self.device = HOST
        self._vocabulary = vocabulary

    @property
    def length(self) -> int:
        return len(self.index)

    def fresh(self) -> "LookupRunner":
        return LookupRunner(self._vocabulary)

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:  # noqa: ARG002 - it has none
        behind = len(tokens) - keep
        self.index.append(tokens[:behind])
        logits = np.zeros((keep, self._vocabulary), dtype=np.float32)
        for row, token in zip(logits, tokens[behind:], strict=True):
            self.index.append([token])
            if (match := self.index.match) is not None:
                row.fill(-np.inf)
                row[self.index.tokens[match.end]] = 0.0
        return Forward(logits)

    def rollback(self, length: int) -> None:
        self.index.truncate(length)
