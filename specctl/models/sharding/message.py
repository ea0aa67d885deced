"""What the leader of a sharded model tells its followers: numbers in tensors of one fixed size."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

SIZE = 256
"""Numbers of a message, 2 KiB: a pass of up to `masks.WIDEST` tokens needs one, a prompt one for each 245 tokens."""
KEEP_ALL = -1
"""In place of a length to roll back to: nothing is dropped."""


class Order(IntEnum):
    """What a message asks for."""

    LOAD = 1
    """Load a model: ``told`` as `Message.of` packs it."""
    OPEN = 2
    """Make a runner of a loaded model: ``told`` likewise."""
    WATCH = 3
    """`Runner.watch`: the layers are the tokens."""
    EXTEND = 4
    """`Runner.extend`."""
    EXTEND_TREE = 5
    """`Runner.extend_tree`."""
    CATCH_UP = 6
    """Nothing but what every message asks for first: to keep a path and to roll back."""
    BEGIN = 7
    """`Runner.begin` of a prompt of ``keep`` tokens."""


@dataclass(frozen=True, slots=True)
class Message:
    """One order.

    Attributes:
        order: what to do.
        runner: which runner is to do it, by the order in which they were made.
        length: how many tokens it then has cached before the pass, by which a follower sees that it is in step.
        rollback: drop all but so many tokens first, or `KEEP_ALL`.
        path: keep this path of the last tree before that; empty for none.
        keep, hidden, before: as in `Runner.extend` and `extend_tree`.
        tokens: ids; of other orders the bytes of a JSON text, or layers.
        parents: of a tree.
    """

    order: Order
    runner: int = 0
    length: int = 0
    rollback: int = KEEP_ALL
    path: Sequence[int] = ()
    keep: int = 0
    hidden: bool = False
    before: int = 0
    tokens: Sequence[int] = ()
    parents: Sequence[int] = field(default=())

    @classmethod
    def of(cls, order: Order, told: dict[str, Any], *, runner: int = 0) -> "Message":
        """An order with names and values instead of tokens."""
        return cls(order, runner, tokens=list(json.dumps(told).encode()))

    @property
    def told(self) -> dict[str, Any]:
        """The names and values given to `of`."""
        found: dict[str, Any] = json.loads(bytes(self.tokens))
        return found

    def encoded(self) -> Iterator[torch.Tensor]:
        """``(SIZE,)`` int64 tensors on the CPU, one where tokens, parents and path fit."""
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


HEAD = 10
"""Numbers before path, tokens and parents."""


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
