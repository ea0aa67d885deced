"""The seam between work and those who do it: questions go to numbered replicas, events come back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

MOST_FAILURES = 3
"""How often a replica is started again without having answered a question in between."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A replica has answered the question that it had."""

    replica: int
    answer: Any


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica that was ready has ended; the question that it had, if any, has no answer.

    Attributes:
        why: how it ended.
        alone: whether no other question was lost with it, any of which may be why.
    """

    replica: int
    why: str
    alone: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a replica's answer; the answer comes after all of them."""

    replica: int
    value: Any


Event = Answered | Lost | Part


class Replicas(Protocol):
    """Replicas, started and kept alive by whatever runs them: processes of this machine, or a cluster.

    One that ends is started again, by whoever runs it, until it has failed `MOST_FAILURES` times in a row. A replica is
    whatever answers questions, one process or several.
    """

    @property
    def count(self) -> int:
        """How many there are, ready or not."""

    def idle(self) -> Sequence[int]:
        """The numbers of those that are ready and have no question."""

    def ask(self, replica: int, question: Any) -> None:
        """Give an idle replica a question."""

    def wait(self, seconds: float | None = None) -> list[Event]:
        """What happened next, or nothing: a replica may have become ready, or the time may have passed.

        Raises:
            ReplicaError: no replica is left.
            SpecctlError: what a replica raised instead of loading or answering.
        """

    def close(self) -> None:
        """End them all, or leave those that are to stay."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def started(replicas: Replicas) -> None:
    """Wait until a replica is ready; raises as `Replicas.wait` does."""
    while not replicas.idle():
        replicas.wait()
