"""The drafting phase: a policy asked after each proposed token, or after each pre-verified part of a block."""

from collections.abc import Callable, Set

from specctl.policies.base import StoppingPolicy
from specctl.records import DraftStep, Round, StopReason


def draft_phase(
    policy: StoppingPolicy, budget: int, eos: Set[int], propose: Callable[[int], DraftStep]
) -> tuple[list[DraftStep], StopReason]:
    """Collect tokens until the policy, its limit, the budget or an end of sequence ends the phase.

    Live drafting and replay both run this, so that they cannot disagree.

    Args:
        policy: asked after each token.
        budget: the most tokens that still fit.
        eos: ids that end the sequence.
        propose: the token of a place in the round, from 1 on; called once for each place, in order.

    Returns:
        The tokens to verify, and why drafting ended.
    """
    limit = policy.draft_limit()
    steps: list[DraftStep] = []
    for index in range(1, min(limit, budget) + 1):
        step = propose(index)
        stops = policy.should_stop(step)
        if stops and not policy.keep_trigger:
            # Whatever the token is: keeping only an end of sequence would favour it.
            return steps, StopReason.POLICY
        steps.append(step)
        if step.token in eos:
            return steps, StopReason.EOS
        if stops:
            return steps, StopReason.POLICY
    return steps, StopReason.MAX_DRAFT if limit <= budget else StopReason.BUDGET


def collect_phase(
    policy: StoppingPolicy,
    once: bool,
    budget: int,
    eos: Set[int],
    pre_verify: Callable[[int, int, int], tuple[Round, list[DraftStep]]],
) -> tuple[list[DraftStep], StopReason, list[Round]]:
    """Collect a block from inner rounds until the policy, its limit, the budget or an end of sequence ends the phase.

    The counterpart of `draft_phase` for a draft that is itself a verifier, run live and in replay alike.

    Args:
        policy: asked about each token that an inner round adds, in order.
        once: end after one inner round; the policy then only limits the block.
        budget: the most tokens that still fit.
        eos: ids that end the sequence.
        pre_verify: plays the inner round of an index, whose first token takes a place in the block (from 1 on) and
            whose drafter may write so many tokens; gives it back with the tokens it adds, at least one.

    Returns:
        The tokens to verify, why collecting ended, and the inner rounds.
    """
    limit = policy.draft_limit()
    stop = StopReason.MAX_DRAFT if limit <= budget else StopReason.BUDGET
    limit = min(limit, budget)
    steps: list[DraftStep] = []
    inner: list[Round] = []
    while len(steps) < limit:
        # One place is left for the verifying draft's own token.
        round_, added = pre_verify(len(inner), len(steps) + 1, limit - len(steps) - 1)
        inner.append(round_)
        steps.extend(added)
        trigger = None if once else next(filter(policy.should_stop, added), None)
        if trigger is not None and not policy.keep_trigger:
            del steps[trigger.index - 1 :]
            return steps, StopReason.POLICY, inner
        if steps[-1].token in eos:
            return steps, StopReason.EOS, inner
        if trigger is not None or (once and len(steps) < limit):
            return steps, StopReason.POLICY, inner
    return steps, stop, inner
