"""Drafting in parallel on a trace: the steps of PEARL (arXiv 2408.11850), and their time on two devices. No torch here.

Verification reads the same tokens as in turns, up to the first rejected one. So the text is cut into *stretches*. Each
begins where the draft starts afresh, and ends with the token that the target corrects or with the text. A stretch of V
tokens, V - 1 of them accepted, takes

    1 + ceil((V - 1) / K)   steps in parallel: the first verifies one token, each further one K more
    ceil(V / (K + 1))       rounds in turns: each verifies K tokens and adds one

of blocks of K tokens, and both write V tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from specctl.errors import UsageError
from specctl.replay.costs import CostTable
from specctl.replay.traces import Trace


def stretches(trace: Trace) -> list[int]:
    """The length V of each stretch of a trace.

    Raises:
        UsageError: the trace is a draft head's, which cannot draft while its verifier reads.
    """
    if trace.draft.along is None:
        raise UsageError("a draft head drafts from what the target has read, so never in parallel")
    assert trace.draft.by_place, "in greedy decoding there are no blocks"
    return cut([place for place in range(len(trace.tokens)) if not trace.draft.run(place)], len(trace.tokens))


def cut(rejected: Iterable[int], end: int) -> list[int]:
    """The length V of each stretch of a text of ``end`` tokens, from the positions of rejected draft tokens."""
    borders = [0, *(place + 1 for place in rejected), end]
    return [after - before for before, after in pairwise(borders) if after > before]


def parallel_steps(stretch: int, block: int) -> int:
    """Target passes for a stretch of V tokens, in parallel with blocks of K."""
    return 1 + ceil((stretch - 1) / block)


def rounds_in_turns(stretch: int, block: int) -> int:
    """Target passes for a stretch of V tokens, in turns with blocks of K: the policy ``constant``, greedily."""
    return ceil(stretch / (block + 1))


@dataclass(frozen=True, slots=True)
class Simulated:
    """The simulated time of texts with one draft length."""

    parallel: bool  # whether target and draft work at the same time, else in turns
    block: int  # K, the tokens that the draft writes in each step
    ratio: bool  # whether K is t_target / t_draft, rounded; else it is the fastest
    # steps, tokens: target passes, and tokens of the texts
    steps: int
    tokens: int
    milliseconds: float  # of all steps

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.tokens / self.milliseconds


class TwoDevices:
    """The time of steps in which the draft generates K tokens while the target verifies, each on its own device.

    A step takes as long as the slower of both, and the time to synchronise them: max(K t_draft, t_target(M)) + sync,
    with M = 1 in the first step of a stretch and K in every other. It is assumed that neither slows the other down;
    ``sync_ms`` is an assumption too.

    Args:
        costs: times of the draft, and of target passes by width, on their future devices.
        sync_ms: milliseconds to synchronise the two, in every step.
        widest: the widest target pass that was measured.
    """

    def __init__(self, costs: CostTable, sync_ms: float, widest: int) -> None:
        self._seconds = costs.clock(())
        self.sync_ms, self.widest = sync_ms, widest

    def simulate(self, stretches: Sequence[int]) -> list[Simulated]:
        """In turns with the fastest K, in parallel with K = t_target / t_draft, and in parallel with the fastest K.

        Args:
            stretches: the length V of each, at least one.
        """
        blocks = range(1, self.widest + 1)
        turns = min((self._in_turns(stretches, block) for block in blocks[: self.widest - 1]), key=_time, default=None)
        draft, target = self._draft_ms(1), self._target_ms(1)
        ratio = min(max(1, round(target / draft)), self.widest) if draft else self.widest
        both = [
            self._in_parallel(stretches, ratio, ratio=True),
            min((self._in_parallel(stretches, block) for block in blocks), key=_time),
        ]
        return both if turns is None else [turns, *both]

    def _in_parallel(self, stretches: Iterable[int], block: int, *, ratio: bool = False) -> Simulated:
        steps = [parallel_steps(stretch, block) for stretch in stretches]
        first, other = (max(self._draft_ms(block), self._target_ms(width)) + self.sync_ms for width in (1, block))
        ms = len(steps) * first + (sum(steps) - len(steps)) * other
        return Simulated(True, block, ratio, sum(steps), sum(stretches), ms)

    def _in_turns(self, stretches: Iterable[int], block: int) -> Simulated:
        rounds = sum(rounds_in_turns(stretch, block) for stretch in stretches)
        ms = rounds * (self._draft_ms(block) + self._target_ms(block + 1))
        return Simulated(False, block, False, rounds, sum(stretches), ms)

    def _draft_ms(self, tokens: int) -> float:
        return 1e3 * self._seconds(0, tokens, 0)[0]

    def _target_ms(self, width: int) -> float:
        return 1e3 * self._seconds(0, width - 1, 0)[1]


def _time(simulated: Simulated) -> float:
    return simulated.milliseconds
