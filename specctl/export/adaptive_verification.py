"""vLLM's adaptive verification of one text, as its source has it: K tokens are drafted, and some of them verified."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from specctl.errors import UsageError
from specctl.policies import Rule
from specctl.policies.base import read
from specctl.policies.rules.vllm_adaptive import AcceptanceEstimate
from specctl.records import DraftStep, Round
from specctl.replay.recorded import Recorded


@dataclass(slots=True)
class AdaptiveVerification(Rule):
    """How many draft tokens vLLM 0.33.0 verifies (vllm/v1/worker/gpu/spec_decode/adaptive_verification.py).

    The number n that maximises (1 + S_1 + ... + S_n) / (D + V(n)), with the acceptance that was estimated of the draft
    *before*: of the newest one the host knows nothing yet. Of a text's first draft all tokens count as certain.

    Args:
        draft: milliseconds of a whole draft.
        verify: milliseconds of target passes over a draft of 0, 1, ... K tokens.
    """

    draft: float
    verify: Sequence[float]
    _estimate: AcceptanceEstimate = field(init=False)
    _survival: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._estimate = AcceptanceEstimate(self.whole)
        self.reset()

    @property
    def whole(self) -> int:
        """How many tokens are drafted."""
        return len(self.verify) - 1

    def reset(self) -> None:
        self._survival = [1.0] * self.whole

    def draft_limit(self) -> int:
        emitted = accumulate(self._survival, initial=1.0)
        rates = [tokens / (self.draft + ms) for tokens, ms in zip(emitted, self.verify, strict=True)]
        return rates.index(max(rates))

    def observe(self, round_: Round) -> None:
        self._estimate.learn([read(step.top_prob) for step in round_.steps], round_.accepted)

    def look(self, draft: Recorded, start: int, eos: frozenset[int]) -> None:
        """Estimate the acceptance of the draft of the round that begins at a position, its unverified tokens too.

        What a draft writes behind the end of a sequence, or behind what was recorded, counts as not accepted.
        """
        found: list[float] = []
        for position in range(self.whole):
            step = _step(draft, start, position + 1)
            if step is None:
                break
            found.append(self._estimate.at(position, read(step.top_prob)))
            if step.token in eos:
                break
        self._survival = [*accumulate(found, mul), *[0.0] * (self.whole - len(found))]


def _step(draft: Recorded, start: int, index: int) -> DraftStep | None:
    try:
        return draft.step(start, index)
    except UsageError:
        return None
