"""The runner of the leader's share of a model, whose followers do the same with theirs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from specctl.errors import ModelError
from specctl.models.running.around import Around
from specctl.models.running.rotating import RotatingRunner
from specctl.models.running.runner import Forward, Runner
from specctl.models.sharding.message import KEEP_ALL, Message, Order

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is in shards.

    Attributes:
        shards: how many processes hold it.
        kind: ``tensor``, each a part of every layer; ``pipeline``, each some of the layers.
        number: which of the sharded models it is, in the order in which they were loaded.
    """

    shards: int
    kind: Literal["tensor", "pipeline"]
    number: int


class Together(Protocol):
    """Does what a message asks the followers for, with them."""

    def __call__(self, message: Message, work: Callable[[], Result]) -> Result: ...


class LeadingRunner(Around):
    """A `Runner` of the leader's share of a model, whose followers do the same with theirs.

    Its passes and what is taken back go into one message a pass: a rollback is told with the pass after it. So nothing
    that the loop around it decides, or how long that takes, can bring the ranks out of step.

    Args:
        runner: of this rank's share.
        together: gives an order to the followers and does its part of the work.
        number: the runner's, in messages.
        sharding: how its model is split.
    """

    def __init__(self, runner: Runner, together: Together, number: int, sharding: Sharding) -> None:
        super().__init__(runner)
        self.sharding = sharding
        self.no_rows = "its shards read one text at a time"
        if sharding.kind == "pipeline":
            self.no_trees = "it is a pipeline"
        self._together, self._number = together, number
        self._rollback, self._path = KEEP_ALL, list[int]()

    @property
    def engine(self) -> str:
        return f"{self.runner.engine}, {self.sharding.kind} over {self.sharding.shards}"

    def extend(self, tokens: Sequence[int], keep: int, *, hidden: bool = False) -> Forward:
        if hidden:
            self._require_states()
        order = self._order(Order.EXTEND, tokens=tokens, keep=keep, hidden=hidden)
        return self._together(order, lambda: self._extended(tokens, keep, hidden))

    @torch.inference_mode()
    def _extended(self, tokens: Sequence[int], keep: int, hidden: bool) -> Forward:
        return self.runner.extend(tokens, keep, hidden=hidden)

    def begin(self, prompt: int) -> None:
        if isinstance(self.runner, RotatingRunner):  # to others all texts are alike
            self._together(self._order(Order.BEGIN, keep=prompt), lambda: self.runner.begin(prompt))

    def watch(self, layers: Iterable[int]) -> None:
        self._require_states()
        wanted = list(layers)
        self._together(self._order(Order.WATCH, tokens=wanted), lambda: self.runner.watch(wanted))

    def extend_tree(
        self, tokens: Sequence[int], parents: Sequence[int], *, before: int = 0, hidden: bool = False
    ) -> Forward:
        order = self._order(Order.EXTEND_TREE, tokens=tokens, parents=parents, before=before, hidden=hidden)
        return self._together(order, lambda: self._grown(tokens, parents, before, hidden))

    @torch.inference_mode()
    def _grown(self, tokens: Sequence[int], parents: Sequence[int], before: int, hidden: bool) -> Forward:
        return super().extend_tree(tokens, parents, before=before, hidden=hidden)

    @torch.inference_mode()
    def keep_path(self, path: Sequence[int]) -> None:
        if self._path or self._rollback != KEEP_ALL:  # a message can carry a path and then a rollback, no other order
            self._together(self._order(Order.CATCH_UP), lambda: None)
        super().keep_path(path)
        self._path = list(path)

    def rollback(self, length: int) -> None:
        self.runner.rollback(length)
        self._rollback = length if self._rollback == KEEP_ALL else min(self._rollback, length)

    def _order(self, order: Order, **more: Any) -> Message:
        """An order to catch up with what was taken back since the last one, and then do more."""
        message = Message(order, self._number, self.length, self._rollback, self._path, **more)
        self._rollback, self._path = KEEP_ALL, []
        return message

    def _require_states(self) -> None:
        """Raise a ModelError where the hidden states of some layers are on other ranks alone."""
        if self.sharding.kind == "pipeline":
            raise ModelError(
                "The hidden states of a model in a pipeline are on the cards of its layers, and a draft head or an "
                "acceptance head reads them.",
                'Set placement = "tensor" or "spread".',
            )
