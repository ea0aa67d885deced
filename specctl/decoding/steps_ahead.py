"""The draft steps of a round, of which the newest may still be under way on the device."""

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
    """Numbers that were sent."""

    order: int  # how many were sent before them
    slot: _Slot | None = None  # where they arrive; None where they are here
    numbers: tuple[float, ...] = ()  # the numbers if they are here


class Readback:
    """Sends small tensors to the host in the order in which the device makes them.

    A copy into pinned memory is queued like a kernel, so sending does not wait; receiving waits for that copy and for
    what was queued before it, and for nothing after it. On a CPU there is nothing to wait for.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._free: defaultdict[int, list[_Slot]] = defaultdict(list)  # by F
        self._sent = 0
        self._arrived = 0  # this many of those sent are known to be here

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
        """Give up numbers that are not needed, without waiting for them."""
        if ticket.slot is not None:
            # A copy that is still under way is over before the next one into the same place: both are on one stream.
            self._free[len(ticket.slot.numbers)].append(ticket.slot)


MEMORY = 16  # Of this many steps the quickest counts: others were captured, or another process had the core
PRIOR_STEPS, PRIOR_STOPS = 4.0, 1.0  # What is taken to have been seen at each place of a round before anything was
ENOUGH = 64.0  # Once a place was seen so often, what was seen there counts half: policies learn, and texts change


def _recent() -> deque[float]:
    return deque(maxlen=MEMORY)


@dataclass(slots=True)
class Lead:
    """Whether the device should start a draft step while the host still reads the token before it.

    After a token's numbers arrive the host takes h seconds to ask the policy and prepare the next step; the device
    would stand idle. A step that was started before takes d seconds. If the policy goes on, min(h, d) seconds are
    gained. If it stops, the verification waits max(d - h, 0) seconds for an unwanted step. With p the probability of a
    stop, starting pays if (1 - p) min(h, d) > p max(d - h, 0). Stops are counted for each place of a round.

    This changes neither a text nor its distribution, so it may depend on clocks.
    """

    # host, step: h and d as they were measured lately, in seconds
    host: deque[float] = field(default_factory=_recent)
    step: deque[float] = field(default_factory=_recent)
    _asked: list[float] = field(default_factory=list)
    _stopped: list[float] = field(default_factory=list)

    def pays(self, place: int) -> bool:
        """Whether to start the step after the ``place``-th token of a round, from 1, before its numbers are read.

        False until a step and the host's work have been timed.
        """
        if not self.host or not self.step:
            return False
        host, step = min(self.host), min(self.step)
        stops = self._chance(place)
        return (1 - stops) * min(host, step) > stops * max(step - host, 0.0)

    def decided(self, place: int, *, stopped: bool) -> None:
        """The round ended, or did not, with its ``place``-th token, though there was room for another."""
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
    """How far steps run ahead of the host: by one where it pays, or all of a round at once."""

    ONE = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A draft step whose pass has been started."""

    sampler: TokenSampler  # names its numbers
    numbers: Sequence[float] | Ticket  # of the `TokenSampler`, if they are on the host; else the ticket for them
    token: Fed  # what the next step reads, if it is started before the numbers are read
    probs: Numbers | None  # ``(V,)``, the distribution that the token was drawn from, if there is one
    mark: Mark | None = None  # where the draws stood before it; None where nothing may have to be drawn again


class StepsAhead:
    """Starts the steps of a round in order and reads their numbers in order, one step later where that pays.

    While the host reads a token and asks the policy, the device then runs the step after that token. If the round ends
    with the token, that step was for nothing: at most one of a round, or where all of a round's steps are started
    at once, those after an end-of-sequence token.

    Args:
        start: starts a step; its arguments are what the step reads, its number, from 1, and whether it may have to be
            taken back.
        take_back: makes it as if a step had not been started, nor those after it, after this many steps that were read.
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
        self._started: list[float] = []  # when each of them had been started
        self._landed: list[float] = []  # when the numbers of each were here
        self._pending: Fed = ()
        self._most, self._reach = 0, Reach.ONE

    def begin(self, pending: Sequence[int], most: int, reach: Reach) -> None:
        """A round begins.

        Args:
            pending: ids that its first step reads.
            most: the most steps that it may have.
            reach: how far ahead the device may be.
        """
        self._steps, self._started, self._landed = [], [], []
        self._pending, self._most, self._reach = pending, most, reach

    def read(self, index: int) -> tuple[StartedStep, Sequence[float]]:
        """The step with this number and its numbers on the host; called once for each, in order from 1."""
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
            self.readback.wait(last)  # the one time
        found = self.readback.receive(step.numbers) if isinstance(step.numbers, Ticket) else step.numbers
        self._landed.append(working_seconds())
        if len(self._steps) == index:
            self._pending = [int(found[0])]  # the next step is given as the first was
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
        """Take down what a step took, and if one was started meanwhile, what the host took before it."""
        landed = self._landed[index - 2]
        self.lead.step.append(self._landed[-1] - max(landed, self._started[index - 1]))
        if len(self._steps) > before:
            self.lead.host.append(self._started[before] - landed)

    def end(self) -> None:
        """The round is over: unwanted steps are taken back."""
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
        """The distributions ``(V,)`` of the first tokens of the round; none if steps have none."""
        return [step.probs for step in self._steps[:count] if step.probs is not None]
