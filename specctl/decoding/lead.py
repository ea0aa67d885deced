"""When a draft step is worth starting before anybody knows whether it is wanted."""

from collections import deque
from dataclasses import dataclass, field

MEMORY = 16
"""Of so many steps the quickest counts: others were captured, or another process had the core."""
PRIOR_STEPS, PRIOR_STOPS = 4.0, 1.0
"""What is taken to have been seen at each place of a round before anything was."""
ENOUGH = 64.0
"""Once a place was seen so often, what was seen there counts half: policies learn, and texts change."""


def _recent() -> deque[float]:
    return deque(maxlen=MEMORY)


@dataclass(slots=True)
class Lead:
    """Whether the device should start a draft step while the host still reads the token before it.

    Between the arrival of a token's numbers and the start of the next step the host asks the policy and prepares the
    step, h seconds in which the device would stand idle. A step that was started before takes d seconds. If the policy
    goes on, min(h, d) of them are gained; if it stops there, the verification waits max(d - h, 0) seconds for a step
    that nobody wants. With p for the probability of a stop, starting pays if (1 - p) min(h, d) > p max(d - h, 0): for a
    host quicker than a step, if p < h / d. Stops are counted for each place of a round, however they came about.

    What is decided here changes neither a text nor its law, so it may depend on clocks.

    Attributes:
        host, step: h and d as they were measured lately, in seconds.
    """

    host: deque[float] = field(default_factory=_recent)
    step: deque[float] = field(default_factory=_recent)
    _asked: list[float] = field(default_factory=list)
    _stopped: list[float] = field(default_factory=list)

    def pays(self, place: int) -> bool:
        """Whether to start the step behind the ``place``-th token of a round, from 1, before its numbers are read.

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
