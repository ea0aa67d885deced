"""A policy of another distribution at work: what it raises is told as its fault."""

from collections.abc import Callable
from typing import TypeVar

from specctl.plugins import PluginError
from specctl.policies.base import Signal, StoppingPolicy
from specctl.records import DraftStep, Round

Answer = TypeVar("Answer")
UNDRAWN: frozenset[Signal] = frozenset({"entropy", "top_prob"})
"""The signals that do not depend on the drawn token."""
NO_TOKEN = -1


class RegisteredPolicy:
    """A `StoppingPolicy` around one whose code is not the program's.

    Args:
        policy: decides.
        what: names it and its distribution, in messages.

    A policy that drops the token at which it stops is not shown that token, nor anything that depends on it: that would
    bias what is written (docs/exactness.md).

    Raises:
        PluginError: every method, where the policy raises an exception or gives something else than it should.
    """

    def __init__(self, policy: StoppingPolicy, what: str) -> None:
        self.policy = policy
        self._what = what
        self.signals: frozenset[Signal] = policy.signals
        self.keep_trigger = policy.keep_trigger
        self.drafts = policy.drafts
        if not self.keep_trigger and (drawn := sorted(self.signals - UNDRAWN)):
            error = ValueError(f"{', '.join(drawn)} may not be read by a policy that drops the token at which it stops")
            raise PluginError(what, "keep_trigger", error)

    @property
    def current_threshold(self) -> float | None:
        return self._asked("current_threshold", lambda: self.policy.current_threshold)

    def reset(self) -> None:
        self._asked("reset", self.policy.reset)

    def draft_limit(self) -> int:
        return self._asked("draft_limit", self._limit)

    def _limit(self) -> int:
        limit = self.policy.draft_limit()
        if type(limit) is not int or limit < 0:
            raise TypeError(f"{limit!r} is not a number of tokens")
        return limit

    def should_stop(self, step: DraftStep) -> bool:
        undrawn = DraftStep(step.index, NO_TOKEN, entropy=step.entropy, top_prob=step.top_prob)
        seen = step if self.keep_trigger else undrawn
        return bool(self._asked("should_stop", lambda: self.policy.should_stop(seen)))

    def observe(self, round_: Round) -> None:
        self._asked("observe", lambda: self.policy.observe(round_))

    def _asked(self, name: str, question: Callable[[], Answer]) -> Answer:
        try:
            return question()
        except Exception as error:
            raise PluginError(self._what, name, error) from error
