"""Drafts that write few tokens, for tests of several folders."""

from collections.abc import Iterable, Sequence
from copy import deepcopy

import torch
from transformers import PreTrainedModel

from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Forward
from specctl.models.passes.trimmed_output import trim_output
from tests.support.toys import TableRunner, noisy_copy


class FewTokens(TableRunner):
    """A `TableRunner` that writes some tokens only, as its logits' columns say."""

    def __init__(self, logits: torch.Tensor, ids: Iterable[int]) -> None:
        super().__init__(logits)
        self.draft_vocabulary: DraftVocabulary = DraftVocabulary(ids, logits.shape[-1])

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        found = super().extend(tokens, keep, hidden=hidden)
        columns = found.columns[:, self.draft_vocabulary.ids_on(self.device)]
        return Forward(columns, found.hidden, found.states, self.draft_vocabulary)


def trimmed(family: str, ids: Iterable[int]) -> PreTrainedModel:
    """A noisy copy of a random model of 64 tokens that writes some of them only."""
    model = deepcopy(noisy_copy(family))
    trim_output(model, DraftVocabulary(ids, 64))
    return model
