"""The engine on a Ray cluster. Ray places and restarts the actors; it is imported when actors are made."""

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Self
from uuid import uuid4

from specctl import __version__
from specctl.errors import SpecctlError, UsageError, pip_install, reason
from specctl.profile.schema import Profile
from specctl.text_engine.child import Host
from specctl.text_engine.engine import MOST_FAILURES, Answer, Answered, Event, Lost, Part, Places, TextEngine
from specctl.text_engine.job import Job, ReplicaError, gpus_needed, portable, require_gpus

NAMESPACE = "specctl"
_LOOPBACK = "127.0.0.1"


def connected(address: str, *, started: bool = True) -> Any:
    """Ray, connected to a cluster.

    Args:
        address: ``ray://HOST:PORT``, ``HOST:PORT``, or ``auto`` for the one that runs on this machine.
        started: whether ``auto`` starts one where none runs; it ends with this process.

    Raises:
        UsageError: Ray is missing, or the cluster is not there.
    """
    found = running() if address == "auto" else address
    if found is None and not started:
        raise UsageError(
            "--keep-warm needs a Ray cluster that outlives this command", "start one with: ray start --head"
        )
    if found is None:
        alone(os.environ)
    elif "RAY_AUTH_MODE" not in os.environ and _token_is_there():
        os.environ["RAY_AUTH_MODE"] = "token"  # `ray start` asks for the token wherever there is one
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # a busy machine needs more than half a minute
    ray = _imported()
    quiet = {"logging_level": "error", "namespace": NAMESPACE}
    try:
        try:
            ray.init("local", include_dashboard=False, **quiet) if found is None else ray.init(found, **quiet)
        except ConnectionError as error:
            raise UsageError(f"there is no Ray cluster at {found}", "start one with: ray start --head") from error
        if found is None and ray.util.get_node_ip_address() != _LOOPBACK:
            ray.shutdown()
            raise ReplicaError(
                f"Ray {ray.__version__} would listen to other machines", "install another version, or use --workers"
            )
    except SpecctlError:
        raise
    except Exception as error:  # Ray raises errors of many kinds, bare exceptions among them
        raise ReplicaError(f"Ray cannot connect to {address}: {reason(error)}") from error
    return ray


