"""The draft steps of a round, with the newest perhaps still running on the device."""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Union

from specctl.decoding.draws import Mark
from specctl.decoding.logits.token_sampler import TokenSampler
from specctl.models.passes.forward import Numbers
from specctl.models.passes.preparation_time import working_seconds

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Slot:
    """Pinned memory for one copy at a time, ``(F,)`` float64, and the event after the copy."""

    numbers: "torch.Tensor"
    copied: "torch.cuda.Event"

    @classmethod
    def of(cls, count: int) -> "_Slot":
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return cls(torch.empty(count, dtype=torch.float64).pin_memory(), event)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A receipt for numbers that were sent."""

    order: int  # how many tickets were issued before this one
    slot: _Slot | None = None  # where the numbers arrive; None if they are already here
    numbers: tuple[float, ...] = ()  # the numbers, if they are already here


class Readback:
    """Sends small tensors to the host, in the order in which the device computes them.

    A copy into pinned memory is queued like a kernel, so sending does not wait. Receiving waits for that copy and for
    everything queued before it, but for nothing after it. On a CPU there is nothing to wait for.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._free: defaultdict[int, list[_Slot]] = defaultdict(list)  # free slots by F
        self._sent = 0
        self._arrived = 0  # how many tickets have certainly arrived

    def send(self, values: "torch.Tensor") -> Ticket:
        """Queue the copy of ``(F,)`` float64 numbers. Work queued after this call may overwrite them."""
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
        """Wait until the numbers, and all that were sent before them, have arrived."""
        if ticket.slot is not None and ticket.order >= self._arrived:
            ticket.slot.copied.synchronize()
            self._arrived = ticket.order + 1

    def receive(self, ticket: Ticket) -> list[float]:
        """Wait for the numbers and return them; once for each ticket."""
        if ticket.slot is None:
            return list(ticket.numbers)
        self.wait(ticket)
        numbers: list[float] = ticket.slot.numbers.tolist()
        self._free[len(numbers)].append(ticket.slot)
        return numbers

    def drop(self, ticket: Ticket) -> None:
        """Discard numbers that are not needed, without waiting for them."""
        if ticket.slot is not None:
            # A running copy finishes before the next one into the same slot, since both are on one stream.
            self._free[len(ticket.slot.numbers)].append(ticket.slot)


MEMORY = 16  # The fastest of this many steps counts: others included a capture, or shared the core with another process
PRIOR_STEPS, PRIOR_STOPS = 4.0, 1.0  # Prior counts of steps and stops at each position of a round
ENOUGH = 64.0  # At this many steps a position's counts are halved: policies learn, and texts change


def _recent() -> deque[float]:
    return deque(maxlen=MEMORY)


@dataclass(slots=True)
class Lead:
    """Whether the device should start a draft step while the host still reads the token before it.

    After a token's numbers arrive, the host takes h seconds to ask the policy and prepare the next step, while the
    device is idle. A step started earlier takes d seconds. If the policy goes on, this saves min(h, d) seconds. If it
    stops, the verification waits max(d - h, 0) seconds for the unwanted step. With p the probability of a stop,
    starting early pays if (1 - p) min(h, d) > p max(d - h, 0). Stops are counted for each position of a round.

    This changes neither the text nor its distribution, so it may depend on clocks.
    """

    # host, step: the latest measurements of h and d, in seconds
    host: deque[float] = field(default_factory=_recent)
    step: deque[float] = field(default_factory=_recent)
    _asked: list[float] = field(default_factory=list)
    _stopped: list[float] = field(default_factory=list)

    def pays(self, place: int) -> bool:
        """Whether to start the next step after the ``place``-th token of a round, from 1, before that token's numbers
        are read.

        False until a step and the host's work have been timed.
        """
        if not self.host or not self.step:
            return False
        host, step = min(self.host), min(self.step)
        stops = self._chance(place)
        return (1 - stops) * min(host, step) > stops * max(step - host, 0.0)

    def decided(self, place: int, *, stopped: bool) -> None:
        """Count whether the round ended with its ``place``-th token although there was room for another one."""
        while len(self._asked) < place:
            self._asked.append(0.0)
            self._stopped.append(0.0)
        if self._asked[place - 1] >= ENOUGH:
            self._asked[place - 1] /= 2
            self._stopped[place - 1] /= 2
        self._asked[place - 1] += 1
        self._stopped[place - 1] += stopped

    def _chance(self, place: int) -> float:
        asked, stopped = (sums[place - 1] if place <= len(sums) else 0.0 for sums in (self._asked, self._stopped))
        return (stopped + PRIOR_STOPS) / (asked + PRIOR_STEPS)


