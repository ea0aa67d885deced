"""A replica that traces prompts for `specctl calibrate`. Torch is imported when the function runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specctl.commands.tasks.pair_loading import load

if TYPE_CHECKING:
    from specctl.profile import Profile
    from specctl.replicas.job import Answer

REPLICA = "specctl.commands.tasks.trace_replica:replica"
"""What makes such a replica, as `specctl.replicas.job.Job` names it."""


def replica(*, number: int, profile: "Profile", heads: Sequence[str], depth: int, foreign_head: bool) -> "Answer":
    """A replica for `specctl.replay.recording.collecting.collect_traces`.

    Args:
        number: from 0; no replica says what the command has said already.
        profile, heads, depth: as in `collect_traces`.
        foreign_head: as in `load`.
    """
    del number
    from rich.console import Console

    console = Console(stderr=True, quiet=True)
    named = [list(heads)] if heads else None
    pair = load(profile, console, heads=named, foreign_head=foreign_head, quiet=True)

    from specctl.replay.recording.collecting import replica_of

    return replica_of(pair, profile, depth)
