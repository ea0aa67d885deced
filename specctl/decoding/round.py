"""One round of speculative decoding: draft, extend, verify, correct, record.

The loop over the target and every verifying draft of a hierarchy run the same function.
"""

from collections.abc import Callable, Sequence, Set
from time import perf_counter

import torch

from specctl.decoding.drafters import Draft, Drafter
from specctl.decoding.host import best_of
from specctl.decoding.leaves import LeafTree
from specctl.decoding.sampling import Sampling
from specctl.decoding.verification import Verdict, require_numbers, verify, verify_greedy
from specctl.models.running.runner import Forward, Runner
from specctl.models.running.trees import tree_runner
from specctl.models.running.watching import cut_states
from specctl.records import Round

NOTHING = Draft([], None, (), None)

ReadPass = Callable[[Forward, torch.Tensor | None, Sequence[int]], None]
"""Called with the verifier's pass over K draft tokens (K + 1 rows), the distributions ``(K + 1, V)`` behind the verdict
(None when greedy), and the n tokens that the round emits, whose positions are the first n rows."""


def prefill(verifier: Runner, drafter: Drafter | None, sequence: Sequence[int]) -> None:
    """Cache all but the last token of the prompt, so that every round's forward pass is a short one."""
    if drafter is not None and drafter.witnessed is not None:
        verifier.rollback(drafter.witnessed)  # it has not seen the states of the places behind
    _catch_up(verifier, drafter, sequence)
    if drafter is not None:
        drafter.prefill(sequence)


def _catch_up(verifier: Runner, drafter: Drafter | None, sequence: Sequence[int]) -> None:
    """Let the verifier cache all but the last token."""
    start = verifier.length
    if pending := sequence[start:-1]:
        forward = verifier.extend(pending, keep=0)
        if drafter is not None and forward.states is not None:
            drafter.witness(start, forward.states)


def verified_round(
    verifier: Runner,
    drafter: Drafter | None,
    sequence: Sequence[int],
    budget: int,
    sampling: Sampling,
    eos: Set[int],
    generator: torch.Generator | None,
    *,
    index: int,
    read: ReadPass | None = None,
    hidden: bool = False,
    chances: bool = True,
) -> Round:
    """Draft a block after ``sequence``, verify it in one pass, and leave all caches at the accepted prefix.

    Args:
        verifier: decides; its cache may hold any shorter prefix of the sequence.
        drafter: writes the block and then observes the round; without one the round is one token of the verifier's.
        sequence: at least one id.
        budget: the most tokens to draft.
        sampling: how tokens are drawn.
        eos: ids that end the sequence; after an accepted one the verifier adds no token.
        generator: for the verifier's draws, on its device.
        index: of the round.
        read: reads the verifier's pass; the time it takes belongs to the verification. Not for drafts with leaves.
        hidden: whether ``read`` needs the verifier's hidden states.
        chances: whether the round records `Round.chances`.
    """
    began = perf_counter()
    draft = drafter.draft(sequence, budget) if drafter is not None else NOTHING
    drafted = perf_counter()
    tree = LeafTree(sequence[-1], draft) if any(draft.leaves) else None
    if tree is not None:
        _catch_up(verifier, drafter, sequence)
    count, start = len(draft.tokens), verifier.length
    if tree is None:
        forward = verifier.extend([*sequence[start:], *draft.tokens], keep=count + 1, hidden=hidden)
        verdict, probs = judge(draft, forward, sampling, generator)
    else:
        forward = tree_runner(verifier).extend_tree(tree.tokens, tree.parents)
        verdict, probs = judge(draft, forward.part(slice(count + 1)), sampling, generator)
    ended = 0 < count == verdict.accepted and draft.tokens[-1] in eos
    own, leaf = verdict.extra, None
    assert own is not None, "the pass has read the place behind the draft"
    extra, kind = verdict.extra, verdict.kind
    place = None if tree is None or own in eos else tree.leaf(verdict.accepted, own)
    if place is not None:
        # The pass has read the verifier's token too, so the token after it is known.
        further, _ = judge(NOTHING, forward.part(slice(place, place + 1)), sampling, generator)
        extra, kind, leaf = further.extra, further.kind, own
    if read is not None:
        kept = draft.tokens[: verdict.accepted]
        read(forward, probs, kept if ended else [*kept, own])
    verified = perf_counter()
    round_ = Round(
        index=index,
        steps=draft.steps,
        accepted=verdict.accepted,
        extra=None if ended else extra,
        extra_kind=None if ended else kind,
        stop=draft.stop,
        threshold=draft.threshold,
        draft_seconds=drafted - began,
        verify_seconds=verified - drafted,
        total_seconds=verified - began,
        inner=draft.inner,
        chances=verdict.chances if chances else None,
        leaves=draft.leaves,
        leaf=leaf,
    )
    end = len(sequence) + verdict.accepted
    rows: slice | list[int] = slice(end - start)
    if tree is None:
        verifier.rollback(end)
    else:
        rows = [*range(end - start), *([place] if place is not None else [])]
        tree_runner(verifier).keep_path(rows)
    if drafter is not None:
        if (states := cut_states(forward.states, rows)) is not None:
            drafter.witness(start, states)
        drafter.observe(round_)
    return round_


def judge(
    draft: Draft, forward: Forward, sampling: Sampling, generator: torch.Generator | None
) -> tuple[Verdict, torch.Tensor | None]:
    """The verdict on K draft tokens, and the verifier's distributions behind it; None when greedy.

    Args:
        draft: the K tokens with their distributions.
        forward: the verifier's, with logits ``(K + 1, V)``; or ``(K, V)``, K > 0, where no token is to follow a draft
            that is kept as a whole.
        sampling: how tokens are drawn.
        generator: of the logits' device.

    Raises:
        RecordError: the logits hold NaN.
    """
    if sampling.greedy:
        choices, values = best_of(forward)
        require_numbers(*values)
        return verify_greedy(draft.tokens, choices), None
    probs = sampling.probs(forward.logits)  # (K + 1, V)
    tokens = torch.tensor(draft.tokens, dtype=torch.int64, device=probs.device)
    if draft.probs is None:
        draft_probs = torch.zeros_like(probs[: len(tokens)]).scatter_(1, tokens[:, None], 1.0)  # (K, V)
    else:
        draft_probs = draft.probs.to(probs.device)
    return verify(tokens, draft_probs, probs, generator, sampling.verification), probs
