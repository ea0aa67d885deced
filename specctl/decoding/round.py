"""One round of speculative decoding: draft, extend, verify, correct, record.

The target and every verifying draft of a hierarchy use the same function.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from specctl.decoding.draft import Draft, Drafted, Drafter
from specctl.decoding.draws import DrawGenerator
from specctl.decoding.logits.judging import judge, judge_of, logits_of
from specctl.decoding.logits.logits import Verdict
from specctl.decoding.sampling import Sampling
from specctl.decoding.trees import DraftTree, verify_tree
from specctl.models.passes.forward import Forward, Numbers
from specctl.models.passes.preparation_time import working_seconds
from specctl.models.passes.watching import cut_states
from specctl.models.running.slot import Slot
from specctl.records import Round

NOTHING = Draft([], None, (), None)

ReadPass = Callable[[Forward, Numbers | None, Sequence[int]], None]
"""Called with the verifier's pass over K draft tokens (K + 1 rows), its distributions ``(K + 1, V)``
(None when greedy), and the n tokens that the round emits, whose positions are the first n rows."""


def prefill(verifier: Slot, drafter: Drafter | None, sequence: Sequence[int], *, begins: bool = True) -> None:
    """Cache all but the last token of the prompt, so that every round's pass is short.

    Args:
        verifier: verifies the drafts.
        drafter: None without drafts.
        sequence: the prompt.
        begins: see `Drafter.prefill`.
    """
    if drafter is not None and drafter.observed is not None:
        verifier.rollback(drafter.observed)  # the drafter lacks the states of the positions after
    _catch_up(verifier, drafter, sequence)
    if drafter is not None:
        drafter.prefill(sequence, begins=begins, first=False)


def _catch_up(verifier: Slot, drafter: Drafter | None, sequence: Sequence[int]) -> None:
    """Have the verifier cache all but the last token."""
    start = verifier.length
    if pending := sequence[start:-1]:
        forward = verifier.extend(pending, keep=0)
        if drafter is not None and forward.states is not None:
            drafter.observe_states(start, forward.states)


def verified_round(
    verifier: Slot,
    drafter: Drafter | None,
    sequence: Sequence[int],
    budget: int,
    sampling: Sampling,
    eos: Set[int],
    generator: DrawGenerator | None,
    *,
    index: int,
    read: ReadPass | None = None,
    hidden: bool = False,
    chances: bool = True,
    unread: int = 0,
    logprobs: int | None = None,
    draft: Draft | None = None,
) -> Round:
    """Draft a block after ``sequence``, verify it in one pass, and leave all caches at the accepted prefix.

    Args:
        verifier: the verifier; its cache may hold any shorter prefix of the sequence.
        drafter: writes the block and then observes the round; without one the round is one token of the verifier's.
        sequence: at least one id.
        budget: the most tokens to draft.
        sampling: how tokens are drawn.
        eos: ids that end the sequence; after an accepted one the verifier adds no token.
        generator: for the verifier's draws, on its device.
        index: of the round.
        read: reads the verifier's pass, and its time counts as verification. Not for trees.
        hidden: whether ``read`` needs the verifier's hidden states.
        chances: whether the round records `Round.chances`.
        unread: the number of prompt tokens that the verifier reads with the draft, see `share_of_round`.
        logprobs: how many of the most probable ids `Round.logprobs` has for each token; None for no logprobs.
        draft: the drafter's block if it exists already; the drafter then does not observe the round.
    """
    began, resting = working_seconds(), draft is not None
    if draft is None:
        draft = drafter.draft(sequence, budget) if drafter is not None else NOTHING
    drafted = working_seconds()
    if draft.parents is not None and draft.steps:
        found = _verified_tree(verifier, drafter, draft, sequence, sampling, eos, generator)
    else:
        found = _verified_chain(verifier, draft, sequence, sampling, generator, hidden)
    verdict = found.verdict
    assert verdict.extra is not None, "the pass has read the place after the draft"
    ended = bool(found.accepted) and found.accepted[-1] in eos
    if read is not None:
        read(found.forward, found.probs, found.accepted if ended else [*found.accepted, verdict.extra])
    drafting, verifying = drafted - began - draft.prompt_seconds, working_seconds() - drafted
    if unread:
        verifying *= share_of_round(unread, 1 + len(draft.tokens))
    round_ = Round(
        index=index,
        steps=draft.steps,
        accepted=verdict.accepted,
        extra=None if ended else verdict.extra,
        extra_kind=None if ended else verdict.kind,
        stop=draft.stop,
        threshold=draft.threshold,
        draft_seconds=drafting,
        verify_seconds=verifying,
        total_seconds=drafting + verifying,
        inner=draft.inner,
        chances=verdict.chances if chances else None,
        tree=found.tree,
        path=tuple(found.accepted) if found.tree else (),
        context=len(sequence),
        copied=draft.copied,
    )
    if logprobs is not None:
        path = None if isinstance(found.rows, slice) else found.rows
        round_ = with_logprobs(round_, found.forward, path, logprobs)
    if isinstance(found.rows, slice):
        verifier.rollback(found.start + found.rows.stop)
    else:
        verifier.keep_path(found.rows)
    if drafter is not None:
        if (states := cut_states(found.forward.states, found.rows)) is not None:
            drafter.observe_states(found.start, states)
        if not resting:
            drafter.observe(round_)
    return round_


def with_logprobs(round_: Round, forward: Forward, path: Sequence[int] | None, most: int) -> Round:
    """A round with its `Round.logprobs`, from the verifying pass.

    Args:
        round_: of n emitted tokens.
        forward: the verifier's.
        path: the rows that the tokens were drawn from, at least n; None for the first n.
        most: how many of the most probable ids to include.
    """
    rows = forward if path is None else Forward(forward.rows[path])
    return replace(round_, logprobs=logits_of(rows).logprobs(round_.emitted, most))


def share_of_round(unread: int, read: int) -> float:
    """The round's share of a verification's time.

    Where the verifier reads the prompt with its first draft, the time is divided by tokens.

    Args:
        unread: the number of prompt tokens without the last one.
        read: the number of tokens in the pass that later rounds read too.
    """
    return read / (unread + read)


class Verified(NamedTuple):
    """A draft after a verifier's pass."""

    start: int  # the number of tokens cached before the pass
    forward: Forward  # the pass
    verdict: Verdict  # the verdict on the draft
    accepted: Sequence[int]  # ids of the accepted tokens
    # the rows of accepted tokens in the pass: indices for a tree, the first ones for a chain
    rows: slice | list[int]
    probs: Numbers | None = None  # the verifier's distributions on a chain, see `ReadPass`
    tree: tuple[int, ...] = ()  # see `Round`


