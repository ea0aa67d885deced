"""Which tokens a draft of few can write, and what share of a text they are."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specctl.doctor.model_facts import ModelFacts
from specctl.models.loading.fewer_tokens import counts_for, draft_vocabulary, trained_on_few
from specctl.profile.schema import DraftTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def examine_draft_tokens(
    table: DraftTable, facts: ModelFacts, tokenizer: "PreTrainedTokenizerBase", whole: int, eos: Sequence[int]
) -> None:
    """Add to a draft's facts how many tokens it writes, and which share of those counted they are.

    Args:
        table: the draft's, with ``tokens``.
        facts: of the draft.
        tokenizer: the target's.
        whole: V, the vocabulary that both share.
        eos: ids that end a text.

    Raises:
        ModelError: as of `draft_vocabulary`, or it is a draft head that was trained to write few.
    """
    if facts.draft_head is not None and facts.draft_tokens != facts.vocabulary:
        if table.tokens == "auto":
            return
        raise trained_on_few(table.model, facts.draft_tokens or 0)
    ids = draft_vocabulary(table, tokenizer, whole, eos, facts.vocabulary, facts.output_share)
    facts.draft_tokens = whole if ids is None else len(ids)
    counts = counts_for(table, tokenizer, whole)
    some = range(whole) if ids is None else ids.ids.tolist()
    facts.covered, facts.covers = counts.covered(some), counts.expected(some, whole)
