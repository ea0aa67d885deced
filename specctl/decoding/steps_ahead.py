"""The draft steps of a round, of which the newest may still be under way on the device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Union

from specctl.decoding.lead import Lead
from specctl.decoding.rows.draws import Mark
from specctl.decoding.rows.reading import Reader
from specctl.models.passes.forward import Numbers
from specctl.models.passes.preparation_time import working_seconds
from specctl.models.passes.readback import Readback, Ticket

if TYPE_CHECKING:
    import torch

Fed = Union[Sequence[int], "torch.Tensor"]
"""What a step reads: ids, or ``(1,)`` on the device, the token of the step before it."""


class Reach(Enum):
    """How far steps run ahead of the host: by one where it pays, or all of a round at once."""

    ONE = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A draft step whose pass has been started.

    Attributes:
        reader: names its numbers.
        numbers: of the `Reader`, if they are on the host; else the ticket for them.
        token: what the next step reads, if it is started before the numbers are read.
        probs: ``(V,)``, the distribution behind the token, if there is one.
        mark: where the draws stood before it; None where nothing may have to be drawn again.
    """

    reader: Reader
    numbers: Sequence[float] | Ticket
    token: Fed
    probs: Numbers | None
    mark: Mark | None = None


class StepsAhead:
    """Starts the steps of a round in order and reads their numbers in order, one step later where that pays.

    While the host reads a token and asks the policy, the device then runs the step behind that token. If the round ends
    with the token, that step was for nothing: at most one of a round, or where all of a round's steps are started
    at once, those behind an end-of-sequence token.

    Args:
        start: starts a step; its arguments are what the step reads, its number, from 1, and whether it may have to be
            taken back.
        take_back: makes it as if a step had not been started, nor those behind it, after so many steps that were read.
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
            self._pending = [int(found[0])]  # the next step is told as the first was
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
        """The round is over: steps that nobody wants are taken back."""
        read = len(self._landed)
        if self._reach is Reach.ONE and 0 < read < self._most:
            self.lead.decided(read, stopped=True)
        unwanted = self._steps[read:]
        for step in unwanted:
            if isinstance(step.numbers, Ticket):
                self.readback.drop(step.numbers)
        if unwanted:
            self._take_back(unwanted[0], read)

    def laws(self, count: int) -> list[Numbers]:
        """The distributions ``(V,)`` behind the first tokens of the round; none if steps have none."""
        return [step.probs for step in self._steps[:count] if step.probs is not None]
