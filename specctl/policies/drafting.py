"""The drafting phase: a policy asked after each proposed token, whoever proposes them."""

from collections.abc import Callable, Set

from specctl.policies.base import StoppingPolicy
from specctl.records import DraftStep, StopReason


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
