"""Loads what a server answers with: here, or in replicas. Torch is imported when a function runs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from specctl.commands.options import warn
from specctl.commands.tasks.record_answerer import load_answering
from specctl.commands.tasks.replication import Replication

if TYPE_CHECKING:
    from specctl.batching.row_count import Batch
    from specctl.models.running.pair import Pair
    from specctl.models.running.passes import Passes
    from specctl.profile import Profile
    from specctl.replicas.local import LocalReplicas
    from specctl.serving.workers.replica_writer import ReplicaWriter
    from specctl.serving.workers.replicated_pair import ReplicatedPair
    from specctl.terminal.progress import TerminalProgress

REPLICA = "specctl.commands.tasks.served_pair:replica"
"""What makes a replica that writes a server's texts, as `specctl.replicas.job.Job` names it."""


@dataclass(frozen=True, slots=True)
class ServedPair:
    """A loaded pair and its passes.

    Attributes:
        pair: loaded models.
        profile: how they are used, with the draft that is at work.
        passes: over as many texts as are written at once; None for one at a time.
    """

    pair: "Pair"
    profile: "Profile"
    passes: "Sequence[Passes] | None"


def load_served(
    profile: "Profile", batch: "Batch", progress: "TerminalProgress", *, quiet: bool, foreign_head: bool
) -> ServedPair:
    """Load a pair, and find how many texts it writes at once.

    Args:
        profile: names the models and how they are used.
        batch: so many texts at once.
        progress: shows what is loaded.
        quiet: show only warnings.
        foreign_head: as in `specctl.commands.tasks.pair_loading.load`.
    """
    from specctl.batching.row_count import MOST, chosen_passes

    loaded = load_answering(profile, progress, quiet=quiet, traced=False, foreign_head=foreign_head, expected_tokens=0)
    pair, profile = loaded.pair, loaded.profile
    limit = profile.sampling.max_new_tokens
    settings = [] if profile.draft is None else [profile.draft.setting]
    with progress.doing("choosing how many texts are written at once"):
        passes = chosen_passes(pair, batch, MOST if batch == "auto" else batch, limit, settings, warn)
    return ServedPair(pair, profile, passes)


@contextmanager
def replicated(
    replication: Replication,
    profile: "Profile",
    name: str,
    batch: "Batch",
    progress: "TerminalProgress",
    *,
    quiet: bool,
    foreign_head: bool,
) -> "Iterator[ReplicatedPair]":
    """Replicas of a pair, which end behind the block.

    Args:
        replication: how many.
        profile, batch, progress, quiet, foreign_head: as of `load_served`, for each of them.
        name: what clients call the pair.

    Raises:
        UsageError: they do not fit on this machine.
        ModelError: they cannot be loaded, or end while they load.
    """
    from functools import cache

    from specctl.batching.row_count import MOST
    from specctl.errors import ModelError
    from specctl.models.files.tokenizer import BareTokenizer, Tokenizer
    from specctl.replicas.job import ReplicaError
    from specctl.serving.workers.replicated_pair import ReplicatedPair

    @cache
    def whole() -> Tokenizer:
        from specctl.models.loading.model import load_tokenizer

        return load_tokenizer(profile.target)

    places = MOST if batch == "auto" else batch
    setup = {"quiet": quiet, "foreign_head": foreign_head, "name": name}
    try:
        with replication.start(profile, REPLICA, setup, progress, batch=batch, places=places) as started:
            replicas = cast("LocalReplicas", started)
            facts = replicas.about
            tokenizer = whole() if facts.spelling is None else BareTokenizer(facts.spelling, whole)
            yield ReplicatedPair(replicas, replicas.count // places, tokenizer, facts)
    except ReplicaError as error:
        raise ModelError(error.message, "Fewer --workers need less memory.") from error


def replica(
    *, number: int, profile: "Profile", quiet: bool, foreign_head: bool, name: str, batch: "Batch" = 1
) -> "ReplicaWriter":
    """A replica of the pair that writes a server's texts.

    Args:
        number: from 0; the first one alone says what all have to say.
        profile, quiet, foreign_head, batch: as of `load_served`.
        name: what clients call the pair.
    """
    from rich.console import Console

    from specctl.serving.workers.replica_writer import ReplicaWriter
    from specctl.terminal.progress import TerminalProgress

    silent = TerminalProgress(Console(stderr=True), False)
    served = load_served(profile, batch, silent, quiet=quiet or number > 0, foreign_head=foreign_head)
    return ReplicaWriter(served.pair, served.profile, name, served.passes, warn)
