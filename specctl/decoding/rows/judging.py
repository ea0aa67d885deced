"""What a verifier says of a draft: of one text, and of several whose passes were one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, cast

import numpy as np

from specctl.decoding.rows.draft import Draft
from specctl.decoding.rows.draft_verdict import Verdict, require_numbers, verify_greedy
from specctl.decoding.rows.draws import DrawGenerator
from specctl.decoding.rows.rows import Rows
from specctl.decoding.rows.rows_of import on_host, rows_of, rows_over
from specctl.decoding.sampling import Sampling
from specctl.errors import RecordError
from specctl.models.passes.forward import Forward, Numbers, joined_numbers

if TYPE_CHECKING:
    import torch

TOGETHER = 1 << 18
"""Probabilities that are made by one call at most: more leave the processor's cache before they are looked at."""
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
    return _drawn(draft, rows.laws(sampling), sampling, generator)


def _drawn(draft: Draft, laws: Rows, sampling: Sampling, generator: DrawGenerator | None) -> Judged:
    """`judge` by the verifier's distributions ``(K + 1, V)``."""
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
    """Judges the drafts of several texts within the pass that read them, `Request.reader` of a verification.

    Each text is given what `judge` gives it alone. On the host that is so to the last bit: their distributions are made
    by one call, and their numbers looked at one text after the other. On a device all are judged by as many calls as
    one, and waited for once.

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
            return [*map(self._judged, forwards, about, self._laws(forwards))]
        from specctl.decoding.rows.device_judging import judged_together

        found = judged_together(self.sampling, about, [cast("torch.Tensor", forward.rows) for forward in forwards])
        return [
            judged if isinstance(judged, RecordError) else (forward, judged)
            for forward, judged in zip(forwards, found, strict=True)
        ]

    def _judged(self, forward: Forward, drafted: Drafted, laws: Rows | None) -> tuple[Forward, Judged] | RecordError:
        draft, generator = drafted.draft, drafted.generator
        try:
            if laws is None:
                return forward, judge(draft, forward, self.sampling, generator)
            return forward, _drawn(draft, laws, self.sampling, generator)
        except RecordError as error:
            return error

    def _laws(self, forwards: Sequence[Forward]) -> Iterator[Rows | None]:
        """The distributions of each text in turn; None where they are greedy, and none is needed."""
        if self.sampling.greedy:
            yield from repeat(None, len(forwards))
            return
        count = max(1, TOGETHER // max(len(forward.columns) * forward.columns.shape[1] for forward in forwards))
        for first in range(0, len(forwards), count):
            some = forwards[first : first + count]
            laws, end = rows_over(joined_numbers([forward.rows for forward in some])).laws(self.sampling), 0
            for forward in some:
                start, end = end, end + len(forward.columns)
                yield laws.part(slice(start, end))


judge_of = lru_cache(256)(Judge)
"""The one `Judge` of a sampling, as long as not many others are asked for."""
