"""A draft in a chain with a lookup, on a trace. No torch here."""

from collections.abc import Callable, Set
from typing import NamedTuple

from specctl.decoding.copying.chaining import Chaining, with_copy
from specctl.errors import UsageError
from specctl.policies import StoppingPolicy
from specctl.records import DraftStep, Round, StopReason
from specctl.replay.recorded import Recorded
from specctl.replay.traces import Trace


class Block(NamedTuple):
    """A drafted block: tokens, why it ended, the policy's threshold, inner rounds, and how many tokens are copied."""

    steps: list[DraftStep]
    stop: StopReason
    threshold: float | None
    inner: list[Round]
    copied: int = 0


class ChainedReplay:
    """The rounds of a draft in a chain with a lookup, as `specctl.decoding.copying.chained` plays them.

    Args:
        chaining: keeps for the next text what it learned, as the policy does.
        policy: of the model.
        drafting: drafts with the model: its arguments are what is recorded, where the block starts, and the budget.
        trace: with its prompt.
        eos: ids that end the sequence.

    Raises:
        UsageError: the trace lacks the prompt.
    """

    def __init__(
        self,
        chaining: Chaining,
        policy: StoppingPolicy,
        drafting: Callable[[Recorded, int, int], Block],
        trace: Trace,
        eos: Set[int],
    ) -> None:
        if len(trace.prompt_ids) != trace.prompt_tokens:
            raise UsageError(
                "the trace holds no prompts, which a lookup copies from", "record it again, with another --output"
            )
        self._chaining, self._policy, self._drafting, self._eos = chaining, policy, drafting, eos
        self._text = [*trace.prompt_ids, *trace.tokens]
        self._prompt_tokens = trace.prompt_tokens
        self._asked = False
        chaining.rollback(0)
        chaining.read_prompt(trace.prompt_ids[:-1])
        chaining.begin()

    def draft(self, draft: Recorded, start: int, budget: int) -> Block:
        """A block of at most ``budget`` tokens that starts at a position."""
        chaining, policy = self._chaining, self._policy
        written = self._text[chaining.length : self._prompt_tokens + start]
        room = draft.room(start, 1)
        copied = chaining.instead(written, budget, model=lambda: policy.draft_limit() > 0 and room > 0)
        self._asked = not copied
        block = Block([], StopReason.POLICY, policy.current_threshold, [])
        if self._asked:
            block = self._drafting(draft, start, budget)
            copied = chaining.behind([step.token for step in block.steps], block.stop, budget)
        if not copied:
            return block
        steps, stop = with_copy(block.steps, copied, budget, self._eos)
        return block._replace(steps=list(steps), stop=stop, copied=len(steps) - len(block.steps))

    def observe(self, round_: Round) -> None:
        """Learn from a round, and let the policy do so if it had a part in it."""
        self._chaining.observe(round_)
        if self._asked:
            self._policy.observe(self._chaining.of_model(round_))
