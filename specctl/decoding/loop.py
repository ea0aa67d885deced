"""Speculative decoding: draft, verify, repeat."""

from collections.abc import Iterator, Sequence, Set
from time import perf_counter

import torch

from specctl.decoding.drafters import Draft, Drafter
from specctl.decoding.sampling import Sampling
from specctl.decoding.verification import Verdict, verify, verify_greedy
from specctl.models.running.runner import Runner
from specctl.records import Round

NOTHING = Draft([], None, (), None)


def prefill(target: Runner, drafter: Drafter | None, sequence: Sequence[int]) -> None:
    """Cache all but the last token of the prompt, so that every round's forward pass is a short one."""
    if pending := sequence[target.length : -1]:
        target.extend(pending, keep=0)
    if drafter is not None:
        drafter.prefill(sequence)


def decode(
    target: Runner,
    drafter: Drafter | None,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    eos: Set[int] = frozenset(),
    generator: torch.Generator | None = None,
) -> Iterator[Round]:
    """Yield rounds until an end-of-sequence token or ``max_new_tokens``; the tokens follow the target's law exactly.

    The caches may hold any prefix of the prompt. Without a drafter every round is one target token.

    Args:
        target: the model that decides.
        drafter: writes ahead, or None.
        prompt: at least one id.
        max_new_tokens: at least 1; never exceeded.
        sampling: how tokens are drawn.
        eos: ids that end the sequence.
        generator: for the verifier's draws, on the target's device.
    """
    sequence = list(prompt)
    end = len(sequence) + max_new_tokens
    target.rollback(len(sequence) - 1)  # the last token must run again, for its logits
    if drafter is not None:
        drafter.rollback(len(sequence) - 1)
        drafter.begin(sampling, eos, generator)
    index = 0
    while len(sequence) < end:
        began = perf_counter()
        # One place is left for the verifier's own token.
        draft = drafter.draft(sequence, end - len(sequence) - 1) if drafter is not None else NOTHING
        drafted = perf_counter()
        pending = sequence[target.length :]
        logits = target.extend([*pending, *draft.tokens], keep=len(draft.tokens) + 1).logits  # (K + 1, V)
        verdict = judge(draft, logits, sampling, generator)
        verified = perf_counter()

        ended = verdict.accepted == len(draft.tokens) and bool(draft.tokens) and draft.tokens[-1] in eos
        round_ = Round(
            index=index,
            steps=draft.steps,
            accepted=verdict.accepted,
            extra=None if ended else verdict.extra,
            extra_kind=None if ended else verdict.kind,
            stop=draft.stop,
            threshold=draft.threshold,
            draft_seconds=drafted - began,
            verify_seconds=verified - drafted,
            total_seconds=verified - began,
            inner=draft.inner,
            chances=verdict.chances,
        )
        target.rollback(len(sequence) + verdict.accepted)
        if drafter is not None:
            drafter.observe(round_)
        sequence.extend(round_.emitted)
        index += 1
        yield round_
        if ended or verdict.extra in eos:
            return


def judge(
    draft: Draft, logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None
) -> Verdict:  # logits (K + 1, V)
    """Turn the verifier's logits into a verdict on the draft."""
    if sampling.greedy:
        return verify_greedy(draft.tokens, logits.argmax(-1).tolist())
    target_probs = sampling.probs(logits)
    tokens = torch.tensor(draft.tokens, dtype=torch.int64, device=logits.device)
    draft_probs = target_probs[:0] if draft.probs is None else draft.probs.to(logits.device)
    return verify(tokens, draft_probs, target_probs, generator)
