"""What a verifier says of a draft: of one text, and of several whose passes were one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np

from specctl.decoding.rows.draft import Draft
from specctl.decoding.rows.draft_verdict import Verdict, require_numbers, verify_greedy
from specctl.decoding.rows.draws import DrawGenerator
from specctl.decoding.rows.rows_of import on_host, rows_of
from specctl.decoding.sampling import Sampling
from specctl.errors import RecordError
from specctl.models.passes.forward import Forward, Numbers

if TYPE_CHECKING:
    import torch

Judged = tuple[Verdict, Numbers | None]
"""A verdict, and the verifier's distributions ``(K + 1, V)`` behind it; None when greedy."""


def judge(draft: Draft, forward: Forward, sampling: Sampling, generator: DrawGenerator | None) -> Judged:
    """The verdict on K draft tokens.

    Args:
        draft: the K tokens with their distributions.
        forward: the verifier's, with logits ``(K + 1, V)``; or ``(K, V)``, K > 0, where no token is to follow a draft
            that is kept as a whole.
        sampling: how tokens are drawn.
        generator: for the logits' device.

    Raises:
        RecordError: the logits hold NaN.
    """
    rows = rows_of(forward)
    if sampling.greedy:
        choices, values = rows.best()
        require_numbers(*values)
        return verify_greedy(draft.tokens, choices), None
    laws = rows.laws(sampling)  # (K + 1, V)
    verdict = laws.verify(draft.tokens, draft.probs, generator, sampling.verification, draft.vocabulary)
    return verdict, laws.numbers


@dataclass(slots=True, eq=False)
class Drafted:
    """What a text wants to have judged.

    Attributes:
        draft: K tokens.
        generator: the text's own, for the coins: a text's numbers do not depend on what others draw.
        numbers: ``(K + 1,)`` that were drawn on a device, where a verdict may be asked for again.
    """

    draft: Draft
    generator: DrawGenerator | None
    numbers: "torch.Tensor | None" = field(default=None, init=False)


@dataclass(frozen=True, slots=True)
class Judge:
    """Judges the drafts of several texts within the pass that read them, `RowRequest.reader` of a verification.

    Each text is given what `judge` gives it alone: on the host to the last bit, for its numbers are looked at one text
    after the other. One call over all would save a few operations and write more memory than a processor's cache holds.
    On a device all are judged by as many calls as one, and waited for once.

    Attributes:
        sampling: of the texts.
    """

    sampling: Sampling

    def read_rows(
        self, forwards: Sequence[Forward], about: Sequence[Drafted]
    ) -> Sequence[tuple[Forward, Judged] | RecordError]:
        """The passes with the verdicts, and an error where the logits of a text hold NaN; as in `PassReader`."""
        columns = forwards[0].columns
        if isinstance(columns, np.ndarray) or on_host(columns):
            return [self._alone(forward, drafted) for forward, drafted in zip(forwards, about, strict=True)]
        from specctl.decoding.rows.device_judging import judged_together

        found = judged_together(self.sampling, about, [cast("torch.Tensor", forward.rows) for forward in forwards])
        return [
            judged if isinstance(judged, RecordError) else (forward, judged)
            for forward, judged in zip(forwards, found, strict=True)
        ]

    def _alone(self, forward: Forward, drafted: Drafted) -> tuple[Forward, Judged] | RecordError:
        try:
            return forward, judge(drafted.draft, forward, self.sampling, drafted.generator)
        except RecordError as error:
            return error


judge_of = lru_cache(256)(Judge)
"""The one `Judge` of a sampling, as long as not many others are asked for."""
