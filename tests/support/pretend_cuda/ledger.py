"""What a pretended device was asked to do, in order."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["kernel", "replay", "up", "down", "across", "wait"]
"""A kernel; a graph's replay; a copy from the host, to the host, between devices; the host waits for a device."""
LAUNCHES: tuple[Kind, ...] = ("kernel", "replay")
COPIES: tuple[Kind, ...] = ("up", "down", "across")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that was done.

    Attributes:
        kind: see `Kind`.
        what: the operation.
        device: where.
        label: the innermost label at that time, an empty string without any.
        recorded: whether a capture recorded it, so that it was not done.
    """

    kind: Kind
    what: str
    device: torch.device
    label: str
    recorded: bool


@dataclass(frozen=True, slots=True)
class Tally:
    """How often something was done outside of captures."""

    launches: int
    copies: int
    waits: int


class Ledger:
    """All events since it was last cleared."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._labels = [""]

    def note(self, kind: Kind, what: str, device: torch.device, recorded: bool = False) -> None:
        self.events.append(Event(kind, what, device, self._labels[-1], recorded))

    def clear(self) -> None:
        self.events.clear()

    @contextmanager
    def label(self, name: str) -> Iterator[None]:
        self._labels.append(name)
        try:
            yield
        finally:
            self._labels.pop()

    def done(self, label: str | None = None) -> list[Event]:
        """What was done, of one label or of all; what was only recorded is left out."""
        return [event for event in self.events if not event.recorded and label in (None, event.label)]

    def tally(self, label: str | None = None) -> Tally:
        found = Counter(event.kind for event in self.done(label))
        return Tally(sum(found[kind] for kind in LAUNCHES), sum(found[kind] for kind in COPIES), found["wait"])
