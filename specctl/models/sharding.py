"""A model in shards, one process for each: the leader sends orders, followers repeat its passes."""

import atexit
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

from specctl.errors import ModelError
from specctl.models.passes.forward import Forward
from specctl.models.placing.engine_table import engine_named
from specctl.models.running.engines import EngineSettings
from specctl.models.running.rotating import RotatingPasses
from specctl.models.running.slot import Slot
from specctl.models.running.transforms import Transform
from specctl.outputs import locked, remove_abandoned
from specctl.processes import Arrivals, child_command, interruptible

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZE = 256
"""Numbers of a message, 2 KiB: a pass of up to `masks.WIDEST` tokens needs one, a prompt one for each 245 tokens."""
KEEP_ALL = -1  # In place of a rollback length: nothing is dropped


class Order(IntEnum):
    """The kinds of messages."""

    LOAD = 1
    """Load a model; the arguments are in `Message.values`."""
    OPEN = 2
    """Make a runner of a loaded model, also with `Message.values`."""
    WATCH = 3
    """`Slot.watch`: the layers are the tokens."""
    EXTEND = 4
    """`Slot.extend`."""
    EXTEND_TREE = 5
    """`Slot.extend_tree`."""
    CATCH_UP = 6
    """Only keep a path and roll back, which other messages may also do first."""
    BEGIN = 7
    """`Slot.begin` of a prompt of ``keep`` tokens."""


@dataclass(frozen=True, slots=True)
class Message:
    """One order to followers."""

    order: Order  # the kind of order
    runner: int = 0  # the runner's index, in order of creation
    # the number of cached tokens before the pass, so that a follower notices when it is out of step
    length: int = 0
    rollback: int = KEEP_ALL  # the number of tokens to keep first, or `KEEP_ALL`
    path: Sequence[int] = ()  # the path of the last tree to keep before the rollback; empty for none
    # keep, hidden, before: see `Slot.extend` and `extend_tree`
    keep: int = 0
    hidden: bool = False
    before: int = 0
    tokens: Sequence[int] = ()  # ids; for other orders, bytes of a JSON text, or layers
    parents: Sequence[int] = field(default=())  # of a tree

    @classmethod
    def of(cls, order: Order, values: dict[str, Any], *, runner: int = 0) -> "Message":
        """A message with named values instead of tokens."""
        return cls(order, runner, tokens=list(json.dumps(values).encode()))

    @property
    def values(self) -> dict[str, Any]:
        """The values given to `of`."""
        found: dict[str, Any] = json.loads(bytes(self.tokens))
        return found

    def encoded(self) -> Iterator[torch.Tensor]:
        """``(SIZE,)`` int64 tensors on the CPU; a single one if tokens, parents and path fit."""
        numbers = [
            *(self.order, self.runner, self.length, self.rollback, self.keep, int(self.hidden), self.before),
            *(len(self.path), len(self.tokens), len(self.parents)),
            *self.path,
            *self.tokens,
            *self.parents,
        ]
        for start in range(0, len(numbers), SIZE):
            part = numbers[start : start + SIZE]
            yield torch.tensor([*part, *[0] * (SIZE - len(part))])


HEAD = 10  # Numbers before path, tokens and parents


def decoded(receive: Callable[[], torch.Tensor]) -> Message:
    """The next message.

    Args:
        receive: gives the next ``(SIZE,)`` int64 tensor.
    """
    numbers: list[int] = receive().tolist()
    order, runner, length, rollback, keep, hidden, before, path, tokens, parents = numbers[:HEAD]
    while len(numbers) < HEAD + path + tokens + parents:
        numbers += receive().tolist()
    ends = HEAD + path, HEAD + path + tokens, HEAD + path + tokens + parents
    return Message(
        Order(order),
        runner,
        length,
        rollback,
        tuple(numbers[HEAD : ends[0]]),
        keep,
        bool(hidden),
        before,
        tuple(numbers[ends[0] : ends[1]]),
        tuple(numbers[ends[1] : ends[2]]),
    )


COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for others within a pass or while loading. This timeout is for a rank that hangs; a rank that
ends is noticed at once by other means.
"""
ORDER_TIMEOUT = timedelta(days=365)  # How long a follower waits for an order: the leader may be idle


def shard_device() -> str:
    """The kind of device that transformers puts shards on: the machine's accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


