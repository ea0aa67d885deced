"""Replicas as actors of a Ray cluster, which places them and starts them again; Ray is imported when they are made."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Self

from specctl.errors import SpecctlError, UsageError, reason
from specctl.profile.schema import Profile
from specctl.replicas.job import Answer, Job, ReplicaError, portable
from specctl.replicas.replica import MOST_FAILURES, Answered, Event, Lost
from specctl.replicas.shares import gpus_needed

NAMESPACE = "specctl"
MISSING = UsageError("--cluster needs Ray, which is not installed", 'pip install "specctl[ray]"')


class Actor:
    """One replica; the process of it that Ray starts makes it anew, and `begin` loads."""

    def __init__(self, job: Job, number: int, warm_seconds: float) -> None:
        self._job, self._number, self._warm = job, number, warm_seconds
        self._answer: Answer | None = None
        self._busy = threading.Lock()
        self._used = monotonic()
        if warm_seconds:
            threading.Thread(target=self._end_after_rest, name="rest", daemon=True).start()

    def begin(self) -> Exception | None:
        """Load, unless that was done; the error that kept it from it."""
        with self._busy:
            try:
                self._answer = self._answer or self._job.begin(self._number)
            except Exception as error:  # raised again where the replica was asked for
                return portable(error)
            finally:
                self._used = monotonic()
        return None

    def answer(self, question: Any) -> Any:
        """The answer to a question, or an exception in its place."""
        assert self._answer is not None, "a replica is asked before it is ready"
        with self._busy:
            try:
                return self._answer(question)
            except Exception as error:
                return portable(error)
            finally:
                self._used = monotonic()

    def watch(self) -> None:
        """Never answer: that this call fails tells at once that the actor has ended, also where it had no question."""
        threading.Event().wait()

    def _end_after_rest(self) -> None:
        """End once there was nothing to do for long enough."""
        import ray

        while True:
            rest = self._used + self._warm - monotonic()
            if rest > 0:
                threading.Event().wait(rest)
            elif self._busy.acquire(blocking=False):
                ray.kill(ray.get_runtime_context().current_actor)  # Ray is not to start it again
            else:
                threading.Event().wait(min(1.0, self._warm))


class RayReplicas:
    """Actors of a cluster. A record that was lost with one goes to another, since calls to one that Ray is starting
    again fail at once; such failures count for nothing.

    Args:
        names: for each actor its name if it stays, or None if it ends with this process.
        job: what each does.
        resources: CPUs and GPUs of each, as Ray calls them.
        warn: called with what became of those that ended.
        warm_seconds: how long actors that stay do so without work.
    """

    def __init__(
        self,
        names: Sequence[str | None],
        job: Job,
        resources: Mapping[str, float],
        warn: Callable[[str], None],
        warm_seconds: float = 0.0,
    ) -> None:
        self._names, self._job, self._resources = names, job, resources
        self._warn, self._warm = warn, warm_seconds
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, tuple[int, str]] = {}
        self._ready: set[int] = set()
        self._failures = dict.fromkeys(range(len(names)), 0)
        for number in range(len(names)):
            self._make(number)

    @classmethod
    def on(
        cls,
        address: str,
        workers: int | Literal["auto"],
        profile: Profile,
        job: Callable[[int], Job],
        warn: Callable[[str], None],
        warm_seconds: float = 0.0,
    ) -> "RayReplicas":
        """Connect to a cluster and start replicas there.

        Args:
            address: as --cluster takes it.
            workers: how many; ``auto`` for as many as the cluster's GPUs carry, or CPUs where no GPU is needed.
            profile: of the pair.
            job: what each of so many replicas does.
            warn, warm_seconds: as above.

        Raises:
            UsageError: Ray is missing, or no cluster is there.
        """
        ray = connected(address, started=not warm_seconds)
        there = ray.cluster_resources()
        gpus = int(there.get("GPU", 0))
        needed = gpus_needed(profile, gpus)
        threads = 1 if profile.threads == "auto" else profile.threads
        fit = gpus // needed if needed else int(there.get("CPU", 1)) // threads
        count = max(1, fit) if workers == "auto" else workers
        if count > max(1, fit):
            what = f"{needed} GPUs" if needed else f"{threads} CPUs"
            raise UsageError(
                f"{count} replicas of {what} each do not fit on this cluster, which has room for {fit}",
                f"use --workers {max(1, fit)}, or a larger cluster",
            )
        made = job(count)
        names = (
            [None] * count if not warm_seconds else [f"specctl-{fingerprint(made)}-{number}" for number in range(count)]
        )
        return cls(names, made, {"num_cpus": threads, "num_gpus": needed}, warn, warm_seconds)

    @property
    def count(self) -> int:
        return len(self._names)

    @property
    def pids(self) -> list[int]:
        """The ids of the actors' processes, each on its own machine."""
        import ray

        asked = [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in self._actors.values()]
        return list(ray.get(asked))

    def idle(self) -> list[int]:
        asked = {number for number, what in self._calls.values() if what == "answer"}
        return [number for number in sorted(self._ready) if number not in asked]

    def ask(self, replica: int, question: Any) -> None:
        self._calls[self._actors[replica].answer.remote(question)] = replica, "answer"

    def wait(self, seconds: float | None = None) -> list[Event]:
        import ray

        found: list[Event] = []
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=seconds)
        for call in done:
            if call not in self._calls:  # of an actor whose end another call has told
                continue
            number, what = self._calls.pop(call)
            try:
                value = ray.get(call)
            except ray.exceptions.RayActorError as error:
                found += self._lost(number, type(error).__name__)
                continue
            if isinstance(value, Exception):
                raise value
            if what == "begin":
                self._ready.add(number)
                watch = self._actors[number].watch.options(concurrency_group="watch")
                self._calls[watch.remote()] = number, "watch"
            else:
                self._failures[number] = 0
                found.append(Answered(number, value))
        return found

    def close(self) -> None:
        """End the actors, unless they are to stay; what those do that stay is not waited for."""
        import ray

        if not self._warm:
            for actor in self._actors.values():
                with suppress(Exception):  # the cluster may be gone
                    ray.kill(actor)
        self._actors.clear()
        self._calls.clear()
        with suppress(Exception):
            ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self, number: int) -> None:
        """Ask for an actor, or for the one that is there under its name, and let it load."""
        import ray

        name = self._names[number]
        stays: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        threads = {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}}
        made = ray.remote(concurrency_groups={"watch": 1})(Actor).options(
            max_restarts=-1, max_task_retries=0, runtime_env=threads, **self._resources, **(stays if name else {})
        )
        self._actors[number] = made.remote(self._job, number, self._warm)
        self._load(number)

    def _load(self, number: int) -> None:
        # Waits for an actor that is being started, again and again; a question would fail there.
        call = self._actors[number].begin.options(max_task_retries=-1).remote()
        self._calls[call] = number, "begin"

    def _lost(self, number: int, why: str) -> list[Event]:
        ready = number in self._ready
        self._ready.discard(number)
        self._calls = {call: of for call, of in self._calls.items() if of[0] != number}
        self._failures[number] += 1
        name = f"replica {number + 1}"
        if self._failures[number] <= MOST_FAILURES:
            self._warn(f"{name} ended ({why}){'' if ready else ' while it was starting'}; Ray starts it again")
            if why == "ActorDiedError":  # for good, as one does that has rested long enough
                self._make(number)
            else:
                self._load(number)
        else:
            self._warn(
                f"{name} ended ({why}) for the {self._failures[number]}th time in a row; others go on without it"
            )
            del self._actors[number]
        if not self._actors:
            raise ReplicaError("no replica is left on the cluster", "what was finished is kept; --resume goes on")
        return [Lost(number, f"{name} ended ({why})")] if ready else []


