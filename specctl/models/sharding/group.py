"""The processes that hold one model's shards, and the line on which their leader gives orders."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from specctl.models.sharding.message import SIZE, Message, decoded

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others within a pass, and while one is slower to load. A rank that dies is seen at once
by other means; this ends the wait for one that hangs."""
ORDER_TIMEOUT = timedelta(days=365)
"""How long a follower waits for an order: as long as nobody asks for anything."""


def shard_device() -> str:
    """The kind of device that transformers puts shards on: the machine's accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


class ShardGroup:
    """This process's place among the ranks.

    Tensors travel by the backend of their device (NCCL, or gloo on a CPU). Orders travel by gloo, so that a follower
    that waits for one keeps no core of an accelerator busy.

    Args:
        store: a file that does not exist yet, by which the ranks find each other; in a folder of this user's.
        rank: 0 for the leader.
        size: how many ranks there are.

    Attributes:
        sent: messages that this rank broadcast so far.
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
        """Give an order to all followers."""
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
        """Give up the place; what the other ranks still expect of this one fails there."""
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def known_to_transformers(rank: int, size: int) -> Iterator[None]:
    """Tell transformers its place among the ranks, as torchrun does, while it loads a model."""
    told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def _stay_on_this_machine() -> None:
    """Let gloo connect over the loopback device; it would otherwise look up the machine's name, which may lead away."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