class ShardGroup:
    """This process's rank in the group.

    Tensors use their device's backend (NCCL, or gloo on a CPU). Orders use gloo, so that waiting for one does not keep
    an accelerator busy.

    Args:
        store: a new file through which the ranks find each other; in a private folder of this user.
        rank: 0 for the leader.
        size: how many ranks there are.

    Attributes:
        sent: the number of messages broadcast by this rank.
    """

    def __init__(self, store: Path, rank: int, size: int) -> None:
        _stay_on_this_machine()
        kind = shard_device()
        device = torch.device(kind, rank) if kind != "cpu" else None
        if device is not None:
            torch.accelerator.set_device_index(rank)
        backend = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}[kind]
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if backend == "nccl" else None,
        )
        self.rank, self.size, self.sent = rank, size, 0
        self._orders = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT)

    def send(self, message: Message) -> None:
        """Send an order to all followers."""
        for part in message.encoded():
            dist.broadcast(part, src=0, group=self._orders)
            self.sent += 1

    def receive(self) -> Message:
        """The leader's next order."""

        def part() -> torch.Tensor:
            numbers = torch.empty(SIZE, dtype=torch.int64)
            dist.broadcast(numbers, src=0, group=self._orders)
            return numbers

        return decoded(part)

    def leave(self) -> None:
        """Leave the group; pending collectives of other ranks fail."""
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def known_to_transformers(rank: int, size: int) -> Iterator[None]:
    """Set the rank in the environment as torchrun does, while transformers loads a model."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def _stay_on_this_machine() -> None:
    """Let gloo connect over the loopback device instead of the host name, which may resolve to another machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


class Follower:
    """This rank's shares of models, and their runners.

    Args:
        load: reads this rank's share of a model, from the ``values`` of `Leader.load`.
        say: sends the leader a status report.
    """

    def __init__(self, load: "Callable[[dict[str, Any]], PreTrainedModel]", say: Callable[[str], None]) -> None:
        self._load, self._say = load, say
        self._models: list[PreTrainedModel] = []
        self._runners: list[Slot] = []

    def follow(self, receive: Callable[[], Message]) -> None:
        """Carry out the leader's orders until an error ends them.

        Args:
            receive: returns the next order.

        Raises:
            ModelError: a model cannot be loaded, or this rank is out of step.
        """
        while True:
            self.obey(receive())

    def obey(self, message: Message) -> None:
        """Carry out one order; errors: see `follow`."""
        if message.order is Order.LOAD:
            self._models.append(self._load(message.values))
            self._say("loaded")
        elif message.order is Order.OPEN:
            self._open(**message.values)
        else:
            with torch.inference_mode():
                self._run(message)

    def _open(self, model: int, vocabulary: int, name: str, engine: Any, compile: bool, threads: int) -> None:  # noqa: A002 - the setting's name
        torch.set_num_threads(threads)
        settings = EngineSettings(engine, compile, in_step=True)
        runner = engine_named(engine).build(self._models[model], vocabulary, name, settings)
        assert runner is not None, "an engine that is tried runs whole models only"
        self._runners.append(runner)

    def _run(self, message: Message) -> None:
        runner = self._runners[message.runner]
        if message.path:
            runner.keep_path(message.path)
        if message.rollback != KEEP_ALL:
            runner.rollback(message.rollback)
        if runner.length != message.length:
            raise ModelError(f"out of step: it has {runner.length} tokens cached, the leader {message.length}", "")
        match message.order:
            case Order.WATCH:
                runner.watch(message.tokens)
            case Order.BEGIN:
                runner.begin(message.keep)
            case Order.EXTEND:
                runner.extend(message.tokens, message.keep, hidden=message.hidden)
            case Order.EXTEND_TREE:
                runner.extend_tree(message.tokens, message.parents, before=message.before, hidden=message.hidden)
            case _:
                pass


PROGRAM = "specctl.models.loading.follower"
GRACE = 20.0
"""Seconds after a follower's end in which the leader's pass may fail by itself. After that the process exits, because
NCCL would wait for the dead rank forever, in native code that no exception reaches.
"""
PATIENCE = 2.0
"""Seconds for a pass to end after the signals that should end it. After that the followers are killed, which ends the
pass with an error. This is for stopped followers, for which the leader waits in native code.
"""
LAST_WORDS = 5.0  # Seconds to learn of a follower's end after a collective failed because of it


@dataclass(frozen=True, slots=True)
class Death:
    """How a follower ended."""

    rank: int  # its own
    error: ModelError  # for the user
    at: float  # `monotonic` seconds


