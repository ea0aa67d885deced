"""Numbers on their way from a device to the host, which need not wait for them yet."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Slot:
    """Pinned memory for one copy at a time, ``(F,)`` float64, and the event behind the copy."""

    numbers: "torch.Tensor"
    copied: "torch.cuda.Event"

    @classmethod
    def of(cls, count: int) -> "_Slot":
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return cls(torch.empty(count, dtype=torch.float64).pin_memory(), event)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Numbers that were sent.

    Attributes:
        order: how many were sent before them.
        slot: where they arrive; None where they are here.
        numbers: the numbers if they are here.
    """

    order: int
    slot: _Slot | None = None
    numbers: tuple[float, ...] = ()


class Readback:
    """Sends small tensors to the host in the order in which the device makes them.

    A copy into pinned memory is queued like a kernel, so sending does not wait; receiving waits for that copy and for
    what was queued before it, and for nothing behind it. On a CPU there is nothing to wait for.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._free: defaultdict[int, list[_Slot]] = defaultdict(list)  # by F
        self._sent = 0
        self._arrived = 0  # so many of those sent are known to be here

    def send(self, values: "torch.Tensor") -> Ticket:
        """Queue the copy of numbers ``(F,)`` float64, which may be overwritten by what is queued after this call."""
        order, self._sent = self._sent, self._sent + 1
        if self._device.type != "cuda":
            return Ticket(order, numbers=tuple(values.tolist()))
        import torch

        free = self._free[len(values)]
        slot = free.pop() if free else _Slot.of(len(values))
        slot.numbers.copy_(values, non_blocking=True)

        slot.copied.record(torch.cuda.current_stream(self._device))
        return Ticket(order, slot)

    def wait(self, ticket: Ticket) -> None:
        """Return when the numbers are here, and with them all that were sent before."""
        if ticket.slot is not None and ticket.order >= self._arrived:
            ticket.slot.copied.synchronize()
            self._arrived = ticket.order + 1

    def receive(self, ticket: Ticket) -> list[float]:
        """Wait for the numbers; once for each ticket."""
        if ticket.slot is None:
            return list(ticket.numbers)
        self.wait(ticket)
        numbers: list[float] = ticket.slot.numbers.tolist()
        self._free[len(numbers)].append(ticket.slot)
        return numbers

    def drop(self, ticket: Ticket) -> None:
        """Give up numbers that nobody will read, without waiting for them."""
        if ticket.slot is not None:
            # A copy that is still under way is over before the next one into the same place: both are on one stream.
            self._free[len(ticket.slot.numbers)].append(ticket.slot)
