"""A draft head is timed as it runs: each round begins with what the round before it emitted."""

import torch
from toys import StateTable, ToyDraftHead, table
from traced import pair_of

from specctl.decoding.sampling import Sampling
from specctl.models.running.runner import Forward
from specctl.replay.metering import IN_A_ROW, PASSES, measure

VOCABULARY, CONTEXT, LONGEST = 120, 20, 6


class Noting(ToyDraftHead):
    """Notes how many tokens each pass reads, and for how many of them the state before was known."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(logits, 1)
        self.passes: list[tuple[int, int]] = []

    def extend(self, tokens: list[int], keep: int, *, hidden: bool = False) -> Forward:
        before = self._true
        forward = super().extend(tokens, keep, hidden=hidden)
        self.passes.append((len(tokens), self._true - before))
        return forward


def test_rounds_of_a_draft_head_begin_with_the_tokens_of_the_round_before() -> None:
    draft = Noting(table(2, vocabulary=VOCABULARY))
    pair = pair_of(StateTable(table(1, vocabulary=VOCABULARY)), draft)
    pair.target.watch(draft.layers)
    costs = measure(pair, [CONTEXT], LONGEST, [frozenset({"entropy"})], Sampling(), [0.0])
    assert costs.lengths.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert costs.draft_ms.shape == (1, 7)
    for length in range(1, LONGEST + 1):
        reread = length // 2
        round_ = [(reread + 1, reread + 1), *[(1, 0)] * (length - 1)]
        starts = [n for n in range(len(draft.passes)) if draft.passes[n : n + len(round_)] == round_]
        assert len(starts) >= PASSES * IN_A_ROW
