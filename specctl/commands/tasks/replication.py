"""The flags about replicas, and replicas started as they say."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from specctl.commands.grouped_command import But, option
from specctl.commands.options import warn
from specctl.errors import UsageError
from specctl.terminal.output import tell

if TYPE_CHECKING:
    from specctl.batching.row_count import Batch
    from specctl.profile import Profile
    from specctl.profile.schema import DraftTable
    from specctl.replicas.replica import Replicas
    from specctl.terminal.progress import TerminalProgress

PANEL = "Replicas"
PLACES = 16
"""Questions that each replica gets at once where it decides itself how many it answers."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Replicas of the pair."""

    panel = PANEL
    workers: str | None = option(
        "Replicas of the pair, each with GPUs or cores of its own. auto: as many as the GPUs hold, else one per core.",
        "N|auto",
    )
    cluster: str | None = option(
        "Place the replicas on a Ray cluster: auto, HOST:PORT or ray://HOST:PORT. auto: the one that runs here, else "
        "a new one on this machine.",
        "ADDRESS",
    )
    keep_warm: str | None = option(
        "Keep the replicas in the cluster, such as for 30m, for the next command with this profile.",
        "DURATION",
    )

    batch: str | None = option(
        "Records per forward pass. auto: as many as memory allows and make it faster.",
        "N|auto",
    )

    @property
    def rows(self) -> "Batch | None":
        """What --batch asks for; None without it. Raises UsageError for another word."""
        if self.batch is None:
            return None
        if self.batch == "auto":
            return "auto"
        if not (self.batch.isdecimal() and int(self.batch)):
            raise UsageError(f"--batch needs a number or auto, not {self.batch}", "e.g. --batch 8")
        return int(self.batch)

    def check_one(self) -> None:
        """Raise UsageError where a value is none, or replicas are asked for and rows, which this process has."""
        if self.replication is not None and self.rows not in (None, 1):
            raise UsageError("--batch is for texts of one process, and --workers starts several", "leave one out")

    @property
    def replication(self) -> "Replication | None":
        """What they ask for; None without any of them.

        Raises:
            UsageError: a value is none, or --keep-warm stands without --cluster.
        """
        workers = self.workers
        if self.keep_warm is not None and self.cluster is None:
            raise UsageError("--keep-warm needs a cluster that outlives this command", "add --cluster, or leave it out")
        if workers is None and self.cluster is None:
            return None
        if workers not in (None, "auto") and not (workers.isdecimal() and int(workers)):
            raise UsageError(f"--workers needs a number or auto, not {workers}", "e.g. --workers 4")
        count: int | Literal["auto"] = "auto" if workers in (None, "auto") else int(workers)
        return Replication(count, self.cluster, 0.0 if self.keep_warm is None else _seconds(self.keep_warm))


def batch_sizes(text: str | None) -> "tuple[Batch, list[int]]":
    """How many texts are answered at once, and the numbers of texts that a calibration is for besides one.

    Raises:
        UsageError: the text is no list of numbers, nor ``auto``.
    """
    if text is None or "," not in text:
        rows = ReplicaOptions(batch=text).rows or 1
        return rows, [] if rows == "auto" or rows == 1 else [rows]
    sizes = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in sizes):
        raise UsageError(f"--batch needs numbers with commas, not {text}", "e.g. --batch 1,4,16")
    numbers = sorted({int(part) for part in sizes} - {1})
    return max([1, *numbers]), numbers


FewReplicaOptions = Annotated[ReplicaOptions, But(("keep_warm",))]
"""Of a command whose replicas end with it."""
BareReplicaOptions = Annotated[ReplicaOptions, But(("keep_warm", "batch"))]
"""Of one that has a --batch of its own."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Replication:
    """What the flags ask for.

    Attributes:
        workers: how many replicas.
        cluster: where Ray is; None for processes of this machine.
        warm_seconds: how long replicas stay in the cluster without work; 0 to end them with the command.
    """

    workers: int | Literal["auto"]
    cluster: str | None = None
    warm_seconds: float = 0.0

    @contextmanager
    def start(
        self,
        profile: "Profile",
        maker: str,
        setup: Mapping[str, Any],
        progress: "TerminalProgress",
        expected_tokens: int | None = None,
        *,
        others: "Iterable[DraftTable]" = (),
        spare: bool = False,
        exclusive: bool = False,
        batch: "Batch" = 1,
        places: int | None = None,
    ) -> "Iterator[Replicas]":
        """Start replicas, and wait until the first of them is ready.

        Args:
            profile: of the pair.
            maker: as in `specctl.replicas.job.Job`.
            setup: of the job, without the profile and its share of the tokens.
            progress: shows that they are starting.
            expected_tokens: number of tokens to generate in all, 0 if unknown; None for a job that does not ask.
            others: drafts and heads that are loaded besides the profile's.
            spare: whether this process has loaded a pair itself: where there are more GPUs, those stay its own.
            exclusive: whether nothing may share a replica's devices, because it measures time.
            batch: how many questions each answers at once; then its job is told so too.
            places: the most that each is asked at once; by default as many as that.

        Raises:
            UsageError: they do not fit on this machine, or Ray is missing or not there.
            SpecctlError: they cannot be loaded, or are not here.
        """
        from specctl.replicas.job import Job
        from specctl.replicas.local import LocalReplicas
        from specctl.replicas.model_sources import Sources
        from specctl.replicas.replica import started
        from specctl.replicas.shares import gpus_here, gpus_needed, require_gpus, shares

        with progress.doing("reading the models' files"):
            sources = Sources.of(profile, others)

        def job(count: int) -> Job:
            shared: dict[str, Any] = {} if batch == 1 else {"batch": batch}
            if expected_tokens is not None:
                shared["expected_tokens"] = -(-expected_tokens // count)
            return Job(maker, {"profile": profile, **setup, **shared}, frozenset({"expected_tokens", "quiet"}), sources)

        replicas: Replicas
        if places is None:
            places = PLACES if batch == "auto" else batch
        if self.cluster is not None:
            from specctl.replicas.on_ray import RayReplicas

            with progress.doing("connecting to Ray"):
                replicas = RayReplicas.on(
                    self.cluster,
                    self.workers,
                    profile,
                    job,
                    warn,
                    self.warm_seconds,
                    exclusive=exclusive,
                    places=places,
                )
        else:
            gpus = gpus_here()
            needed = gpus_needed(profile, len(gpus))
            if exclusive:
                require_gpus(profile, len(gpus))
            each = shares(self.workers, profile, gpus[needed:] if spare and len(gpus) >= 2 * needed else gpus)
            if exclusive and not all(share.gpus and share.alone for share in each):
                raise UsageError(
                    f"{len(each)} replicas would share {len(gpus)} GPUs, and times would be those of sharing",
                    f"use --workers {max(1, len(gpus) // needed)}, or leave it out",
                )
            # Who shares a GPU must see what the one before has taken; what is compiled or fetched is so only once.
            one_by_one = not all(share.alone for share in each) or profile.compile is True
            environments = [share.environment for share in each]
            replicas = LocalReplicas(job(len(each)), environments, tell, warn, one_by_one=one_by_one, places=places)
        with replicas:
            with progress.doing("starting replicas"):
                started(replicas)
            yield replicas


def _seconds(duration: str) -> float:
    """The seconds of a duration such as ``90s``, ``30m``, ``2h`` or ``1d``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", duration)
    if found is None or not float(found[1]):
        raise UsageError(f"--keep-warm {duration} is not a duration", "e.g. --keep-warm 30m")
    return float(found[1]) * _SECONDS[found[2]]