Fed = Union[Sequence[int], "torch.Tensor"]
"""What a step reads: ids, or ``(1,)`` on the device, the token of the step before it."""


class Reach(Enum):
    """How far steps run ahead of the host: one step where it pays, or the whole round at once."""

    ONE = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A draft step with its pass started."""

    sampler: TokenSampler  # names the step's numbers
    numbers: Sequence[float] | Ticket  # the `TokenSampler`'s numbers if they are on the host, else the ticket for them
    token: Fed  # the input of the next step, if that starts before the numbers are read
    probs: Numbers | None  # ``(V,)``, the distribution that the token was drawn from, if there is one
    mark: Mark | None = None  # the position of the draws before the step; None where no draw may have to be repeated


class StepsAhead:
    """Starts the steps of a round in order, and reads their numbers in order, one step late where that pays.

    While the host reads a token and asks the policy, the device already runs the next step. If the round ends with that
    token, the step is wasted: at most one per round, or where all steps of a round are started at once, those after an
    end-of-sequence token.

    Args:
        start: starts a step; its arguments are the step's input, its number, from 1, and whether it may have to be
            undone.
        take_back: undoes a started step and those after it; its arguments are the step and the number of steps that
            were read.
        device: of the draft.
    """

    def __init__(
        self,
        start: Callable[[Fed, int, bool], StartedStep],
        take_back: Callable[[StartedStep, int], None],
        device: "torch.device",
    ) -> None:
        self.readback = Readback(device)
        self.lead = Lead()
        self._start, self._take_back = start, take_back
        self._steps: list[StartedStep] = []
        self._started: list[float] = []  # when each step was started
        self._landed: list[float] = []  # when each step's numbers arrived
        self._pending: Fed = ()
        self._most, self._reach = 0, Reach.ONE

    def begin(self, pending: Sequence[int], most: int, reach: Reach) -> None:
        """A round begins.

        Args:
            pending: ids that the first step reads.
            most: the largest number of steps.
            reach: how far ahead the device may be.
        """
        self._steps, self._started, self._landed = [], [], []
        self._pending, self._most, self._reach = pending, most, reach

    def read(self, index: int) -> tuple[StartedStep, Sequence[float]]:
        """The step with this number, with its numbers on the host; called once for each step, in order from 1."""
        timed = self._reach is Reach.ONE
        if timed and index > 1:
            self.lead.decided(index - 1, stopped=False)
        before = len(self._steps)
        self._start_upto(index)
        if self._reach is Reach.ALL:
            self._start_upto(self._most)
        elif timed and self.lead.pays(index):
            self._start_upto(index + 1)
        step = self._steps[index - 1]
        if self._reach is Reach.ALL and isinstance(last := self._steps[-1].numbers, Ticket):
            self.readback.wait(last)  # the only wait
        found = self.readback.receive(step.numbers) if isinstance(step.numbers, Ticket) else step.numbers
        self._landed.append(working_seconds())
        if len(self._steps) == index:
            self._pending = [int(found[0])]  # the next step gets its input from the host, like the first
        if timed and index > 1:
            self._learn(index, before)
        return step, found

    def _start_upto(self, count: int) -> None:
        while len(self._steps) < min(self._most, count):
            number = len(self._steps) + 1
            step = self._start(self._pending, number, number > len(self._landed) + 1)
            self._steps.append(step)
            self._pending = step.token
            self._started.append(working_seconds())

    def _learn(self, index: int, before: int) -> None:
        """Record the time of a step and, if another one was started meanwhile, the host's time before it."""
        landed = self._landed[index - 2]
        self.lead.step.append(self._landed[-1] - max(landed, self._started[index - 1]))
        if len(self._steps) > before:
            self.lead.host.append(self._started[before] - landed)

    def end(self) -> None:
        """End the round: undo unwanted steps."""
        read = len(self._landed)
        if self._reach is Reach.ONE and 0 < read < self._most:
            self.lead.decided(read, stopped=True)
        unwanted = self._steps[read:]
        for step in unwanted:
            if isinstance(step.numbers, Ticket):
                self.readback.drop(step.numbers)
        if unwanted:
            self._take_back(unwanted[0], read)

    def probs(self, count: int) -> list[Numbers]:
        """The distributions ``(V,)`` of the round's first tokens; empty if steps have none."""
        return [step.probs for step in self._steps[:count] if step.probs is not None]