class Followers:
    """Followers on this machine: one process each, which exits when this process does.

    Args:
        size: the number of ranks, including this process.

    Attributes:
        store: the file through which the ranks find each other.
        death: of the first follower that ended unexpectedly; None while all run.
        given_up: the signal that led to killing all followers in the middle of a pass.
    """

    def __init__(self, size: int) -> None:
        self._folder = MeetingFolder()
        self.store = self._folder.path / "store"
        self.size = size
        self.death: Death | None = None
        self._stopping = False
        self.given_up: int | None = None
        self._pass_since: float | None = None
        self._presses = 0
        self._arrivals = Arrivals(self._heard)
        self._said: queue.Queue[str] = queue.Queue()
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            ear, mouth = os.pipe()
            log = self._log(rank).open("wb")
            process = subprocess.Popen(
                [*child_command(PROGRAM), str(self.store), str(rank), str(size), str(mouth)],
                stdin=subprocess.PIPE,  # nothing is written to it: it closes when this process ends
                stdout=log,
                stderr=log,
                pass_fds=[mouth],
                start_new_session=True,  # only the leader handles Ctrl-C
            )
            log.close()
            os.close(mouth)
            self._processes.append(process)
            threading.Thread(target=self._listen, args=(rank, process, ear), daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """Their process ids, in the order of their ranks."""
        return [process.pid for process in self._processes]

    def wait_for(self, word: str) -> None:
        """Wait until every follower has sent a report.

        Raises:
            ModelError: one of them ended; the message has its reason.
        """
        missing = self.size - 1
        while missing:
            try:
                missing -= self._said.get(timeout=0.2) == word
            except queue.Empty:
                if self.death is not None:
                    raise self.death.error from None

    def began_pass(self, presses: int = 2) -> None:
        """Note the start of a pass on all ranks; pressing Ctrl-C ``presses`` times ends it."""
        self._presses = presses
        self._pass_since = monotonic()

    def ended_pass(self) -> None:
        self._pass_since = None

    def last_words(self) -> ModelError | None:
        """The death of a follower that may explain a failure; None if all run."""
        until = monotonic() + LAST_WORDS
        while self.death is None and monotonic() < until:
            sleep(0.05)
        return None if self.death is None else self.death.error

    def stop(self) -> None:
        """End all of them."""
        self._stopping = True
        self._arrivals.close()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.remove()

    def _log(self, rank: int) -> Path:
        return self._folder.path / f"rank{rank}.log"

    def _listen(self, rank: int, process: "subprocess.Popen[bytes]", ear: int) -> None:
        """Note a follower's reports and its end."""
        reason: tuple[str, str] | None = None
        with os.fdopen(ear, encoding="utf-8") as lines:
            for line in lines:
                said = json.loads(line)
                if isinstance(said, str):
                    self._said.put(said)
                else:
                    reason = said["message"], said["hint"]
        code = process.wait()
        if self._stopping or self.death is not None:
            return
        self.death = Death(rank, self._obituary(rank, code, reason), monotonic())
        self._end_a_stuck_pass(self.death)

    def _heard(self, number: int) -> None:
        """Note a signal, from a thread, and end a stuck pass."""
        since = self._pass_since
        if since is None:
            return
        self._presses -= number == signal.SIGINT
        if number == signal.SIGTERM or self._presses == 0:
            sleep(PATIENCE)
            if self._pass_since == since and not self._stopping:
                self.given_up = number
                for process in self._processes:
                    process.kill()

    def _end_a_stuck_pass(self, death: Death) -> None:
        while not self._stopping:
            sleep(0.5)
            since = self._pass_since
            if since is not None and monotonic() - max(since, death.at) > GRACE:
                if self.given_up is None:
                    print(f"error: {death.error}", file=sys.stderr, flush=True)
                with suppress(OSError):
                    self._folder.remove()
                os._exit(ModelError.exit_code if self.given_up is None else 128 + self.given_up)

    def _obituary(self, rank: int, code: int, reason: tuple[str, str] | None) -> ModelError:
        subject = f"Process {rank + 1} of the {self.size} that hold the sharded models"
        if reason is not None:
            return ModelError(f"{subject} failed: {reason[0]}", reason[1])
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        log = [line for line in _tail(self._log(rank)) if line.strip()]
        said = f": {log[-1].strip()}" if log and code >= 0 else ""
        return ModelError(
            f"{subject} {how}{said}.",
            "Run the command again, with --resume where it writes an output. If it happens again, see whether memory "
            "ran out: `specctl doctor` shows what each card must hold.",
        )


def _tail(path: Path) -> Sequence[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    except OSError:
        return []


PREFIX = "specctl-shards-"
_LOCK = "lock"


class MeetingFolder:
    """A temporary private folder, locked while this process lives. Folders of killed leaders are removed.

    Attributes:
        path: of the folder.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            remove_abandoned(left, left / _LOCK)
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self.path = Path(self._folder.name)
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        locked(self._lock)

    def remove(self) -> None:
        """Remove the folder and its contents."""
        os.close(self._lock)
        self._folder.cleanup()


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is split."""

    shards: int  # the number of processes
    kind: Literal["tensor", "pipeline"]  # ``tensor``, each a part of every layer; ``pipeline``, each some of the layers
    number: int  # its index among the sharded models, in order of loading


class Together(Protocol):
    """Carries out a message together with the followers."""

    def __call__(self, message: Message, work: Callable[[], Result]) -> Result: ...


class LeadingPasses(Transform):
    """A `Slot` over the leader's share of a model; followers repeat its passes with their shares.

    A pass takes one message, which includes the rollbacks before it. So no decision or delay in the decoding loop can
    bring the ranks out of step.

    Args:
        inner: the slot of this rank's share.
        together: sends an order to the followers and does this rank's part.
        number: the runner's index in messages.
        sharding: how the model is split.
    """

    def __init__(self, inner: Slot, together: Together, number: int, sharding: Sharding) -> None:
        super().__init__(inner)
        self.sharding = sharding
        self.no_rows = "its shards read one text at a time"
        if sharding.kind == "pipeline":
            self.no_trees = "it is a pipeline"
        self._together, self._number = together, number
        self._rollback, self._path = KEEP_ALL, list[int]()

    @property
    def engine(self) -> str:
        return f"{self.inner.engine}, {self.sharding.kind} over {self.sharding.shards}"

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        if hidden:
            self._require_states()
        order = self._order(Order.EXTEND, tokens=tokens, keep=keep, hidden=hidden)
        return self._together(order, lambda: self._extended(tokens, keep, hidden))

    @torch.inference_mode()
    def _extended(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        return self.inner.extend(tokens, keep, hidden=hidden)

    def begin(self, prompt: int) -> None:
        if isinstance(self.inner.passes, RotatingPasses):  # other runners treat all texts alike
            self._together(self._order(Order.BEGIN, keep=prompt), lambda: self.inner.begin(prompt))

    def watch(self, layers: Iterable[int]) -> None:
        self._require_states()
        wanted = list(layers)
        self._together(self._order(Order.WATCH, tokens=wanted), lambda: self.inner.watch(wanted))

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        order = self._order(Order.EXTEND_TREE, tokens=tokens, parents=parents, before=before, hidden=hidden)
        return self._together(order, lambda: self._grown(tokens, parents, before, hidden))

    @torch.inference_mode()
    def _grown(self, tokens: Sequence[int], parents: Sequence[int], before: int, hidden: bool) -> Forward:
        return super().extend_tree(tokens, parents, before=before, hidden=hidden)

    @torch.inference_mode()
    def keep(self, path: Sequence[int]) -> None:
        if self._path or self._rollback != KEEP_ALL:  # a message can carry a path, then a rollback, in this order only
            self._together(self._order(Order.CATCH_UP), lambda: None)
        super().keep(path)
        self._path = list(path)

    def take_back(self, length: int) -> None:
        self.inner.rollback(length)
        self._rollback = length if self._rollback == KEEP_ALL else min(self._rollback, length)

    def _order(self, order: Order, **more: Any) -> Message:
        """An order that first repeats the rollbacks since the last order."""
        message = Message(order, self._number, self.length, self._rollback, self._path, **more)
        self._rollback, self._path = KEEP_ALL, []
        return message

    def _require_states(self) -> None:
        """Raise a ModelError if the hidden states of some layers are on other ranks only."""
        if self.sharding.kind == "pipeline":
            raise ModelError(
                "The hidden states of a model in a pipeline are on the cards of its layers, and a draft head or an "
                "acceptance head reads them.",
                'Set placement = "tensor" or "spread".',
            )


class Leader:
    """This process as rank 0 of a group, with its followers. A process has one group at a time.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._closed: str | None = None
        self._models = self._runners = 0
        self.followers = Followers(size)
        try:
            self.followers.wait_for("ready")
            self.followers.began_pass(presses=1)
            self.group = ShardGroup(self.followers.store, 0, size)
            self.followers.ended_pass()
        except BaseException:
            self.followers.stop()
            raise

    def load(
        self, kind: Literal["tensor", "pipeline"], values: dict[str, Any], read: "Callable[[], PreTrainedModel]"
    ) -> "tuple[PreTrainedModel, Sharding]":
        """Load a model on all ranks.

        Args:
            kind: how it is split.
            values: the followers' arguments for reading their shares.
            read: reads this rank's share.

        Raises:
            ModelError: a rank cannot load its share.
        """

        def work() -> "PreTrainedModel":
            with known_to_transformers(0, self.size):
                model = read()
            self.followers.wait_for("loaded")
            return model

        model = self.together(Message.of(Order.LOAD, {**values, "kind": kind, "shards": self.size}), work)
        _in_shards.add(model)
        self._models += 1
        return model, Sharding(self.size, kind, self._models - 1)

    def open(
        self, model: "PreTrainedModel", sharding: Sharding, vocabulary: int, name: str, settings: EngineSettings
    ) -> Slot:
        """Make a runner of a loaded model on all ranks.

        Args:
            model: this rank's share.
            sharding: from `load`.
            vocabulary: the pair's shared vocabulary.
            name: the model's, in messages.
            settings: which engine, one that runs it on every rank, and whether to compile.
        """
        values = {
            "model": sharding.number,
            "vocabulary": vocabulary,
            "name": name,
            "engine": settings.engine,
            "compile": settings.compiles,
            "threads": torch.get_num_threads(),
        }
        runner = self.together(
            Message.of(Order.OPEN, values, runner=self._runners),
            lambda: engine_named(settings.engine).build(model, vocabulary, name, settings),
        )
        assert runner is not None, "an engine that is tried runs whole models only"
        self._runners += 1
        return Slot(LeadingPasses(runner, self.together, self._runners - 1, sharding))

    def together(self, message: Message, work: Callable[[], Result]) -> Result:
        """Send a message and do the same work here. The first Ctrl-C waits for the pass's end; a second one, or
        SIGTERM, ends a stuck pass.

        Raises:
            ModelError: a rank failed; the ranks are out of step then, and all later calls fail.
        """
        if self._closed is None and self.followers.death is not None:
            self._close(self.followers.death.error)
        if self._closed is not None:
            raise ModelError(self._closed, "Load the models again.")
        # Loading takes minutes and no session depends on it yet, so it is abandoned at once.
        at_once = message.order is Order.LOAD
        with nullcontext() if at_once else _finished_first():
            self.followers.began_pass(presses=1 if at_once else 2)
            try:
                self.group.send(message)
                return work()
            except Exception as error:
                if self.followers.given_up is not None:
                    self.close()
                    raise KeyboardInterrupt from error
                self._close(self._reason(error), error)
            except BaseException:
                self.close()
                raise
            finally:
                self.followers.ended_pass()

    @property
    def messages(self) -> int:
        """The number of messages so far, for all models."""
        return self.group.sent

    def close(self) -> None:
        """End the followers and leave the group."""
        if self._closed is None:
            self._closed = "The processes that held shares of the models have been ended."
            self.followers.stop()
            self.group.leave()

    def _reason(self, error: Exception) -> ModelError:
        if isinstance(error, ModelError):
            return error
        return self.followers.last_words() or ModelError(
            f"A pass of a sharded model failed: {type(error).__name__}: {error}",
            "The processes that hold its shares are out of step now. Run the command again, with --resume where it "
            "writes an output.",
        )

    def _close(self, reason: ModelError, cause: Exception | None = None) -> NoReturn:
        self.followers.ended_pass()
        self.close()
        self._closed = reason.message
        raise reason from cause


_leader: Leader | None = None
_in_shards: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()


def lead(size: int, *, restart: bool = False) -> Leader:
    """This process's leader of a group of ``size`` ranks; a group of another size is closed first.

    Args:
        size: the number of ranks.
        restart: whether to close a group of the same size too, with its models.
    """
    global _leader
    if _leader is not None and (restart or _leader.size != size or _leader.followers.death is not None):
        dismiss()
    if _leader is None:
        _leader = Leader(size)
        atexit.register(dismiss)
    return _leader


def dismiss() -> None:
    """End this process's group, if there is one."""
    global _leader
    if _leader is not None:
        _leader.close()
        atexit.unregister(dismiss)
        _leader = None


def leader() -> Leader:
    """This process's leader.

    Raises:
        ModelError: it has none: the models were released.
    """
    if _leader is None:
        raise ModelError("The processes that held shares of the models have been ended.", "Load the models again.")
    return _leader


def is_sharded(model: "PreTrainedModel") -> bool:
    """Whether this process has only a share of the model, and so cannot run it alone."""
    return model in _in_shards


@contextmanager
def _finished_first() -> Iterator[None]:
    """Delay the first Ctrl-C until the block's end; a second one takes effect at once. Only the main thread receives
    any.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    with interruptible() as pressed:
        yield
    if pressed():
        signal.raise_signal(signal.SIGINT)