def running() -> str | None:
    """The address of the cluster that runs on this machine, or of the one that Ray's own variable names; else None.

    Clusters on the loopback device belong to other commands, unless `ray start` made them, as on macOS.
    """
    if named := os.environ.get("RAY_ADDRESS"):
        return named
    import psutil  # type: ignore[import-untyped]

    flag = "--gcs-address="
    found = {
        word.removeprefix(flag)
        for process in psutil.process_iter(["cmdline"])
        for word in process.info["cmdline"] or ()
        if word.startswith(flag)
    }
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        last = (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        last = ""
    if last in found:
        return last
    return next((one for one in sorted(found) if not _on_loopback(one)), None)


def alone(environ: MutableMapping[str, str]) -> None:
    """Make the next started cluster private to this process: on the loopback device, with its own token.

    Ray and its processes read both settings when they are imported.
    """
    environ["RAY_AUTH_MODE"] = "token"
    environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # off on Windows and macOS, so that Ray takes the loopback address; on Linux it may anyway
    environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


def _imported() -> Any:
    try:
        import ray
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "ray":
            raise UsageError("--cluster needs Ray, which is not installed", pip_install("ray")) from error
        missing = f"its module {error.name} is missing" if isinstance(error, ModuleNotFoundError) else reason(error)
        raise UsageError(
            f"--cluster needs Ray, which is installed but cannot be imported: {missing}", pip_install("ray")
        ) from error
    return ray


def _on_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token_is_there() -> bool:
    """Whether Ray would find a cluster token of this user."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser().is_file()


GONE = "gone"  # Answer to a call that was meant for an earlier process of the actor
STALE = "stale"  # Answer of an actor whose models' files have changed since it loaded them
RELEASE = 3.0  # Seconds that actors get to end their calls before they are killed


class RayEngine:
    """The `TextEngine` over actors of a Ray cluster.

    Ray restarts actors that end and repeats their calls. A repeated question comes back as lost, and
    `specctl.text_engine.dispatch` resubmits it by its own rules. Parts of an answer arrive together with the answer.

    Args:
        names: for each actor its name if it stays, or None if it ends with this process.
        job: what each does.
        resources: CPUs and GPUs of each, as Ray calls them.
        warn: receives a message when an actor ends.
        warm_seconds: how long idle actors are kept.
        places: how many questions each takes at once.
    """

    def __init__(
        self,
        names: Sequence[str | None],
        job: Job,
        resources: Mapping[str, float],
        warn: Callable[[str], None],
        warm_seconds: float = 0.0,
        *,
        places: int = 1,
    ) -> None:
        self._names, self._job, self._resources = names, job, resources
        self._warn, self._warm = warn, warm_seconds
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, tuple[int, str, int]] = {}  # of an actor, what, and for which of its places
        self._ready: set[int] = set()
        self._lives: dict[int, str] = {}
        self._stale: dict[int, str] = {}
        self._served = False  # whether any actor has been ready
        self._places, self._held = places, [Places(places) for _ in names]
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
        *,
        exclusive: bool = False,
        places: int = 1,
    ) -> "RayEngine":
        """Connect to a cluster and start replicas there.

        Args:
            address: as --cluster takes it.
            workers: how many; ``auto`` for as many as the cluster's GPUs carry, or CPUs where no GPU is needed.
            profile: of the pair.
            job: makes the job, given their number.
            warn, warm_seconds, places: as above.
            exclusive: whether each replica needs devices of its own.

        Raises:
            UsageError: Ray is missing, no cluster is there, or it has no room for them.
        """
        ray = connected(address, started=not warm_seconds)
        there = ray.cluster_resources()
        gpus = int(there.get("GPU", 0))
        if exclusive:
            require_gpus(profile, gpus)
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
        names: list[str | None] = [None] * count
        if warm_seconds:
            known = fingerprint(made)
            _make_room(ray, known)
            names = [f"specctl-{known}-{number}" for number in range(count)]
        return cls(names, made, {"num_cpus": threads, "num_gpus": needed}, warn, warm_seconds, places=places)

    @property
    def count(self) -> int:
        return len(self._names) * self._places

    @property
    def pids(self) -> list[int]:
        """The ids of the actors' processes, each on its own machine."""
        import ray

        asked = [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in self._actors.values()]
        return list(ray.get(asked))

    @property
    def ready(self) -> int:
        return len(self._ready)

    def free(self) -> list[int]:
        return [number * self._places + place for number in sorted(self._ready) for place in self._held[number].free()]

    def submit(self, place: int, question: Any) -> None:
        number, its_place = divmod(place, self._places)
        self._held[number].asked.add(its_place)
        self._call(number, "answer", self._lives[number], question, place=its_place)

    def cancel(self, place: int) -> None:
        """See `TextEngine`; the actor goes on writing, and its answer is ignored."""
        number, its_place = divmod(place, self._places)
        self._held[number].cancelled.add(its_place)

    def wake(self) -> None:
        """Does nothing: `step` returns only when a Ray call does."""

    def step(self, seconds: float | None = None) -> list[Event]:
        import ray

        found: list[Event] = []
        done, _ = ray.wait(list(self._calls), num_returns=1, timeout=seconds)
        for call in done:
            if call not in self._calls:  # the actor's end was already reported by another call
                continue
            number, what, place = self._calls.pop(call)
            try:
                how, value = ray.get(call)
            except ray.exceptions.RayActorError as error:  # ended without a restart, as after its idle time
                found += self._lost(number, reason(error), again=True)
                continue
            if how == GONE:
                found += self._lost(number, "its process died")
            elif how == STALE:
                self._warn(f"replica {number + 1} holds files that were written again since; it is started again")
                self._stale[number] = self._lives[number]
                ray.kill(self._actors[number], no_restart=False)
                self._call(number, "life")
            elif how == "failed" and (what == "answer" or not self._served):
                raise value
            elif how == "failed":  # the others go on
                found += self._lost(number, f"it cannot be loaded: {reason(value)}")
            elif what == "life" and value == self._stale.get(number):  # it takes a moment to end
                self._call(number, "life")
            elif what == "life":
                self._lives[number] = value
                self._call(number, "begin", value)
            elif what == "begin":
                self._ready.add(number)
                self._served = True
                self._call(number, "watch", self._lives[number])
            else:
                parts, answer = value
                if self._held[number].answered(place):
                    here = number * self._places + place
                    found += [*(Part(here, part) for part in parts), Answered(here, answer)]
        return found

    def close(self) -> None:
        """End the actors except those kept warm, without waiting for unfinished calls."""
        import ray

        if not self._warm:
            with suppress(Exception):  # the cluster may be gone
                released = [actor.release.remote() for actor in self._actors.values()]
                watched = [call for call, (_, what, _) in self._calls.items() if what == "watch"]
                ray.wait([*released, *watched], num_returns=len(released) + len(watched), timeout=RELEASE)
            for actor in self._actors.values():
                with suppress(Exception):
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
        """Create an actor, or get the existing one of this name, and let it load."""
        import ray

        name = self._names[number]
        stays: dict[str, Any] = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
        threads = {"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}}
        groups = {"watch": 1, "release": 1, "answers": self._places}
        made = ray.remote(concurrency_groups=groups)(described(ray)).options(
            max_restarts=-1, max_task_retries=-1, runtime_env=threads, **self._resources, **(stays if name else {})
        )
        self._actors[number] = made.remote(self._job, number, self._warm)
        self._call(number, "life")

    def _call(self, number: int, method: str, *arguments: Any, place: int = 0) -> None:
        self._calls[getattr(self._actors[number], method).remote(*arguments)] = number, method, place

    def _lost(self, number: int, why: str, *, again: bool = False) -> list[Event]:
        """Wait for the actor's next process or, with ``again``, recreate the actor, unless it has failed too often."""
        ready = number in self._ready
        self._ready.discard(number)
        self._calls = {call: of for call, of in self._calls.items() if of[0] != number}
        held, name = self._held[number], f"replica {number + 1}"
        alone = len(held.asked) == 1
        lost = held.lost()
        if held.failures <= MOST_FAILURES:
            self._warn(f"{name} ended ({why}){'' if ready else ' while it was starting'}; Ray starts it again")
            if again:
                self._make(number)
            else:
                self._call(number, "life")
        else:
            times = f"for the {held.failures}th time in a row"
            self._warn(f"{name} ended ({why}) {times}; the others go on without it")
            del self._actors[number]
        if not self._actors:
            raise ReplicaError("no replica is left on the cluster", "what was finished is kept; --resume goes on")
        places = [number * self._places + place for place in lost] if ready else []
        return [Lost(place, f"{name} ended ({why})", alone=alone) for place in places]


def fingerprint(job: Job) -> str:
    """A name for interchangeable replicas: hashes of job and versions and of the models' files, joined by a dash."""
    setup = {
        name: value.model_dump(mode="json") if isinstance(value, Profile) else value
        for name, value in job.setup.items()
        if name not in job.passing
    }
    versions = {"specctl": __version__, **{name: version(name) for name in ("torch", "transformers")}}
    found, folder = job.sources, None
    if found is not None and found.relative:
        folder = found.folder
    files = None if found is None else [found.identities, found.state()]
    return f"{_hash([job.maker, setup, versions, folder])}-{_hash(files)}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _make_room(ray: Any, known: str) -> None:
    """End idle replicas of a job whose models' files have changed: nothing will use them, yet they occupy devices."""
    job = known.partition("-")[0]
    for name in ray.util.list_named_actors():
        if name.startswith(f"specctl-{job}-") and not name.startswith(f"specctl-{known}-"):
            with suppress(ValueError):  # it has ended in the meantime
                ray.get_actor(name, NAMESPACE).retire.remote()


class Actor:
    """One replica. After its process dies, Ray restarts it and repeats the calls there.

    So every call but the first names the process (the life) that it is meant for. It returns its outcome: ``done``,
    ``failed``, `GONE` or `STALE`.
    """

    def __init__(self, job: Job, number: int, warm_seconds: float) -> None:
        self._job, self._number, self._warm = job, number, warm_seconds
        self._life = uuid4().hex
        self._answer: _Answers | None = None
        self._state: list[Any] = []
        self._lock, self._busy = threading.Lock(), 0  # calls under way
        self._released = threading.Event()
        self._used = monotonic()
        if warm_seconds:
            threading.Thread(target=self._end_after_rest, name="rest", daemon=True).start()

    def life(self) -> tuple[str, Any]:
        """An id of this process."""
        return "done", self._life

    def begin(self, life: str) -> tuple[str, Any]:
        """Load the models, unless they are loaded and their files unchanged."""

        def load() -> bool:
            if self._answer is None:
                self._answer = _Answers(self._job.begin(self._number))
                self._state = self._job.state()
                return True
            return self._job.state() == self._state

        how, value = self._in(life, load)
        return (how, value) if value is not False else (STALE, None)

    def answer(self, life: str, question: Any) -> tuple[str, Any]:
        """Answer a question; returns the parts and the answer."""
        assert self._answer is not None or life != self._life, "a replica is asked before it is ready"
        answer = self._answer
        return self._in(life, lambda: answer(question) if answer is not None else None)

    def watch(self, life: str) -> tuple[str, Any]:
        """Block until the process ends, so that the caller learns of its end even without a running question."""
        if life == self._life:
            self._released.wait()
        return GONE, None

    def release(self) -> None:
        """End `watch`: when Ray kills an actor, it reports an error for each call that it cannot repeat."""
        self._released.set()

    def retire(self) -> None:
        """Exit without a restart, unless an answer is in progress."""
        import ray

        with self._lock:
            if not self._busy:
                ray.kill(ray.get_runtime_context().current_actor)  # prevents a restart by Ray

    def _in(self, life: str, work: Callable[[], Any]) -> tuple[str, Any]:
        if life != self._life:
            return GONE, None
        with self._lock:
            self._busy += 1
        try:
            return "done", work()
        except Exception as error:  # raised again in the calling process
            return "failed", portable(error)
        finally:
            with self._lock:
                self._busy -= 1
                self._used = monotonic()

    def _end_after_rest(self) -> None:
        """End after a long enough idle time."""
        while True:
            rest = self._used + self._warm - monotonic()
            if rest > 0:
                threading.Event().wait(rest)
            else:
                self.retire()
                threading.Event().wait(min(1.0, self._warm))


def described(ray: Any) -> type[Actor]:
    """`Actor` as a Ray actor class, with threads so that `watch` blocks no call and no call blocks `release`."""

    class Replica(Actor):
        """An `Actor` with threads for `watch`, `release`, `retire` and each answer."""

        @ray.method(concurrency_group="answers")  # type: ignore[untyped-decorator]
        def answer(self, life: str, question: Any) -> tuple[str, Any]:
            return super().answer(life, question)

        @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
        def watch(self, life: str) -> tuple[str, Any]:
            return super().watch(life)

        @ray.method(concurrency_group="release")  # type: ignore[untyped-decorator]
        def release(self) -> None:
            super().release()

        @ray.method(concurrency_group="release")  # type: ignore[untyped-decorator]
        def retire(self) -> None:
            super().retire()

    return Replica


class _Answers:
    """A job's function or engine as a function that several threads may call: returns the parts and the answer.

    Args:
        answer: a function, or an engine of this process.
    """

    def __init__(self, answer: Answer | TextEngine) -> None:
        self._open: dict[Future[Any], list[Any]] = {}
        self._error: Exception | None = None
        self._host: Host | None = None
        self._answer = answer
        if not callable(answer):
            self._host = Host(answer, self._happened)
            threading.Thread(target=self._run, args=(self._host,), name="several answers", daemon=True).start()

    def __call__(self, question: Any) -> tuple[list[Any], Any]:
        """Raises any error that a question causes in the engine, which then ends."""
        if self._host is None:
            assert callable(self._answer)
            return [], self._answer(question)
        future: Future[Any] = Future()
        parts = self._open[future] = []
        self._host.put(future, question)
        if self._error is not None:
            raise self._error
        return parts, future.result()

    def _happened(self, kind: str, value: tuple[Future[Any], Any]) -> None:
        future, found = value
        if kind == "answer":
            del self._open[future]
            future.set_result(found)
        elif kind == "part":
            self._open[future].append(found)
        else:
            self._open[future].clear()

    def _run(self, host: Host) -> None:
        try:
            host.run()
        except Exception as error:
            self._error = error
            for future in list(self._open):
                future.set_exception(error)
