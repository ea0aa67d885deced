"""A draft without what is trained for it."""

from specctl.profile.schema import DraftTable, PolicyTable


def without_head(draft: DraftTable) -> DraftTable:
    """The draft without its acceptance head; a policy that reads one is replaced by ``constant``."""
    policy = PolicyTable(name="constant") if draft.policy.setting.needs_head else draft.policy
    return draft.model_copy(update={"policy": policy, "head": None})
