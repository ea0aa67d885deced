"""Speculative decoding: draft, verify, repeat."""

from collections.abc import Generator, Sequence, Set

from specctl.decoding.draft import Drafter
from specctl.decoding.draws import DrawGenerator
from specctl.decoding.parallel import ParallelDrafter, ParallelRounds
from specctl.decoding.round import NOTHING, prefill, verified_round
from specctl.decoding.sampling import Sampling
from specctl.models.running.slot import Slot
from specctl.records import Round


def read_prompt(target: Slot, drafter: Drafter | None, prompt: Sequence[int]) -> None:
    """Have drafts cache all but the last token of the prompt before `decode`.

    The target reads the prompt in the pass that verifies the first draft. A draft head needs the target's states first,
    so for it the target reads the prompt here. Where the target must read prompts whole, its head starts in the second
    round.
    """
    if drafter is None:
        return
    if drafter.observed is None:
        drafter.prefill(prompt)
    elif drafter.starts() and not target.whole_prompts:
        prefill(target, drafter, prompt)
    else:
        target.rollback(drafter.observed)  # reading the first tokens again gives their states


def decode(
    target: Slot,
    drafter: Drafter | None,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    eos: Set[int] = frozenset(),
    generator: DrawGenerator | None = None,
    logprobs: int | None = None,
) -> Generator[Round, None, None]:
    """Yield rounds until an end-of-sequence token or ``max_new_tokens``, exactly in the target's distribution.

    The caches may hold any prefix of the prompt. A `ParallelDrafter` runs a thread that ends with the generator; a
    caller that does not take all rounds should close the generator. Where a pass also reads the rest of the prompt, its
    time is divided by tokens, and the first round's time covers only its own tokens.

    Args:
        target: the verifier.
        drafter: drafts for it; without one every round is one target token.
        prompt: at least one id.
        max_new_tokens: at least 1; never exceeded.
        sampling: how tokens are drawn.
        eos: ids that end the sequence.
        generator: for the verifier's draws, on the target's device.
        logprobs: see `verified_round`.
    """
    sequence, target = list(prompt), sampling.over(target, decides=True)
    end = len(sequence) + max_new_tokens
    target.rollback(len(sequence) - 1)  # the last token must run again for its logits
    if drafter is not None:
        drafter.rollback(len(sequence) - 1)
        drafter.begin(sampling, eos, generator)
    unread = len(sequence) - 1 - target.length
    if isinstance(drafter, ParallelDrafter):
        yield from ParallelRounds(target, drafter, prompt, end, sampling, eos, generator, unread, logprobs)
        return
    index = rest = rested = 0
    nothing = NOTHING
    try:
        while len(sequence) < end:
            # One position is left for the verifier's own token.
            budget = end - len(sequence) - 1
            if unread and target.whole_prompts and drafter is not None and drafter.observed is not None:
                budget = 0  # the states that a head drafts from do not exist yet
            resting = rested < rest
            round_ = verified_round(
                target,
                drafter,
                sequence,
                budget,
                sampling,
                eos,
                generator,
                index=index,
                unread=unread,
                logprobs=logprobs,
                draft=nothing if resting else None,
            )
            sequence += round_.emitted
            index, unread = index + 1, 0
            rested += resting
            if rested == rest and drafter is not None and not round_.steps:
                if rest:
                    drafter.rested(rest)
                rest, rested = drafter.rests(), 0
                if rest:
                    nothing = drafter.draft(sequence, 0)
            yield round_
            if sequence[-1] in eos:
                return
    finally:
        if rest and drafter is not None:
            drafter.rested(rested)
