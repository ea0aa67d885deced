"""Which ids of two tokenizers mean the same."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.translation.token_bytes import TokenBytes


class TokenMap:
    """The tokens that both a target and a draft have: the same bytes, or special tokens that mean the same.

    Special tokens mean the same where they begin or end a text in both tokenizers, and where both spell them alike.

    Args:
        target: of the target's tokenizer.
        draft: of the draft's.
        whole: V, the pair's vocabulary: the target's ids, perhaps with padding behind them.
        writes_text: whether the draft writes whatever tokens it has, and the target's are cut of their text.

    Attributes:
        target, draft, whole, writes_text: as given.
        draft_id: the draft's id for each of the target's that has one, for what the draft reads.
        vocabulary: the target's ids that the draft can write, each the one that the target's tokenizer writes.
        columns: ``(N,)`` int64, the draft's ids of ``vocabulary``.
    """

    def __init__(self, target: TokenBytes, draft: TokenBytes, whole: int, *, writes_text: bool = False) -> None:
        self.target, self.draft, self.whole, self.writes_text = target, draft, whole, writes_text
        found = {i: draft.ids[text] for i, text in target.of.items() if text in draft.ids}
        found |= {index: draft.specials[token] for token, index in target.specials.items() if token in draft.specials}
        for ours, theirs in ((target.start, draft.start), ((target.eos,), (draft.eos,))):
            if len(ours) == len(theirs) == 1 and ours[0] is not None and theirs[0] is not None:
                found[ours[0]] = theirs[0]
        self.draft_id: Mapping[int, int] = {
            i: own for i, own in found.items() if i < target.whole and own < draft.whole
        }
        # Of several ids that the draft reads alike, it writes the one that the target's tokenizer does.
        written = {own: index for index, own in sorted(self.draft_id.items(), reverse=True)}
        written |= {
            own: index for index, own in self.draft_id.items() if target.ids.get(target.of.get(index, b"")) == index
        }
        if draft.eos is not None and target.eos is not None and self.draft_id.get(target.eos) == draft.eos:
            written[draft.eos] = target.eos  # whatever else of the target's is spelt like the draft's end
        own_of = {index: own for own, index in written.items()}
        self.vocabulary = DraftVocabulary(own_of, whole)
        self.columns: npt.NDArray[np.int64] = np.array([own_of[index] for index in self.vocabulary.ids], dtype=np.int64)

    @property
    def told(self) -> str:
        """What the draft does, in words."""
        if self.writes_text:
            return "writes text, which is cut into the target's tokens"
        return f"drafts the {len(self.vocabulary):,} of {self.target.whole:,} tokens that both have"
