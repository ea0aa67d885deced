"""Policies that decide for all texts of a batch at once."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from specctl.policies.base import Rule, StoppingPolicy


class JointRow(StoppingPolicy, Protocol):
    """The policy of one text of a batch, which asks in the middle of its `draft_limit` and `should_stop`.

    Attributes:
        joint: whom it asks.
        size: 1, its part in the time of an answer to several.
    """

    @property
    def joint(self) -> "Joint": ...

    @property
    def size(self) -> float: ...

    def forget(self) -> None:
        """Forget the text, and a limit that was asked for: the next text's prompt comes first, and then `reset`."""


class Joint(Protocol):
    """Decides how far each text of a batch drafts, once all that draft have asked.

    A batch's drafts wait for each other: a pass takes its time whoever takes part in it, and all are verified together.
    So what one more token costs depends on the others.
    """

    def row(self, ask: Callable[[Any], int]) -> JointRow:
        """The policy of one more text.

        Args:
            ask: called with that policy; waits for `run`, of which it gives the answer to it.
        """

    def run(self, rows: Sequence[Any], /) -> list[int]:
        """For each row that asks the most tokens that it drafts from here on, 0 for none."""


def joint_of(policy: StoppingPolicy) -> Joint | None:
    """What decides for a batch in the place of a policy for each row; None if each row's decides for itself."""
    return policy.joint() if isinstance(policy, Rule) else None
