"""Streams: which one is current on which device of each thread, and which has waited for which."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Optional

import torch

if TYPE_CHECKING:
    from tests.support.pretend_cuda.devices import Devices


class Stream:
    """A queue of work on one device.

    Attributes:
        device: its device.
        number: 0 for a device's default stream.
        issued: how much work it was given.
        seen: of other streams, up to which of their work this one has waited.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self.device, self.number = device, number
        self.issued = 0
        self.seen: dict[Stream, int] = {}

    def wait_stream(self, other: "Stream") -> None:
        if other is not self:
            for stream, known in (*other.seen.items(), (other, other.issued)):
                self.seen[stream] = max(self.seen.get(stream, 0), known)

    def knows(self, other: "Stream", work: int) -> bool:
        """Whether it runs behind that work of another stream."""
        return other is self or self.seen.get(other, 0) >= work


class Event:
    """In the place of `torch.cuda.Event`: a point in a stream's work."""

    devices: Optional["Devices"] = None

    def __init__(self, **_: Any) -> None:
        self._at: tuple[Stream, int, float] | None = None

    def record(self, stream: Stream | None = None) -> None:
        assert Event.devices is not None
        found = Event.devices.streams.current() if stream is None else stream
        self._at = found, found.issued, Event.devices.clock.busy[found.device]

    def wait(self, stream: Stream | None = None) -> None:
        assert Event.devices is not None
        behind = Event.devices.streams.current() if stream is None else stream
        if self._at is not None and self._at[0] is not behind:
            behind.seen[self._at[0]] = max(behind.seen.get(self._at[0], 0), self._at[1])

    def synchronize(self) -> None:
        assert Event.devices is not None
        if self._at is not None:
            stream, work, done = self._at
            Event.devices.wait("event.synchronize", stream.device, stream, work, done)


class _Current(threading.local):
    """A thread's own current device and streams."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


class OnStream:
    """In the place of `torch.cuda.StreamContext`; no generator, for that would end by itself where it is abandoned."""

    def __init__(self, streams: "Streams", stream: Stream | None) -> None:
        self._streams, self._stream = streams, stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = self._streams.current_device(), self._streams.current(self._stream.device)
            self._streams.set(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            device, stream = self._before
            self._streams.set(stream)
            self._streams.make_current(device)


class Streams:
    """All streams of some devices."""

    def __init__(self, devices: int) -> None:
        self._numbers = count(1)
        self._default = [Stream(torch.device("cuda", index), 0) for index in range(devices)]
        self.all = [*self._default]
        self._current = _Current()
        self._under_way: list[tuple[Stream, int, Callable[[], None]]] = []

    def index(self, device: Any = None) -> int:
        """A device, as torch's functions take it, by its number."""
        if isinstance(device, int):
            return device
        known = None if device is None else torch.device(device).index
        return self._current.device if known is None else known

    def new(self, device: Any = None, priority: int = 0) -> Stream:  # noqa: ARG002 - torch's signature
        self.all.append(Stream(torch.device("cuda", self.index(device)), next(self._numbers)))
        return self.all[-1]

    def current(self, device: Any = None) -> Stream:
        index = self.index(device)
        return self._current.streams.get(index, self._default[index])

    def current_device(self) -> int:
        return self._current.device

    def make_current(self, device: int) -> None:
        self._current.device = device

    def set(self, stream: Stream) -> None:
        """Make a stream current, and its device too, as torch does."""
        assert stream.device.index is not None
        self._current.device = stream.device.index
        self._current.streams[stream.device.index] = stream

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before, self._current.device = self._current.device, self.index(device)
        try:
            yield
        finally:
            self._current.device = before

    def on_stream(self, stream: Stream | None) -> "OnStream":
        return OnStream(self, stream)

    def issue(self, stream: Stream) -> int:
        """Give a stream one more piece of work; its number."""
        stream.issued += 1
        return stream.issued

    def later(self, stream: Stream, then: Callable[[], None]) -> None:
        """Do something as late as it may happen: when the host has waited for what the stream has been given."""
        self._under_way.append((stream, stream.issued, then))

    def meet(self, device: torch.device, of: Stream | None = None, work: int | None = None) -> None:
        """The host has waited for a device, or for one stream's work: what is launched from now on runs behind it."""
        done = {other: other.issued for other in self.all if other.device == device} if of is None else {of: work or 0}
        for stream in self.all:
            for other, number in done.items():
                stream.seen[other] = max(stream.seen.get(other, 0), number)
        over = [one for one in self._under_way if one[1] <= done.get(one[0], -1)]
        self._under_way = [one for one in self._under_way if one not in over]
        for *_, then in over:
            then()
