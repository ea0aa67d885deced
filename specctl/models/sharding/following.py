"""What a follower does: the leader's orders, one after the other, until the leader is gone."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from specctl.errors import ModelError
from specctl.models.placing.engine_table import engine_named
from specctl.models.running.engines import EngineSettings
from specctl.models.running.runner import Runner
from specctl.models.sharding.message import KEEP_ALL, Message, Order


class Follower:
    """The shares of the models that this rank holds, and their runners.

    Args:
        load: reads this rank's share of a model, told as in `Leader.load`.
        say: tells the leader a word.
    """

    def __init__(self, load: Callable[[dict[str, Any]], PreTrainedModel], say: Callable[[str], None]) -> None:
        self._load, self._say = load, say
        self._models: list[PreTrainedModel] = []
        self._runners: list[Runner] = []

    def follow(self, receive: Callable[[], Message]) -> None:
        """Do what the leader asks for, without end.

        Args:
            receive: gives the next order.

        Raises:
            ModelError: a model cannot be loaded, or this rank is out of step.
        """
        while True:
            self.obey(receive())

    def obey(self, message: Message) -> None:
        """Do one thing; arguments and errors as in `follow`."""
        if message.order is Order.LOAD:
            self._models.append(self._load(message.told))
            self._say("loaded")
        elif message.order is Order.OPEN:
            self._open(**message.told)
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
