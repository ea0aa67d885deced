"""The verdict of one form of logits on one draft."""

from collections.abc import Sequence

import torch

from specctl.decoding.draft import Draft, Drafted
from specctl.decoding.draws import DrawGenerator
from specctl.decoding.logits.logits import Logits, Verdict
from specctl.models.passes.draft_vocabulary import DraftVocabulary
from specctl.models.passes.forward import Numbers
from specctl.profile.schema import Verification


def verdict_on(
    probs: Logits,
    tokens: Sequence[int] | torch.Tensor,
    draft_probs: Numbers,
    generator: DrawGenerator | None,
    rule: Verification = "token",
    vocabulary: DraftVocabulary | None = None,
) -> Verdict:
    """`Logits.verdicts` of a verifier's distributions ``(K + 1, V)`` or ``(K, V)`` on the K tokens of one text."""
    asked = Drafted(Draft([*map(int, tokens)], draft_probs, (), None, vocabulary=vocabulary), generator)
    (found,) = probs.verdicts([asked], [0, len(probs.numbers)], rule)
    assert isinstance(found, Verdict)
    return found
