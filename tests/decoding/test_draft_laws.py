"""What a draft keeps of the distributions that its tokens were drawn from."""

import numpy as np
import pytest

from specctl.decoding.rows.draft import Draft
from specctl.records import DraftStep, StopReason


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("keeps_laws", [False, True])
def test_laws_are_kept_where_they_are_asked_for_and_probabilities_where_tokens_are_drawn(
    greedy: bool, keeps_laws: bool
) -> None:
    laws = np.full((2, 4), 0.25, np.float32)
    steps = [DraftStep(1, token=3), DraftStep(2, token=0)]
    made = Draft.of(steps, laws, StopReason.POLICY, 0.5, greedy=greedy, keeps_laws=keeps_laws)
    assert made.probs is (None if greedy else laws)
    assert made.laws is (laws if keeps_laws else None)
    assert (made.tokens, made.steps, made.stop, made.threshold) == ([3, 0], tuple(steps), StopReason.POLICY, 0.5)