def connected(address: str, *, started: bool = True) -> Any:
    """Ray, connected to a cluster.

    Args:
        address: ``ray://HOST:PORT``, ``HOST:PORT``, or ``auto`` for the one that runs on this machine.
        started: whether ``auto`` starts one where none runs; it ends with this process.

    Raises:
        UsageError: Ray is missing, or the cluster is not there.
    """
    if "RAY_AUTH_MODE" not in os.environ and _token_is_there():
        os.environ["RAY_AUTH_MODE"] = "token"  # `ray start` asks for the token wherever there is one
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine needs more than half a minute
    try:
        import ray
    except ImportError as error:
        raise MISSING from error
    quiet = {"logging_level": "error", "namespace": NAMESPACE}
    try:
        try:
            ray.init(address, **quiet)
        except ConnectionError as error:
            if address != "auto":
                raise UsageError(f"there is no Ray cluster at {address}", "start one with: ray start --head") from error
            if not started:
                raise UsageError(
                    "--keep-warm needs a Ray cluster that outlives this command", "start one with: ray start --head"
                ) from error
            ray.init(include_dashboard=False, **quiet)
    except SpecctlError:
        raise
    except Exception as error:  # Ray raises errors of many kinds, bare exceptions among them
        raise ReplicaError(f"Ray cannot connect to {address}: {reason(error)}") from error
    return ray


def _token_is_there() -> bool:
    """Whether this user has a token for Ray clusters, where Ray looks for it."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser().is_file()


def fingerprint(job: Job) -> str:
    """What tells replicas apart that may serve each other's commands: the job with its profile, and versions."""
    setup = {
        name: value.model_dump(mode="json") if isinstance(value, Profile) else value
        for name, value in job.setup.items()
        if name not in job.passing
    }
    versions = {name: version(name) for name in ("specctl", "torch", "transformers")}
    text = json.dumps([job.maker, setup, versions], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
