"""Plays a policy on traces: the same rounds as a live run, without a model. No torch here."""

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial

from specctl.calibration.traces import Trace
from specctl.policies import StoppingPolicy, draft_phase
from specctl.records import ExtraToken, Round

Clock = Callable[[int, int], tuple[float, float]]
"""Seconds of a round's drafting and verifying, from the tokens before it (the prompt's too) and those it drafts."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A policy's rounds on one sequence, as columns of equal length.

    Attributes:
        starts: tokens generated before each round.
        drafted, accepted: tokens of each round.
    """

    trace: Trace
    starts: list[int]
    drafted: list[int]
    accepted: list[int]

    @property
    def tokens(self) -> int:
        return len(self.trace.tokens)


def rounds(policy: StoppingPolicy, trace: Trace, eos: Set[int], clock: Clock | None = None) -> Iterator[Round]:
    """Yield every round that `specctl.decoding.loop.decode` would have played, with the times that a clock gives them.

    In greedy decoding they are the very same: the target's text is fixed, so a round is settled by where it starts and
    when the policy stops. When sampling they are one run's worth in law. At every place the target's token x, the
    draft's proposal y and its verdict are drawn jointly, x first: y = x and kept with probability min(1, q(x) / p(x)),
    else y from max(q - p, 0) and refused. That is the joint law of drafting y, tossing the coin min(1, p(y) / q(y)) and
    drawing x from max(p - q, 0) after a refusal, so whichever places a policy drafts at, its rounds have the law of a
    live run, and a place it leaves to the target has the law p.
    """
    policy.reset()
    tokens, start, index = trace.tokens, 0, 0
    while start < len(tokens):
        threshold = policy.current_threshold
        steps, stop = draft_phase(policy, trace.limit - start - 1, eos, partial(trace.step, start))
        accepted = min(len(steps), trace.runs[start])
        full = accepted == len(steps)
        ended = full and bool(steps) and steps[-1].token in eos
        extra = None if ended else tokens[start + accepted]
        kind = None if ended else ExtraToken.BONUS if full else ExtraToken.CORRECTION
        draft_seconds, verify_seconds = clock(trace.prompt_tokens + start, len(steps)) if clock else (0.0, 0.0)
        round_ = Round(
            index=index,
            steps=tuple(steps),
            accepted=accepted,
            extra=extra,
            extra_kind=kind,
            stop=stop if policy.drafts else None,
            threshold=threshold,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            total_seconds=draft_seconds + verify_seconds,
            chances=None if trace.chances is None else tuple(trace.chances[start : start + accepted + (not full)]),
        )
        policy.observe(round_)
        yield round_
        start += accepted + (not ended)
        index += 1


def replay(policy: StoppingPolicy, traces: Iterable[Trace], eos: Set[int], clock: Clock | None = None) -> list[Replay]:
    """Play a policy on each sequence in turn; what it carries over goes from one to the next, as it does live."""
    replays = []
    for trace in traces:
        starts, drafted, accepted = [], [], []
        start = 0
        for round_ in rounds(policy, trace, eos, clock):
            starts.append(start)
            drafted.append(round_.drafted)
            accepted.append(round_.accepted)
            start += round_.accepted + (round_.extra is not None)
        replays.append(Replay(trace, starts, drafted, accepted))
    return replays


def oracle(trace: Trace) -> Replay:
    """The rounds of a policy that knows where the target will disagree (SpecDec++, arXiv 2405.19715, Theorem 4.1).

    It drafts exactly up to each disagreement: nothing is discarded, and the target passes are the fewest possible.
    """
    starts, drafted = [], []
    start = 0
    while start < len(trace.tokens):
        # The last place is the verifier's own, unless the draft ends the sequence there.
        length = min(trace.runs[start], max(0, trace.limit - start - 1))
        starts.append(start)
        drafted.append(length)
        start += length + 1
    return Replay(trace, starts, drafted, drafted)
