"""The drafting phase: after each draft token, or each inner round, a policy decides whether to stop."""

from collections.abc import Callable, Set
from dataclasses import dataclass

from specctl.policies.base import StoppingPolicy
from specctl.records import DraftStep, Round, StopReason


def longest_draft(policy: StoppingPolicy, budget: int, longest: int | None = None) -> int:
    """The most tokens that the coming `draft_phase` may draw; for the arguments see there."""
    return min(_limit(policy, longest), budget)


def _limit(policy: StoppingPolicy, longest: int | None) -> int:
    return policy.draft_limit() if longest is None else min(policy.draft_limit(), longest)


def draft_phase(
    policy: StoppingPolicy,
    budget: int,
    eos: Set[int],
    draft_token: Callable[[int], DraftStep],
    longest: int | None = None,
) -> tuple[list[DraftStep], StopReason]:
    """Draft tokens until the policy, its limit, the budget or an end-of-sequence token stops the phase.

    Live drafting and replay both call this function, so they stop at the same tokens.

    Args:
        policy: decides after each token.
        budget: the most tokens that may be drafted.
        eos: ids that end the sequence.
        draft_token: returns the draft token at a position of the round; called once per position, in order from 1.
        longest: the most tokens that the draft can write in a round; None for no limit.

    Returns:
        The tokens to verify, and why drafting stopped.
    """
    limit = _limit(policy, longest)
    steps: list[DraftStep] = []
    for index in range(1, min(limit, budget) + 1):
        step = draft_token(index)
        stops = policy.should_stop(step)
        if stops and not policy.keep_trigger:
            # Even an end-of-sequence token is dropped: keeping it, and only it, would make it more probable.
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
    """Collect a block from inner rounds until the policy, its limit, the budget or an end-of-sequence token stops it.

    Used for a draft that itself verifies a faster draft. Live decoding and replay both call this function.

    Args:
        policy: decides about each token that an inner round adds, in order.
        once: stop after one inner round; the policy then only limits the length of the block.
        budget: the most tokens that the block may hold.
        eos: ids that end the sequence.
        pre_verify: runs one inner round and returns it with the tokens that it adds, at least one. Its arguments are
            the index of the round, from 0; the position of the round's first token in the block, from 1; and the most
            tokens that the faster draft may draft.

    Returns:
        The tokens to verify, why collecting stopped, and the inner rounds.
    """
    limit = policy.draft_limit()
    stop = StopReason.MAX_DRAFT if limit <= budget else StopReason.BUDGET
    limit = min(limit, budget)
    steps: list[DraftStep] = []
    inner: list[Round] = []
    while len(steps) < limit:
        # One position is reserved for the token that the verifying draft adds itself.
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


@dataclass(slots=True)
class TextRead:
    """How much of a text a draft has read, as its rounds show. A draft reads nothing before it is wanted.

    A draft that drafts in a text's first round has read the prompt. In a round without a draft it reads nothing, so the
    next draft begins by reading the missed tokens.
    """

    _read: int | None = None

    def missing(self, context: int) -> int:
        """How many tokens, besides those of the last round, a draft reads if it drafts after ``context`` tokens."""
        return 0 if self._read is None else max(0, context - self._read)

    def round(self, context: int, drafted: bool, emitted: int) -> int:
        """Record a round.

        Args:
            context: the number of tokens before the round, prompt included.
            drafted: whether anything was drafted.
            emitted: how many tokens it added to the text.

        Returns:
            The `missing` tokens that were read; 0 without a draft.
        """
        if self._read is None:
            self._read = context if drafted else 0
        if not drafted:
            return 0
        missing = self.missing(context)
        self._read = context + emitted
        return missing

    def replayed(self, context: int, own: int, accepted: int, *, wanted: bool) -> int:
        """`round` for a draft that may be in a chain; it has not read the other source's tokens.

        Args:
            context: see `round`.
            own: the number of tokens that it drafted itself.
            accepted: the number of accepted tokens, including the other source's.
            wanted: whether it would have drafted. If so it has read the prompt, even if the first round was a copy.
        """
        if self._read is None and wanted:
            self._read = context
        return self.round(context, own > 0, min(accepted, own) + 1)