def _verified_chain(
    verifier: Slot,
    draft: Draft,
    sequence: Sequence[int],
    sampling: Sampling,
    generator: DrawGenerator | None,
    hidden: bool,
) -> Verified:
    start, count = verifier.length, len(draft.tokens)
    tokens = [*sequence[start:], *draft.tokens]
    if verifier.judges:
        about = Drafted(draft, generator)
        forward, (verdict, probs) = verifier.extend_judged(tokens, count + 1, judge_of(sampling), about, hidden=hidden)
    else:
        forward = verifier.extend(tokens, keep=count + 1, hidden=hidden)
        verdict, probs = judge(draft, forward, sampling, generator)
    rows = slice(len(sequence) + verdict.accepted - start)
    return Verified(start, forward, verdict, draft.tokens[: verdict.accepted], rows, probs)


def _verified_tree(
    verifier: Slot,
    drafter: Drafter | None,
    draft: Draft,
    sequence: Sequence[int],
    sampling: Sampling,
    eos: Set[int],
    generator: DrawGenerator | None,
) -> Verified:
    tree, levels = DraftTree(sequence[-1], draft), len(draft.steps)
    start, forward = _read_tree(verifier, drafter, sequence, tree)
    verdict, path = verify_tree(tree, levels, forward, sampling, eos, generator)
    accepted = [tree.tokens[number] for number in path[1:]]
    return Verified(start, forward, verdict, accepted, path, tree=tree.levels(levels))


def _read_tree(
    verifier: Slot, drafter: Drafter | None, sequence: Sequence[int], tree: DraftTree
) -> tuple[int, Forward]:
    """The pass over a tree with the sequence's last token as its root, and the number of tokens cached before it."""
    _catch_up(verifier, drafter, sequence)
    start = verifier.length
    return start, verifier.extend_tree(tree.tokens, tree.parents)
