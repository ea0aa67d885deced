"""Where the texts of a batch wait for what is decided about all of them."""

from collections.abc import Callable, Sequence
from typing import cast

from specctl.policies import Setting, StoppingPolicy
from specctl.policies.joint import Joint, JointRow, joint_of


class Decisions:
    """`Shared` of a hub: how far texts draft, decided when all that draft have asked.

    Its place in the hub's order is behind the drafts' passes and before the target's.
    """

    def __init__(self) -> None:
        self._joints: dict[Setting, tuple[Joint | None, set[int]]] = {}
        self._rows: dict[int, list[JointRow]] = {}

    def policy(self, setting: Setting, row: int, ask: Callable[[JointRow], int]) -> StoppingPolicy:
        """A new policy of a setting's top level for a row.

        Rows of one setting share what decides for them together. A row that asks again begins anew, and shares with
        those that do so too. In a chain each row decides for itself: a round of copies asks and teaches its policy
        nothing, and a decision for all would wait for what no row tells it.

        Args:
            setting: of one draft.
            row: the row.
            ask: of the hub, for these decisions.
        """
        joint, rows = self._joints.get(setting, (None, {row}))
        if row in rows:
            joint, rows = None if setting.lookup else joint_of(setting.build()), set()
            self._joints[setting] = joint, rows
        rows.add(row)
        if joint is None:
            return setting.build()
        policy = joint.row(ask)
        self._rows.setdefault(row, []).append(policy)
        return policy

    def begin(self, row: int) -> None:
        """A text begins in a row, whatever became of the one before it."""
        for policy in self._rows.get(row, ()):
            policy.forget()

    def run(self, rows: Sequence[JointRow]) -> list[int]:
        """As in `Shared`; an error is raised in all texts, for if each asked alone nobody would see that it was one."""
        try:
            return self._limits(rows)
        except Exception as error:
            return cast("list[int]", [error] * len(rows))

    def _limits(self, rows: Sequence[JointRow]) -> list[int]:
        joints = {id(row.joint): row.joint for row in rows}
        if len(joints) == 1:
            return rows[0].joint.run(rows)
        limits: dict[int, int] = {}
        for joint in joints.values():
            its = [row for row in rows if row.joint is joint]
            limits |= zip(map(id, its), joint.run(its), strict=True)
        return [limits[id(row)] for row in rows]
