"""The leader of a sharded model: it decides, and its followers repeat what it does with the model."""

import atexit
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NoReturn, TypeVar

import torch
from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.placing.engine_table import engine_named
from specctl.models.running.engines import EngineSettings
from specctl.models.sharding.followers import Followers
from specctl.models.sharding.group import ShardGroup, known_to_transformers
from specctl.models.sharding.leading_runner import LeadingRunner, Sharding
from specctl.models.sharding.message import Message, Order
from specctl.processes.interrupts import interruptible

Result = TypeVar("Result")


class Leader:
    """This process as rank 0 of a group, and its followers. There is one group in a process at a time.

    Args:
        size: how many ranks the group has.
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
        self, kind: Literal["tensor", "pipeline"], told: dict[str, Any], read: Callable[[], PreTrainedModel]
    ) -> tuple[PreTrainedModel, Sharding]:
        """Load a model on all ranks.

        Args:
            kind: how it is split.
            told: what the followers need to read theirs.
            read: reads this rank's.

        Raises:
            ModelError: a rank cannot load its share.
        """

        def work() -> PreTrainedModel:
            with known_to_transformers(0, self.size):
                model = read()
            self.followers.wait_for("loaded")
            return model

        model = self.together(Message.of(Order.LOAD, {**told, "kind": kind, "shards": self.size}), work)
        _in_shards.add(model)
        self._models += 1
        return model, Sharding(self.size, kind, self._models - 1)

    def open(
        self, model: PreTrainedModel, sharding: Sharding, vocabulary: int, name: str, settings: EngineSettings
    ) -> LeadingRunner:
        """Make a runner of a loaded model on all ranks.

        Args:
            model: this rank's share.
            sharding: as `load` gave it.
            vocabulary: the pair's shared vocabulary.
            name: the model's, in messages.
            settings: which engine, one that runs it on every rank, and whether to compile.
        """
        told = {
            "model": sharding.number,
            "vocabulary": vocabulary,
            "name": name,
            "engine": settings.engine,
            "compile": settings.compiles,
            "threads": torch.get_num_threads(),
        }
        runner = self.together(
            Message.of(Order.OPEN, told, runner=self._runners),
            lambda: engine_named(settings.engine).build(model, vocabulary, name, settings),
        )
        assert runner is not None, "an engine that is tried runs whole models only"
        self._runners += 1
        return LeadingRunner(runner, self.together, self._runners - 1, sharding)

    def together(self, message: Message, work: Callable[[], Result]) -> Result:
        """Do what a message asks the followers for, with them. A first Ctrl-C waits for the end of a pass,
        a second one or SIGTERM ends one that is stuck.

        Raises:
            ModelError: a rank failed. No more can be done then: the ranks are out of step.
        """
        if self._closed is None and self.followers.death is not None:
            self._close(self.followers.death.error)
        if self._closed is not None:
            raise ModelError(self._closed, "Load the models again.")
        # What takes minutes and is not needed by a session that goes on is given up at once.
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
        """Messages sent so far, for all models."""
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


def lead(size: int, *, anew: bool = False) -> Leader:
    """This process's leader of a group of ``size`` ranks; another group is ended.

    Args:
        size: how many ranks.
        anew: whether a group of that size is ended too, with the models that it holds.
    """
    global _leader
    if _leader is not None and (anew or _leader.size != size or _leader.followers.death is not None):
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


def is_sharded(model: PreTrainedModel) -> bool:
    """Whether this process has a share of the model only, so that it cannot run it alone."""
    return model in _in_shards


@contextmanager
def _finished_first() -> Iterator[None]:
    """Let a first Ctrl-C take effect after the block, and a second one at once; the main thread alone gets any."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    with interruptible() as pressed:
        yield
    if pressed():
        signal.raise_signal(signal.SIGINT)
